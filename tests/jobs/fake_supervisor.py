"""The real supervisor, with ranks that need no torch."""

import sys
from pathlib import Path

from sae_tui.jobs.supervise import main

if __name__ == "__main__":
    fake_rank = Path(__file__).with_name("fake_rank.py")
    sys.exit(main(sys.argv[1:], command=lambda spec: [sys.executable, str(fake_rank), str(spec)]))
