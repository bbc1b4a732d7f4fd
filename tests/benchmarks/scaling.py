"""Measures strong scaling: the speed of several processes that shard tokens or latents, compared with a single process.

    python tests/benchmarks/scaling.py [--d-sae 3072 16384] [--ranks 2] [--batch 4096] [--rounds 3] [--steps 12]

Each process has one thread. The global batch size is the same, so two ranks can at best be twice as fast. The modes
take turns and the medians are compared, so load from other programs affects all modes equally. The upper limit is the
total tokens/s of the same number of independent processes, each with all tokens ("alone") or with a share of the tokens
("alone, shared tokens"). The number of bytes that a rank sends to other ranks during a step is compared with the
expected number: a ring all-reduce of the reconstructions and gradients, and the candidates from all ranks. The last row
is the mode chosen by `auto`, which should be the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

D_IN, K = 384, 32
ALONE = ("alone", "alone, shared tokens")
MODES = ("single", "ddp", "tensor", *ALONE, "auto")
# The modes in which each rank gets a share of a step's tokens.
SHARES_TOKENS = ("ddp", "alone, shared tokens", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-sae", type=int, nargs="+", default=[3072, 16384])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {d_sae: measured(d_sae, options) for d_sae in options.d_sae}
    Console(width=110).print(table(results, options))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def measured(d_sae: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the tokens/s in every mode, and the bytes that a rank sends per step."""
    runs_of: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(options.rounds):
        for mode in MODES:
            runs_of[mode].append(run(mode, d_sae, options))
    rates = {mode: statistics.median(one["tokens_per_s"] for one in runs) for mode, runs in runs_of.items()}
    return {
        name_of(mode, runs_of[mode]): {
            "tokens_per_s": rates[mode],
            "speed_up": rates[mode] / rates["single"],
            "bytes": runs_of[mode][0].get("sent_bytes", 0.0),
            "expected_bytes": expected_bytes(mode, d_sae, options),
        }
        for mode in MODES
    }


def name_of(mode: str, runs: list[dict[str, Any]]) -> str:
    return f"auto: {', '.join(sorted({one['mode'] for one in runs}))}" if mode == "auto" else mode


def run(mode: str, d_sae: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run `trainer bench` once, or several times simultaneously if `mode` is in `ALONE`; return the measurements."""
    is_alone = mode in ALONE
    ranks = 1 if mode == "single" or is_alone else options.ranks
    settings = {
        "data.source": "synthetic",
        "data.d_in": D_IN,
        "launch.gpus": f"cpu:{ranks}",
        "parallel.mode": "single" if is_alone else mode,
        "sae.d_sae": d_sae,
        "sae.k": K,
        "train.batch_size": options.batch // (options.ranks if mode in SHARES_TOKENS else 1),
        "train.precision": "fp32",
    }
    argv = [sys.executable, "-m", "trainer", "bench", "--steps", str(options.steps), "--json"]
    argv += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    benches = [
        subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(options.ranks if is_alone else 1)
    ]
    printed = [bench.communicate()[0] for bench in benches]
    results = [json.loads(text.splitlines()[-1]) for text in printed]
    return {
        "tokens_per_s": sum(one["tokens_per_s"] for one in results),
        "sent_bytes": results[0]["sent_bytes"] or 0.0,
        "mode": results[0]["plan"]["mode"],
    }


def expected_bytes(mode: str, d_sae: int, options: argparse.Namespace) -> float:
    """Return the bytes that a rank should send per step."""
    n = options.ranks
    ring = 2 * (n - 1) / n * 4
    if mode == "ddp":
        return ring * (2 * D_IN * d_sae + d_sae + D_IN)
    candidates = min(K, -(-4 * K // n))
    return ring * options.batch * D_IN + (n - 1) * options.batch * candidates * 4 if mode == "tensor" else 0.0


def table(found: dict[int, dict[str, dict[str, float]]], options: argparse.Namespace) -> Table:
    title = f"{options.ranks} ranks with one thread each, d_in {D_IN}, k {K}, {options.batch:,} tokens per step"
    made = Table(title=title)
    for name in ("d_sae", "mode", "tokens/s", "× one rank", "MB per rank and step", "× expected"):
        made.add_column(name, justify="left" if name == "mode" else "right")
    for d_sae, modes in found.items():
        for mode, one in modes.items():
            share = f"{one['bytes'] / one['expected_bytes']:.2f}" if one["expected_bytes"] else ""
            traffic = f"{one['bytes'] / 1e6:.1f}" if one["expected_bytes"] else ""
            row = (f"{d_sae:,}", mode, f"{one['tokens_per_s']:,.0f}", f"{one['speed_up']:.2f}", traffic, share)
            made.add_row(*row)
    return made


if __name__ == "__main__":
    main()
