"""Compares the FVU after 20 steps on several GPUs (or CPU processes) with the FVU on one, and counts host waits.

    PYTHONPATH=tests python tests/benchmarks/gpu_ranks.py auto:2 [--modes ddp tensor hybrid] [--uneven]

A job trains three kinds of SAE with the same command that users run: on one GPU, and in each mode on all GPUs. The
number of latents is not divisible by 3, 4 or 8. The script prints JSON: the final FVU for each SAE, the places in the
code where rank 0's host waited during a step, and a list of errors, `wrong`. The exit code is 1 if there are errors.
Waits are not treated as errors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import SeriesReader
from trainer.measuring.bench import run_ranks
from trainer.ranks.device_choice import parse_target

SAMPLE, D_IN = Path(__file__).parents[2] / "data" / "sample", 384
# Two kinds of SAE that select latents, per token or per batch, and one kind with a penalty.
KINDS = ["topk", "batch_topk", "jumprelu"]
MODES = {"ddp": {}, "tensor": {}, "hybrid": {"latent_ranks": 2}, "dp": {}}
# The number of latents. It is divisible by 2, but not by 3, 4 or 8.
D_SAE = 3074
N_STEPS, TOKENS_OF_RANK = 20, 128
# The tolerance of `tests/trainer/parallel/test_modes.py`, which compares CPU processes in the same way.
NEAR = {"rel_tol": 1e-3, "abs_tol": 1e-5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", help="devices, such as auto:2 or cpu:2")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["ddp", "tensor"])
    parser.add_argument("--uneven", action="store_true", help="give the ranks shares of different sizes")
    options = parser.parse_args()
    word, (n_ranks, uuids) = options.gpus.partition(":")[0], parse_target(options.gpus)
    fvus = {"one": trained(shared(f"{word}:1", n_ranks, 1, {"mode": "single"}))}
    waits: dict[str, dict[str, int]] = {}
    for mode in options.modes:
        n_data = {"tensor": 1, "hybrid": n_ranks // 2}.get(mode, n_ranks)
        shares = {"shares": ":".join(str(rank + 2) for rank in range(n_ranks))} if options.uneven else {}
        job = shared(f"{word}:{n_ranks}", n_ranks, n_data, {"mode": mode} | MODES[mode] | shares)
        fvus[mode] = trained(job)
        if mode == "dp":
            # Waits cannot be counted in this mode, because its ranks are threads of the training command.
            continue
        module, sizes = "support.rank_waits", [str(D_IN)]
        waits |= {mode: run_ranks(module, sizes, job=job, world_size=n_ranks, gpu_uuids=uuids)["waits"]}
    wrong = differing(fvus)
    print(json.dumps({"fvu": fvus, "waits": waits, "wrong": wrong}))
    return 1 if wrong else 0


def shared(gpus: str, n_ranks: int, n_data: int, parallel: dict[str, Any]) -> JobConfig:
    """Return a job with the same number of tokens per step on any number of GPUs; its latents soon count as dead."""
    tokens = TOKENS_OF_RANK * n_ranks
    job, problems = parse_job(
        {
            "data": {"path": str(SAMPLE)},
            "sae": {"architecture": KINDS, "d_sae": D_SAE, "k": 32, "dead_after_tokens": 4 * tokens},
            "train": {"n_steps": N_STEPS, "batch_size": tokens // n_data, "precision": "fp32", "log_every": 5},
            "parallel": parallel,
            "launch": {"gpus": gpus},
        }
    )
    assert job is not None, problems
    return job


def trained(job: JobConfig) -> dict[str, float]:
    """Train and return the final FVU of each kind of SAE."""
    with tempfile.TemporaryDirectory(prefix="gpu-ranks-") as folder:
        file, out = Path(folder) / "job.toml", Path(folder) / "run"
        file.write_text(dump_job(job))
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "run", str(file), "--out", str(out)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr[-2000:] or done.stdout[-2000:])
        with contextlib.closing(SeriesReader(out / "metrics.db")) as reader:
            return {kind: float(reader.points(f"fvu@architecture={kind}")[-1].value or "nan") for kind in KINDS}


def differing(fvus: dict[str, dict[str, float]]) -> list[str]:
    """Return a sentence for each kind of SAE whose FVU in some mode differs from its FVU on one GPU."""
    return [
        f"{mode}: FVU of {kind} is {fvu:.5f}, but {fvus['one'][kind]:.5f} on one GPU"
        for mode, of_kind in fvus.items()
        for kind, fvu in of_kind.items()
        if not math.isclose(fvu, fvus["one"][kind], **NEAR)
    ]


if __name__ == "__main__":
    sys.exit(main())
