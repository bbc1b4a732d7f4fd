"""A rank that has hardly any memory while its speed is measured: `starved.py SPEC.json RANK MIB`.

Only its address space is limited: to MIB more than it uses when the measurement begins, and only until that ends.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from trainer.contract.runs.rank_spec import read_spec
from trainer.parallel import calibrate
from trainer.ranks.rank import main


def starve(mib: int) -> None:
    """Limit the memory of every measurement of this process from now on."""
    measure = calibrate.measure

    def starving(*arguments: Any) -> Any:
        before, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + mib * 2**20, hard))
        try:
            return measure(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (before, hard))

    calibrate.measure = starving


def address_space() -> int:
    match = re.search(r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return 1024 * int(match[1])


if __name__ == "__main__":
    spec_file, rank, mib = sys.argv[1:]
    if os.environ["RANK"] == rank:
        starve(int(mib))
    main(read_spec(Path(spec_file)))
