"""Measures the CPU time for opening and leaving each screen, minus the CPU time of the idle dashboard.

PYTHONPATH=tests python tests/benchmarks/keys_cost.py [--times 20] [--size 120x40]

Runs the app on simulated GPUs in a pseudo-terminal, with a finished job in the list. The limit is 100 ms, which a
person perceives as instantaneous (Miller 1968).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from support.box import ESC, Box
from support.terminal import Terminal
from support.tui import record_metrics

from trainer.contract.store.states import JobState

LIMIT_MS = 100
SCREENS = {
    "launch (n)": ("n", "Review"),
    "job (Enter)": ("\r", "Log of rank 0"),
    "log (l)": ("l", "& Only"),
    "doctor (d)": ("d", "Check again"),
    "help (?)": ("?", "GPUs above"),
    "commands (ctrl+p)": ("\x10", "Theme: light"),
    "question (D)": ("D", "restore them"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--size", default="120x40")
    options = parser.parse_args()
    # Measure the app in this checkout, even if another version is installed.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as folder:
        box = Box(Path(folder))
        record_metrics(box.data, box.record_job("finished", JobState.FINISHED, total_steps=400), steps=100, ranks=1)
        try:
            terminal = box.app(*map(int, options.size.split("x")))
            terminal.read_until_quiet(0.5, 60)
            idle = spent(terminal, lambda: terminal.read(5)) / 5
            for name, (key, shows) in SCREENS.items():
                report(name, terminal, key, shows, options.times, idle)
        finally:
            box.close()


def report(name: str, terminal: Terminal, key: str, shows: str, times: int, idle: float) -> None:
    """Print a line for a screen: the CPU time to open and leave it, and the time until it is readable."""
    latencies: list[float] = []

    def press() -> None:
        for _ in range(times):
            asked = time.monotonic()
            terminal.send(key)
            terminal.wait_for(shows)
            latencies.append(time.monotonic() - asked)
            terminal.read(0.2)
            terminal.send(ESC)
            terminal.wait_for(lambda text: shows not in text)
            terminal.read(0.1)

    began = time.monotonic()
    cpu = spent(terminal, press) - idle * (time.monotonic() - began)
    shown = 1000 * sorted(latencies)[len(latencies) // 2]
    of_limit = f"{shown / LIMIT_MS:5.2f} of the limit"
    print(f"{name:20} {1000 * cpu / times:6.0f} ms of a core   shown after {shown:5.0f} ms  {of_limit}")


def spent(terminal: Terminal, what: Callable[[], None]) -> float:
    """Return the CPU seconds used by the app while `what` is running."""
    before, _ = terminal.usage()
    what()
    after, _ = terminal.usage()
    return after - before


if __name__ == "__main__":
    main()
