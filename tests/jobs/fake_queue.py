"""Runs the real queue process, which starts real supervisors with ranks that do not need torch."""

import functools
import sys
from pathlib import Path

from sae_tui.jobs import detach
from sae_tui.jobs.queue_process import main

FAKE_SUPERVISOR = [sys.executable, str(Path(__file__).with_name("fake_supervisor.py"))]


def run(arguments: list[str]) -> int:
    return main(arguments, functools.partial(detach.start, command=FAKE_SUPERVISOR))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
