"""Compares `train.halving` with full sweeps over the learning rate, on stored activations.

    python tests/benchmarks/halving.py FOLDER... [--seeds 0 1 2] [--d-sae 768] [--k 16] [--steps 400]

For each folder and seed, the same sweep is trained twice: in full, and with halving. The table shows which rate has the
lowest held-out FVU in the full sweep, which one halving keeps, and how much higher the FVU of the kept rate is in the
full sweep. The cost of halving is a share of the full sweep: SAE steps, copies included, and CPU time, evaluations and
start included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from trainer.contract.planning.halving import trained_share
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job_file import parse_job

RATES = [0.001, 0.0018, 0.0032, 0.0056, 0.01, 0.018, 0.032, 0.056]


class Run(NamedTuple):
    """The held-out FVU of each SAE that is trained to the end, by label, and the run's CPU time in seconds."""

    fvus: dict[str, float]
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--d-sae", type=int, default=768)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    table = Table("rows", "seed", "best in full", "kept", "FVU of the kept rate", "CPU time")
    n_right, n_trials = 0, 0
    for folder in options.folders:
        for seed in options.seeds:
            full, halved = (run(job(folder, seed, options, halving=halving)) for halving in (False, True))
            best, (kept,) = min(full.fvus, key=full.fvus.__getitem__), halved.fvus
            n_right, n_trials = n_right + (best == kept), n_trials + 1
            excess = f"{full.fvus[kept] / full.fvus[best] - 1:+.2%}"
            table.add_row(folder.name, str(seed), best, kept, excess, f"{halved.cpu_s / full.cpu_s:.0%}")
            print(f"{n_right} of {n_trials} kept the best rate", file=sys.stderr, flush=True)
    made, _ = parse_job(job(options.folders[0], 0, options, halving=True))
    assert made is not None
    console = Console(width=110)
    console.print(table)
    console.print(f"{n_right} of {n_trials} kept the best rate; SAE steps: {trained_share(Layout(made, 1)):.0%}")


def job(folder: Path, seed: int, options: argparse.Namespace, *, halving: bool) -> dict[str, Any]:
    train = {
        "lr": RATES, "halving": halving, "seed": seed, "n_steps": options.steps, "batch_size": 512, "eval_every": 0,
        "report_card": False,
    }  # fmt: skip
    sae = {"d_sae": options.d_sae, "k": options.k}
    return {"data": {"path": str(folder.absolute())}, "sae": sae, "train": train, "launch": {"gpus": "cpu"}}


def run(table: dict[str, Any]) -> Run:
    """Train a job in processes with one thread."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "job.toml"
        file.write_text("\n".join(_toml(table)))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        argv = [sys.executable, "-m", "trainer", "run", str(file), "--json", "--out", f"{temporary}/run"]
        done = subprocess.run(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    saes = json.loads(done.stdout.splitlines()[-1])["saes"]
    fvus = {label: one["heldout_fvu"] for label, one in saes.items() if one["dropped_at_step"] is None}
    return Run(fvus, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _toml(table: dict[str, Any]) -> list[str]:
    return [
        line
        for section, keys in table.items()
        for line in (f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in keys.items()))
    ]


if __name__ == "__main__":
    main()
