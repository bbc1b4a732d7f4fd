"""Measures memory, and the CPU time for opening and leaving each screen, minus the idle dashboard's CPU time.

PYTHONPATH=tests python tests/benchmarks/keys_cost.py [--times 20] [--size 120x40]

Runs the app on simulated GPUs in a pseudo-terminal, with a finished job in the list. The limit is 100 ms, which a
person perceives as instantaneous (Miller 1968). The first opening is reported separately, because the app keeps some
screens; at 200x60, the launch form shows all settings. After a tour of all screens, the memory limit is 60 MiB.
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
LIMIT_MIB = 60
SCREENS = {
    "launch (n)": ("n", "Review"),
    "job (Enter)": ("\r", "Log of rank 0"),
    "log (l)": ("l", "& Only"),
    "settings (,)": (",", "Settings ·"),
    "help (?)": ("?", "GPUs above"),
    "commands (ctrl+p)": ("\x10", "Theme: light"),
    "question (D)": ("D", "restore them"),
    # This screen comes last, because it imports torch in another process, which takes some seconds.
    "doctor (d)": ("d", "Refresh"),
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
            report_memory("at the start", terminal)
            for name, (key, shows) in SCREENS.items():
                report(name, terminal, key, shows, options.times, idle)
            report_memory("after the tour", terminal)
        finally:
            box.close()


def report(name: str, terminal: Terminal, key: str, shows: str, times: int, idle: float) -> None:
    """Print a line for a screen: the CPU time to open and leave it, and the time until it is readable."""
    latencies: list[float] = []

    def press() -> None:
        asked = time.monotonic()
        terminal.send(key)
        terminal.wait_for(shows)
        latencies.append(time.monotonic() - asked)
        terminal.read(0.2)
        terminal.send(ESC)
        terminal.wait_for(lambda text: shows not in text)
        terminal.read(0.1)

    costs = []
    for _ in range(times):
        began = time.monotonic()
        cpu = spent(terminal, press)
        costs.append(cpu - idle * (time.monotonic() - began))
    shown = 1000 * sorted(latencies)[len(latencies) // 2]
    of_limit = f"{shown / LIMIT_MS:5.2f} of the limit"
    cpu_ms = 1000 * sum(costs) / times
    print(
        f"{name:20} {cpu_ms:6.0f} ms of a core   shown after {shown:5.0f} ms  {of_limit}   "
        f"first: {1000 * costs[0]:5.0f} ms of a core, shown after {1000 * latencies[0]:5.0f} ms"
    )


def report_memory(when: str, terminal: Terminal) -> None:
    with open(f"/proc/{terminal.process.pid}/statm") as stream:
        used = int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    print(f"memory {when:14} {used:6.1f} MiB  {used / LIMIT_MIB:5.2f} of the limit")


def spent(terminal: Terminal, what: Callable[[], None]) -> float:
    """Return how many CPU seconds the app uses while `what` is running."""
    before, _ = terminal.usage()
    what()
    after, _ = terminal.usage()
    return after - before


if __name__ == "__main__":
    main()
