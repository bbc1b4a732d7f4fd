"""The app as ever, but jobs that it launches run ranks that need no torch: real supervisors, stand-in trainings.

python fake_training_app.py [ARGUMENTS OF sae-tui]
"""

from __future__ import annotations

import sys
from pathlib import Path

from sae_tui.cli import main
from sae_tui.jobs import detach

FAKE_SUPERVISOR = Path(__file__).parents[1] / "jobs" / "fake_supervisor.py"

if __name__ == "__main__":
    detach.start.__defaults__ = ((sys.executable, str(FAKE_SUPERVISOR)),)
    sys.exit(main())
