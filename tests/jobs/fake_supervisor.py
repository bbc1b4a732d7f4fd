"""The real supervisor, with ranks that need no torch."""

import os
import sys
from pathlib import Path

from sae_tui.jobs.launchers import local
from sae_tui.jobs.supervisor import supervise
from sae_tui.jobs.supervisor.supervise import main

if __name__ == "__main__":
    supervise.RESTART_AFTER_S = 0.1
    local.KILL_AFTER_S = float(os.environ.get("FAKE_KILL_AFTER_S", local.KILL_AFTER_S))
    fake_rank = Path(__file__).with_name("fake_rank.py")
    sys.exit(main(sys.argv[1:], command=lambda spec: [sys.executable, str(fake_rank), str(spec)]))
