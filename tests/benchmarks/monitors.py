"""Compares the cost of keeping a GPU monitor open: this app, nvitop and nvtop on the same GPUs in the same run.

python tests/benchmarks/monitors.py [--gpus 8] [--seconds 60] [--size 120x40] [--nvitop PATH] [--nvtop PATH]

Each monitor runs in turn in its own pseudo-terminal, with one sample per second. A fake libnvidia-ml.so.1 simulates
GPUs whose values change constantly, with a process on each GPU. The last column is this app's value as a percentage of
its limit at 120x40; at 200x60, the app may send twice as many bytes. Monitors that are not installed are listed and
skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from app_cost import build
from support.terminal import Terminal
from support.tui import record_job, record_metrics

from trainer.contract.paths import DataDir
from trainer.contract.store.states import JobState

STARTS = 5
# The number of finished jobs. In this app, the cursor moves through these jobs; in the other monitors, it moves through
# processes.
JOBS = 8
KEYS_PER_S = 2
DOWN, UP = "\x1b[B", "\x1b[A"
LIMITS = {
    "first paint, best of 5 (s)": 0.5,
    "CPU-s per minute": 1.0,
    "CPU-s per minute, 2 keys/s": 3.0,
    "peak memory (MiB)": 60,
    "KB/s to the terminal": 3,
    "key to screen, median (ms)": 20,
    "key to screen, longest (ms)": 60,
    "NVML calls per second": 100,
}


@dataclass(frozen=True)
class Monitor:
    """A GPU monitor: its command, a check that its first screen is complete, and its quit key."""

    name: str
    argv: list[str]
    shows: Callable[[str], bool]
    leave: str = "q"


def main() -> None:
    options = parse()
    columns, rows = map(int, options.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        record_jobs(DataDir(Path(folder) / "data"))
        workers = [subprocess.Popen(["sleep", "3600"]) for _ in range(options.gpus)]
        try:
            env = os.environ | {
                "LD_LIBRARY_PATH": str(library),
                "FAKE_NVML_GPUS": str(options.gpus),
                "FAKE_NVML_PIDS": ",".join(str(each.pid) for each in workers),
                "FAKE_NVML_LOG": f"{folder}/calls",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            }
            figures = {
                each.name: measure(each, columns, rows, env, options.seconds) for each in monitors(options, folder)
            }
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    print_table(figures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--nvitop", default="nvitop")
    parser.add_argument("--nvtop", default="nvtop")
    return parser.parse_args()


def record_jobs(data: DataDir) -> None:
    data.root.mkdir(mode=0o700)
    for n in range(JOBS):
        job = record_job(data, f"job {n + 1}", JobState.FINISHED, total_steps=400)
        record_metrics(data, job, steps=100)


def monitors(options: argparse.Namespace, folder: str) -> list[Monitor]:
    """Return this app and all other installed monitors."""
    last = options.gpus - 1
    found = [
        Monitor(
            "sae-tui",
            [sys.executable, "-m", "sae_tui", "--data-dir", f"{folder}/data"],
            lambda text: text.count("H200") >= options.gpus and f"job {JOBS}" in text,
        )
    ]
    for name, argv, shows in (
        ("nvitop", [options.nvitop, "-m"], lambda text: f"│  {last} " in text or f"│   {last} " in text),
        ("nvtop", [options.nvtop], lambda text: "H200" in text and "GPU" in text),
    ):
        program = shutil.which(argv[0])
        if program:
            found.append(Monitor(name, [program, *argv[1:]], shows))
        else:
            print(f"{name} is not installed; set its path with --{name}")
    return found


def measure(monitor: Monitor, columns: int, rows: int, env: Mapping[str, str], seconds: float) -> dict[str, float]:
    """Measure a monitor during start-up, while idle, and while keys are being pressed."""

    def begin() -> tuple[Terminal, float]:
        terminal = Terminal(monitor.argv, columns=columns, rows=rows, env=env)
        terminal.wait_for(monitor.shows)
        return terminal, time.monotonic() - terminal.started

    def end(terminal: Terminal) -> None:
        terminal.send(monitor.leave)
        terminal.wait_for_exit()
        terminal.close()

    end(begin()[0])  # only the first start byte-compiles modules and creates folders
    paints = []
    for _ in range(STARTS):
        terminal, paint = begin()
        end(terminal)
        paints.append(paint)
    for log in Path(env["FAKE_NVML_LOG"]).parent.glob("calls.*"):
        log.unlink()
    terminal, _ = begin()
    terminal.read(10)  # until the charts have some history
    sent, cpu, since = terminal.bytes_read, terminal.usage()[0], time.monotonic()
    terminal.read(seconds)
    elapsed = time.monotonic() - since
    idle = (terminal.usage()[0] - cpu) * 60 / elapsed
    rate = (terminal.bytes_read - sent) / elapsed / 1000
    cpu, since = terminal.usage()[0], time.monotonic()
    latencies = press_keys(terminal, seconds)
    busy = (terminal.usage()[0] - cpu) * 60 / (time.monotonic() - since)
    peak = terminal.usage()[1] / 2**20
    lived = time.monotonic() - terminal.started
    end(terminal)
    values = (min(paints), idle, busy, peak, rate, statistics.median(latencies), max(latencies))
    return dict(zip(LIMITS, (*values, n_calls(Path(env["FAKE_NVML_LOG"])) / lived), strict=True))


def press_keys(terminal: Terminal, seconds: float) -> list[float]:
    """Move the cursor down and up for `seconds`; return how many milliseconds each key takes to have an effect.

    A periodic refresh that coincides with a key press is mistaken for its effect, which favours all programs equally.
    """
    latencies = []
    deadline = time.monotonic() + seconds
    keys = 0
    while time.monotonic() < deadline:
        began, before = time.monotonic(), terminal.bytes_read
        terminal.send(UP if keys % 8 >= 4 else DOWN)
        keys += 1
        while terminal.bytes_read == before and time.monotonic() - began < 1 / KEYS_PER_S:
            terminal.read(0.001)
        if terminal.bytes_read > before:
            latencies.append(1000 * (time.monotonic() - began))
        terminal.read(max(0.0, 1 / KEYS_PER_S - (time.monotonic() - began)))
    return latencies or [float("nan")]


def n_calls(log: Path) -> int:
    """Return the number of calls that the fake library has counted."""
    lines = (line for each in log.parent.glob(f"{log.name}.*") for line in each.read_text().splitlines())
    return sum(int(line.split()[2]) for line in lines)


def print_table(figures: Mapping[str, Mapping[str, float]]) -> None:
    print(f"{'':30}" + "".join(f"{name:>10}" for name in figures) + f"{'limit':>10}{'of limit':>10}")
    for name, limit in LIMITS.items():
        row = "".join(f"{each[name]:10.2f}" for each in figures.values())
        print(f"{name:30}{row}{limit:10g}{figures['sae-tui'][name] / limit:10.0%}")


if __name__ == "__main__":
    main()
