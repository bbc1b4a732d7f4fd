"""`python -m sae_tui.gpu.read SOURCE`: every GPU once, as JSON; by a process of its own, which a driver may hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from sae_tui.gpu import load_source
from sae_tui.gpu.base import GpuSample, SourceUnavailable
from sae_tui.gpu.once import open_source, read_all
from trainer.contract.errors import UserError
from trainer.contract.json_file import decoded


def samples_of(output: bytes) -> tuple[GpuSample, ...]:
    """What the process printed; raises `ValueError` where that is something else."""
    return decoded(output, tuple[GpuSample, ...])


def main(arguments: Sequence[str]) -> int:
    """`SOURCE` may end in `:COUNT` for as many simulated cards."""
    name, _, count = arguments[0].partition(":")
    try:
        source = load_source(name, **({"count": int(count)} if count else {}))
        found = read_all(source, open_source(source))
    except (SourceUnavailable, UserError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    # A thread may hang in the driver, and would keep the process from ending.
    os._exit(main(sys.argv[1:]))
