"""Measures the cost of keeping the app open: start-up time, CPU time, memory, and bytes sent to the terminal.

python tests/benchmarks/app_cost.py [--gpus 8] [--jobs 0] [--seconds 60] [--view aggregated|per_gpu] [--size 120x40]

Runs `sae-tui` from the working folder in a pseudo-terminal, with simulated NVML GPUs whose values change constantly,
and with jobs that log one step per second. Prints each result as a percentage of its limit (2.0 CPU-s per minute, 60
MiB, 3 KB/s). The start-up time is compared with that of a Textual app that shows a single word.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from support.terminal import Terminal
from support.tui import record_job, record_metrics

from trainer.contract.paths import DataDir
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.states import JobState

EMPTY = """
from textual.app import App, ComposeResult
from textual.widgets import Static

class Empty(App[None]):
    def compose(self) -> ComposeResult:
        yield Static("painted")

Empty().run()
"""
STARTS = 5
FAKE_NVML = Path(__file__).parents[1] / "gpu" / "fake_nvml"


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        columns, rows = map(int, options.size.split("x"))
        data = Path(folder) / "data"
        data.mkdir()
        (data / "settings.toml").write_text(f'monitor_view_default = "{options.view}"\n')
        env = os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_GPUS": str(options.gpus), "FAKE_NVML_PIDS": ""}
        argv = [sys.executable, "-m", "sae_tui", "--data-dir", str(data)]
        warm_up(argv, columns, rows, env)
        floor = min(start([sys.executable, "-c", EMPTY], "painted", columns, rows, env) for _ in range(STARTS))
        least = min(start(argv, "Extract  ", columns, rows, env) for _ in range(STARTS))
        keep_training(DataDir(data), options.jobs)
        terminal = Terminal(argv, columns=columns, rows=rows, env=env)
        jobs = "job 1" if options.jobs else "Extract  "
        terminal.wait_for(lambda text: jobs in text and text.count("H200") >= options.gpus)
        start_up, first_bytes = time.monotonic() - terminal.started, terminal.bytes_read
        terminal.read(10)  # wait until the sparklines have some history
        cpu, _ = terminal.usage()
        read, since = terminal.bytes_read, time.monotonic()
        terminal.read(options.seconds)
        elapsed = time.monotonic() - since
        cpu_after, peak = terminal.usage()
        report(start_up, first_bytes, (cpu_after - cpu) * 60 / elapsed, peak, (terminal.bytes_read - read) / elapsed)
        print(f"best of {STARTS} starts         {least:8.2f} s     {least / 0.5:6.0%} of 0.5")
        print(f"of an empty Textual app {floor:8.2f} s")
        print(terminal.text)
        left = time.monotonic()
        terminal.send("q")
        terminal.wait_for_exit()
        print(f"quit                    {time.monotonic() - left:8.2f} s")
        terminal.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--view", default="aggregated", choices=["aggregated", "per_gpu"])
    parser.add_argument("--size", default="120x40")
    return parser.parse_args()


def build(folder: Path) -> Path:
    """Compile a fake libnvidia-ml.so.1 and return its folder."""
    target = folder / "libnvidia-ml.so.1"
    flags = ["-O2", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(["gcc", *flags, "-o", str(target), str(FAKE_NVML / "fake_nvml.c"), "-lm", "-lpthread"], check=True)
    return folder


def warm_up(argv: list[str], columns: int, rows: int, env: dict[str, str]) -> None:
    """Start and quit the app once; only the first start byte-compiles modules and creates the stores."""
    terminal = Terminal(argv, columns=columns, rows=rows, env=env)
    terminal.wait_for("Extract  ", 60)
    terminal.send("q")
    terminal.wait_for_exit()
    terminal.close()


def start(argv: list[str], shown: str, columns: int, rows: int, env: dict[str, str]) -> float:
    """Start an app and return how many seconds it takes to draw the text `shown`."""
    terminal = Terminal(argv, columns=columns, rows=rows, env=env)
    terminal.wait_for(shown)
    seconds = time.monotonic() - terminal.started
    terminal.send("\x11")
    terminal.wait_for_exit()
    terminal.close()
    return seconds


def keep_training(data: DataDir, n_jobs: int) -> None:
    """Record running jobs on this host, and log one step per second for each job while this process is running.

    This process acts as the jobs' supervisor.
    """
    fields = {"host": socket.gethostname(), "total_steps": 10_000, "created": time.time()}
    jobs = [record_job(data, f"job {n + 1}", JobState.RUNNING, **fields) for n in range(n_jobs)]
    for job in jobs:
        record_metrics(data, job, steps=100)
    threading.Thread(target=log_steps, args=(data, jobs), daemon=True).start()


def log_steps(data: DataDir, jobs: Sequence[int]) -> None:
    writers = [SeriesWriter(data.run(job).metrics_db) for job in jobs]
    for step in range(101, 10_000):
        time.sleep(1)
        values = {"loss": 150 / step, "fvu": 1 / step, "l0": 32 + step % 7 / 10, "tokens_per_s": 14000.0 + step}
        for writer in writers:
            heartbeat = Heartbeat("training", step, 10_000, step * 8192, time.time())
            writer.write([MetricRow(name, step, value) for name, value in values.items()], heartbeat)


def report(start_up: float, first_bytes: int, cpu_per_minute: float, peak: int, bytes_per_s: float) -> None:
    print(f"start-up to full paint  {start_up:8.2f} s")
    print(f"bytes to full paint     {first_bytes / 1000:8.1f} KB")
    print(f"CPU per minute          {cpu_per_minute:8.2f} s     {cpu_per_minute / 2.0:6.0%} of 2.0")
    print(f"peak memory             {peak / 2**20:8.1f} MiB   {peak / 2**20 / 60:6.0%} of 60")
    print(f"bytes to the terminal   {bytes_per_s / 1000:8.2f} KB/s  {bytes_per_s / 3000:6.0%} of 3")


if __name__ == "__main__":
    main()
