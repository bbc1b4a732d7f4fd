"""Measures the throughput before, during and after a slowdown of one rank, with fixed and with adjusted shares.

    python tests/benchmarks/straggler.py [--mode ddp] [--seconds 15] [--burners 1] [--d-sae 3072]

Two CPU ranks are pinned to one core each. After a while, `--burners` busy processes are pinned to rank 1's core; later,
they are killed. The throughput is measured once with fixed shares and once with shares adjusted to each rank's speed.
Run this benchmark on two otherwise idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from trainer.contract.store.metrics_store import SeriesReader

BURNER = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("ddp", "tensor"), default="ddp")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--burners", type=int, default=1)
    parser.add_argument("--d-sae", type=int, default=3072)
    options = parser.parse_args()
    table = Table(title=f"{options.mode}, tokens/s of two ranks while {options.burners} processes slow down rank 1")
    for name in ("shares", "before", "slowed", "of before", "after"):
        table.add_column(name, justify="right")
    events = []
    for rebalance in (False, True):
        before, slowed, after, messages = measured(options, rebalance=rebalance)
        word = "adjusted" if rebalance else "fixed"
        table.add_row(word, f"{before:,.0f}", f"{slowed:,.0f}", f"{slowed / before:.0%}", f"{after:,.0f}")
        events += [f"{word}: {line}" for line in messages]
    console = Console(width=120)
    console.print(table)
    for line in events:
        console.print(line, highlight=False)


def measured(options: argparse.Namespace, *, rebalance: bool) -> tuple[float, float, float, list[str]]:
    """Return the tokens/s in the second half of each of three periods, and the event messages."""
    with tempfile.TemporaryDirectory() as folder, training(Path(folder) / "run", options, rebalance) as run_dir:
        rates = [rate(run_dir, options.seconds)]
        with burning(options.burners):
            rates.append(rate(run_dir, options.seconds))
        rates.append(rate(run_dir, options.seconds))
        with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
            messages = [event.message for event in reader.events() if event.kind in ("straggler", "rebalanced", "plan")]
    return *rates, messages


@contextlib.contextmanager
def training(run_dir: Path, options: argparse.Namespace, rebalance: bool):
    """In the `with` block, train on two ranks, each pinned to its own core; yield the run's folder."""
    settings = {
        "data.source": "synthetic", "data.d_in": 384, "launch.gpus": "cpu:2", "parallel.mode": options.mode,
        "parallel.rebalance": str(rebalance).lower(), "parallel.shares": "even", "sae.d_sae": options.d_sae,
        "sae.k": 32,
        "train.batch_size": 1024, "train.n_steps": 10**6, "train.eval_every": 0, "train.log_every": 10,
        "train.checkpoint_every": 25,
    }  # fmt: skip
    job = run_dir.with_name("job.toml")
    job.write_text("[data]\n")
    argv = [sys.executable, "-m", "trainer", "run", str(job), "--out", str(run_dir)]
    argv += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = subprocess.Popen(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        while steps_done(run_dir) < 20:
            assert process.poll() is None, "the run ended"
            time.sleep(0.2)
        ranks = [one for one in psutil.Process(process.pid).children(recursive=True) if "rank" in one.cmdline()]
        for one in ranks:
            core = int(one.environ()["RANK"])
            for thread in one.threads():
                os.sched_setaffinity(thread.id, {core})
        yield run_dir
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def burning(n_burners: int):
    """Keep core 1 busy with `n_burners` processes in the `with` block."""
    burners = [subprocess.Popen([sys.executable, "-c", BURNER]) for _ in range(n_burners)]
    for burner in burners:
        os.sched_setaffinity(burner.pid, {1})
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def rate(run_dir: Path, seconds: float) -> float:
    """Return the tokens per second in the second half of the next `seconds` seconds."""
    time.sleep(seconds / 2)
    before, began = tokens_done(run_dir), time.monotonic()
    time.sleep(seconds / 2)
    return (tokens_done(run_dir) - before) / (time.monotonic() - began)


def steps_done(run_dir: Path) -> int:
    return heartbeat(run_dir)[0]


def tokens_done(run_dir: Path) -> int:
    return heartbeat(run_dir)[1]


def heartbeat(run_dir: Path) -> tuple[int, int]:
    with contextlib.suppress(Exception), contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        last = reader.last()
        return (last.step, last.tokens) if last else (0, 0)
    return 0, 0


if __name__ == "__main__":
    main()
