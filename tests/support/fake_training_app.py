"""The app as ever, but nothing of it imports torch, which takes two seconds of a core each time.

python fake_training_app.py [ARGUMENTS OF sae-tui]

Jobs that it launches run stand-in trainings under real supervisors; the doctor is told of a torch for CPUs.
With NO_EDITOR set it has no terminal to give to an editor.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from textual.app import App, SuspendNotSupported

from sae_tui.cli import main
from sae_tui.doctor import torch_build
from sae_tui.jobs import detach

FAKE_SUPERVISOR = Path(__file__).parents[1] / "jobs" / "fake_supervisor.py"
FAKE_TORCH = torch_build.TorchBuild("2.6.0", None, False, 0, [], None, None, None)


def no_editor(app: App[None]) -> None:
    raise SuspendNotSupported("no terminal for an editor")


if __name__ == "__main__":
    detach.start.__defaults__ = ((sys.executable, str(FAKE_SUPERVISOR)),)
    torch_build._ask = lambda box: (FAKE_TORCH, "")
    if os.environ.get("NO_EDITOR"):
        App.suspend = no_editor
    sys.exit(main())
