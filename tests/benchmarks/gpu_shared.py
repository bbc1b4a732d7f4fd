"""Compares training on two ranks that share one GPU with training on a single rank, in every multi-GPU mode.

    PYTHONPATH=tests python tests/benchmarks/gpu_shared.py [--device cuda|cpu]

NCCL rejects two ranks on one GPU, so the ranks exchange tensors through host memory (`tests/support/one_gpu.py`). All
other code is the same as on several GPUs. Each mode trains three kinds of SAE for 20 steps, with AuxK, in fp32 and in
16 bits. The script prints JSON: the FVU for each SAE, the places in the code outside the exchange where the host waited
during one additional step, and a list of errors, `wrong`. The exit code is 1 if there are errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.one_gpu import join
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.parallel.base import Parallel
from trainer.parallel.group import local_shard
from trainer.parallel.shares import even
from trainer.runtime.precision import resolve_precision, set_matmul_precision
from trainer.self_test.base import SMALL, TINY, Size, rows
from trainer.self_test.learning import waits_of
from trainer.training.learner import Learner
from trainer.training.step import take_step

KINDS = ("topk", "batch_topk", "jumprelu")
MODES = ("ddp", "tensor")
N_RANKS, N_STEPS, N_MEASURED, LIMIT_S = 2, 20, 5, 90.0
# The largest allowed relative difference in FVU. In 16 bits, rounding decides which of several nearly equal
# activations are selected; the self-test allows the same difference (`trainer.self_test.learning.NEAR`).
NEAR = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if options.rank is not None:
        run_rank(device, options.rank, options.place)
        return 0
    found = run_ranks(options.device)
    found["wrong"] = wrong_of(found["cases"])
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


def run_ranks(device: str) -> dict[str, Any]:
    """Start both ranks and return the first rank's results; if a rank fails, exit with its error."""
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as folder:
        place = Path(folder) / "rendezvous"
        argv = [sys.executable, __file__, "--device", device, "--place", str(place), "--rank"]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        ranks = [
            subprocess.Popen([*argv, str(rank)], text=True, env=environment, stderr=subprocess.PIPE)
            for rank in range(N_RANKS)
        ]
        try:
            errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            sys.exit("\n".join(error[-2000:] for error in errors if error) or "a rank failed without a message")
        return dict(json.loads(place.with_name("found.json").read_text()))


def run_rank(device: torch.device, index: int, place: Path) -> None:
    """Train in each mode; the first rank also trains alone, and writes the results."""
    world, cases = join(device, index, N_RANKS, place), []
    size = SMALL if device.type == "cuda" else TINY
    x = rows(size.batch_size, size.d_in).to(device)
    for precision in ("fp32", resolve_precision("auto", device) if device.type == "cuda" else "bf16"):
        for kind in KINDS:
            jobs = {mode: job_of(size, kind, precision, mode) for mode in ("single", *MODES)}
            alone = trained(jobs["single"], x, Parallel(device)) if index == 0 else None
            for mode in MODES:
                shares = even(*((1, N_RANKS) if mode == "tensor" else (N_RANKS, 1)))
                parallel = catalog.entry(catalog.PARALLEL, mode, "").load()(world, jobs[mode], shares)
                found = trained(jobs[mode], x, parallel)
                if alone:
                    cases.append({"mode": mode, "kind": kind, "precision": precision} | found | {"one": alone["fvu"]})
    if index == 0:
        place.with_name("found.json").write_text(json.dumps({"cases": cases}))


def job_of(size: Size, kind: str, precision: str, mode: str) -> JobConfig:
    job, problems = parse_job(
        {
            "data": {"path": "unused"},
            "sae": {"architecture": kind, "d_sae": size.d_sae, "k": size.k, "dead_after_tokens": 4 * size.batch_size},
            "train": {
                "n_steps": 10 * N_STEPS,
                "batch_size": size.batch_size // (N_RANKS if mode == "ddp" else 1),
                "precision": precision,
            },
            "parallel": {"mode": mode},
        }
    )
    assert job is not None, problems
    return job


def trained(job: JobConfig, x: Tensor, parallel: Parallel) -> dict[str, Any]:
    """Train on x at every step.

    Return the FVU over the last steps, and the places in the code where the host waits for the GPU in one more step.
    """
    set_matmul_precision(resolve_precision(job.train.precision, parallel.device))
    torch.manual_seed(0)
    learner = Learner(job, x.shape[1], None, parallel)
    learner.initialise(x, x)
    own = local_shard(x, parallel.data)

    def take(number: int) -> None:
        take_step([learner], parallel, number, [Batch([(own, own)], len(x))])

    for number in range(N_STEPS):
        if number == N_STEPS - N_MEASURED:
            # Discard the metrics of the earlier steps.
            learner.sums()
        take(number)
    totals = parallel.sum_parts(learner.sums(), parallel.data)
    waits = waits_of(parallel.device, partial(take, N_STEPS))
    return {"fvu": learner.values(totals)["fvu"], "waits": dict(waits)}


def wrong_of(cases: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each case whose FVU differs from the single-rank FVU, or in which the host waited."""
    wrong = []
    for case in cases:
        name = f"{case['mode']}, {case['kind']}, {case['precision']}"
        if not math.isclose(case["fvu"], case["one"], rel_tol=NEAR[case["precision"]], abs_tol=1e-5):
            wrong.append(f"{name}: FVU {case['fvu']:.5f}, but {case['one']:.5f} on one rank")
        wrong += [f"{name}: the host waits at {place}" for place in case["waits"]]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
