"""Compares one SAE for several k with SAEs that are each trained for one k, on stored activations.

    python tests/benchmarks/several_k.py FOLDER [--d-sae 3072] [--k 64] [--levels 4] [--steps 391] [--seeds 0]

The last 8,192 rows are held out, and the 4,000 rows before them are not used, so that no text is in both parts. All
SAEs train on the same batches of 512 rows with default settings. The table shows the held-out FVU for each k, for the
dedicated SAE and for the SAE for several k, and their ratio.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from trainer.api import Fitted, train
from trainer.contract.settings.architectures import HierarchicalTopKSettings

N_HELD_OUT, N_BETWEEN, BATCH = 8192, 4000, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--d-sae", type=int, default=3072)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--steps", type=int, default=391)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    rows = torch.cat([load_file(file)["activations"] for file in sorted(options.folder.glob("*.safetensors"))])
    held_out, rows = rows[-N_HELD_OUT:].float(), rows[: -N_HELD_OUT - N_BETWEEN]
    ks = HierarchicalTopKSettings(k=options.k, n_levels=options.levels).ks
    alone: dict[int, list[float]] = {k: [] for k in ks}
    one: dict[int, list[float]] = {k: [] for k in ks}
    for seed in options.seeds:
        steps = batches(rows, options.steps, seed)
        settings = {"n_steps": options.steps, "d_sae": options.d_sae, "seed": seed, "device": "cpu"}
        several = train(steps, architecture="hierarchical_topk", k=options.k, n_levels=options.levels, **settings)
        for k in ks:
            one[k].append(fvu(several, held_out, k))
            alone[k].append(fvu(train(steps, architecture="topk", k=k, **settings), held_out, k))
    table = Table("k", "trained for this k", "one SAE for all k", "difference")
    for k in ks:
        dedicated, shared = mean(alone[k]), mean(one[k])
        table.add_row(str(k), f"{dedicated:.4f}", f"{shared:.4f}", f"{shared / dedicated - 1:+.1%}")
    Console().print(table)


def batches(rows: Tensor, n_steps: int, seed: int) -> list[Tensor]:
    """Return `n_steps` batches [512, d_in] of rows in random order, over several passes if there are too few rows."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    starts = (step * BATCH % (len(rows) - BATCH) for step in range(n_steps))
    return [rows[order[start : start + BATCH]] for start in starts]


def fvu(fitted: Fitted, held_out: Tensor, k: int) -> float:
    with fitted.sae.using(k):
        error = (held_out - fitted.reconstruct(held_out)).square().sum()
    return float(error / (held_out - held_out.mean(dim=0)).square().sum())


if __name__ == "__main__":
    main()
