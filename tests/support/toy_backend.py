"""An example of a new launch backend with its registry entry.

The backend starts ranks with low CPU priority through `nice`.

python -P toy_backend.py DATA_DIR JOB_ID        a job's supervisor with this backend registered
python -P toy_backend.py rank SPEC              a rank with this backend registered, which prints its niceness
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.local import RankGroup
from sae_tui.jobs.supervisor import supervise
from trainer.contract.errors import Problem
from trainer.contract.settings.catalog import LAUNCH_BACKENDS, BackendEntry
from trainer.contract.settings.declare import about
from trainer.contract.settings.job import JobConfig


class NiceSettings(msgspec.Struct, frozen=True):
    """The settings of this backend."""

    niceness: Annotated[int, about("Niceness of a rank: 19 is the lowest CPU priority.", ge=0, le=19)] = 5


class NiceRanks(RankGroup):
    """Ranks on this machine, each started through `nice`."""

    def __init__(self, setup: AttemptSetup) -> None:
        settings = setup.config.launch.settings
        assert isinstance(settings, NiceSettings)

        def command(spec: Path) -> list[str]:
            return ["nice", "-n", str(settings.niceness), *setup.command(spec)]

        super().__init__(msgspec.structs.replace(setup, command=command))


def check_gpus(job: JobConfig) -> list[Problem]:
    """Warn if GPUs are requested, because niceness has no effect on a GPU."""
    message = '"nice" lowers only the CPU priority; use "cpu"'
    return [] if str(job.launch.gpus).startswith("cpu") else [Problem("launch.gpus", message, "warning")]


ENTRY = BackendEntry(
    f"{__name__}:NiceRanks", "Ranks with a low CPU priority.", NiceSettings, check=f"{__name__}:check_gpus"
)

if __name__ == "__main__":
    LAUNCH_BACKENDS["nice"] = ENTRY
    if sys.argv[1] == "rank":
        from trainer.cli import main

        print(f"niceness {os.nice(0)}", flush=True)
        sys.exit(main(sys.argv[1:]))
    sys.exit(supervise.main(sys.argv[1:], command=lambda spec: [sys.executable, "-P", __file__, "rank", str(spec)]))
