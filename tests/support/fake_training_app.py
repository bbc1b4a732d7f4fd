"""Runs the real app without importing torch, which would take two core-seconds per start.

python fake_training_app.py [ARGUMENTS OF sae-tui]

Jobs launched by the app run fake training under real supervisors. The doctor reports a CPU build of torch. On SIGUSR1
and after a crash, the app writes the stack traces of its threads to `stacks.txt` in its initial working directory.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

from sae_tui.cli import main
from sae_tui.doctor import torch_build
from sae_tui.jobs import detach

FAKE_SUPERVISOR = Path(__file__).parents[1] / "jobs" / "fake_supervisor.py"
FAKE_TORCH = torch_build.TorchBuild("2.6.0", None, False, 0, [], None, None, None)


if __name__ == "__main__":
    stacks = open("stacks.txt", "w")  # noqa: SIM115
    detach.start.__defaults__ = ((sys.executable, str(FAKE_SUPERVISOR)),)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    torch_build._ask = lambda box: (FAKE_TORCH, "")
    sys.exit(main())
