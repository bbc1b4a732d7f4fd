"""Measures NCCL's memory, the timeline of a step with dead latents, or how a run ends after a rank is killed.

    PYTHONPATH=tests python tests/benchmarks/gpu_several.py auto:2|cpu:2 memory|profile|killed [--mode tensor]

The script prints JSON with a list of errors, `wrong`; the exit code is 1 if there are errors. CPU processes do not use
NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from trainer.contract.paths import RunPaths
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.measuring.bench import run_ranks
from trainer.ranks.device_choice import parse_target
from trainer.ranks.foreground import read_progress

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
SHAPES = {"cuda": (768, 24576, 32, 4096), "cpu": (64, 512, 8, 256)}
# How many seconds the ranks may take to start training, how many the command may take to exit after the kill, and the
# poll interval in seconds.
STARTED_S, ENDED_S, POLL_S = 90.0, 60.0, 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", help="devices, such as auto:2 or cpu:2")
    parser.add_argument("what", choices=["memory", "profile", "killed"])
    parser.add_argument("--mode", default="tensor")
    options = parser.parse_args()
    n_ranks, uuids = parse_target(options.gpus)
    if options.what == "killed":
        found = killed(options.gpus, options.mode)
    else:
        shape = SHAPES["cuda" if uuids else "cpu"]
        job = job_of(shape, options.gpus, n_ranks, options.mode)
        arguments = [options.what, str(shape[0])]
        found = run_ranks("support.several_gpus", arguments, job=job, world_size=n_ranks, gpu_uuids=uuids)
    print(json.dumps({"wrong": []} | found))
    return 1 if found.get("wrong") else 0


def job_of(shape: tuple[int, int, int, int], gpus: str, n_ranks: int, mode: str) -> JobConfig:
    d_in, d_sae, k, batch = shape
    return parsed(
        {
            "data": {"source": "synthetic", "d_in": d_in},
            "sae": {"d_sae": d_sae, "k": k},
            "train": {"batch_size": batch * (n_ranks if mode == "tensor" else 1), "n_steps": 10**5},
            "parallel": {"mode": mode},
            "launch": {"gpus": gpus},
        }
    )


def parsed(table: dict[str, Any]) -> JobConfig:
    job, problems = parse_job(table)
    assert job is not None, problems
    return job


def killed(gpus: str, mode: str) -> dict[str, Any]:
    """Kill the last rank while it is training; return how many seconds the command takes to exit, and its error."""
    job = parsed(
        {
            "data": {"path": str(SAMPLE)},
            "sae": {"d_sae": 512, "k": 16},
            "train": {"n_steps": 10**6, "batch_size": 256},
            "parallel": {"mode": mode},
            "launch": {"gpus": gpus},
        }
    )
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        file, out = Path(folder) / "job.toml", Path(folder) / "run"
        file.write_text(dump_job(job))
        argv = [sys.executable, "-m", "trainer", "run", str(file), "--out", str(out)]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            if not (victim := last_rank(process, out)):
                return {"wrong": [f"no rank completed a step within {STARTED_S:.0f} s"]}
            os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            words = process.communicate(timeout=ENDED_S)[1].strip()
        except subprocess.TimeoutExpired:
            return {"wrong": [f"the other ranks were still running {ENDED_S:.0f} s after one was killed"]}
        finally:
            process.kill()
    wrong = (
        []
        if process.returncode and "rank" in words
        else [f"the command exited with {process.returncode}: {words[-200:]}"]
    )
    return {"ended_s": time.monotonic() - began, "said": words[-300:], "wrong": wrong}


def last_rank(process: subprocess.Popen[str], run_dir: Path) -> int | None:
    """Wait until all ranks are training; return the last rank's pid, or None if they do not start training in time."""
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < STARTED_S:
        heartbeat, _ = read_progress(RunPaths(run_dir).metrics_db)
        if heartbeat and heartbeat.step > 0:
            ranks = [
                (int(child.environ().get("RANK", -1)), child.pid) for child in psutil.Process(process.pid).children()
            ]
            return max(ranks)[1] if ranks else None
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    sys.exit(main())
