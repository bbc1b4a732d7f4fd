"""Compares trainers by the known features of synthetic data that their SAEs find, with default settings.

    python tests/benchmarks/known_features.py [--peers NAME ...] [--tokens 500000] [--d-sae 1024] [--k 12]
        [--seeds 0 1 2]

The data is the same as in `sae-tui arena`. All trainers train on the same rows in the same order, and their SAEs are
saved in their library's format and read back. The figures are defined as in SAELens. `never fire` is measured on the
same 8,192 rows, which no trainer has seen.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import peers
import torch
from rich.console import Console
from rich.table import Table

from sae_tui.cli_commands.arena import DATA
from trainer.activations.synthetic import Synthetic
from trainer.evaluation.exported import read_exported
from trainer.evaluation.known_features import N_ROWS, known_features

COLUMNS = ("F1", "precision", "recall", "MCC", "uniqueness", "L0", "FVU", "never fire", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    writing = [name for name, recipe in peers.RECIPES.items() if recipe.writes_sae]
    parser.add_argument("--peers", nargs="+", default=writing, choices=writing, metavar="NAME")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--d-sae", type=int, default=1024)
    parser.add_argument("--k", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    shown = Table("recipe", title=f"known features, {options.tokens:,} tokens, {len(options.seeds)} seeds")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for name in peers.available(options.peers):
        values = [trained(name, seed, options) for seed in options.seeds]
        shown.add_row(name, *(words([one[column] for one in values]) for column in COLUMNS))
        Console(width=150).print(name, {column: round(fmean(one[column] for one in values), 4) for column in COLUMNS})
    Console(width=170).print(shown)


def trained(name: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train one SAE and return its figures by column."""
    source = Synthetic(**{key: value for key, value in DATA.items() if key != "source"})
    shape = source.d_in, options.d_sae, options.k, options.batch, -(-options.tokens // options.batch)
    setup = peers.Setup(*shape, seed=seed, own_steps=True)
    recipe = peers.build(name, setup, source.rows(np.arange(32_768)))
    batch_size, n_steps = recipe.steps_of(setup)
    seconds = 0.0
    for step in range(n_steps):
        x = source.rows(np.arange(step * batch_size, (step + 1) * batch_size))
        began = time.perf_counter()
        recipe.step(x)
        seconds += time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        recipe.save(Path(folder))
        sae = read_exported(Path(folder), torch.device("cpu"))
    found = known_features(source, sae.W_dec, sae.encode)
    assert found is not None
    assert found.mcc is not None
    x = source.rows(source.n_tokens + np.arange(N_ROWS))
    acts, x_hat = sae.reconstruct(x)
    fires = acts.values != 0
    fvu = float((x - x_hat).square().sum() / (x - x.mean(dim=0)).square().sum())
    figures = found.f1, found.precision, found.recall, found.mcc, found.uniqueness
    l0, never = float(fires.float().sum(1).mean()), float((~fires.any(dim=0)).float().mean())
    return dict(zip(COLUMNS, (*figures, l0, fvu, never, seconds), strict=True))


def words(values: list[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
