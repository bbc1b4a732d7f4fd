"""Strong scaling: one process with one thread against two, that share the tokens (ddp) or the latents (tensor).

    python tests/benchmarks/scaling.py [--d-sae 3072 16384] [--ranks 2] [--batch 4096] [--rounds 3] [--steps 12]

The global batch is the same, so two ranks can at best be twice as fast. The modes take turns and the medians are
compared, so that another program's work harms all alike. Bytes are those that really went over the loopback interface
(/proc/net/dev), from runs of two lengths, per rank and step, beside what the exchange should send: a ring's share of
the summed reconstructions and gradients, and everybody's candidates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

D_IN, K = 384, 32
MODES = ("single", "ddp", "tensor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-sae", type=int, nargs="+", default=[3072, 16384])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {d_sae: measured(d_sae, options) for d_sae in options.d_sae}
    Console(width=110).print(table(found, options))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measured(d_sae: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens/s and bytes per rank and step of every mode."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(options.rounds):
        for mode in MODES:
            rates[mode].append(run(mode, d_sae, options.steps, options)[0])
    sent = {}
    for mode in MODES[1:]:
        short, long = (run(mode, d_sae, n, options)[1] for n in (2, 7))
        # A bench takes its steps twice, once to time their phases.
        sent[mode] = (long - short) / (2 * 5) / options.ranks
    return {
        mode: {
            "tokens_per_s": statistics.median(rates[mode]),
            "speed_up": statistics.median(rates[mode]) / statistics.median(rates["single"]),
            "bytes": sent.get(mode, 0.0),
            "expected_bytes": expected_bytes(mode, d_sae, options),
        }
        for mode in MODES
    }


def run(mode: str, d_sae: int, n_steps: int, options: argparse.Namespace) -> tuple[float, int]:
    """Tokens/s of a bench of so many steps, and how many bytes went over the loopback meanwhile."""
    ranks = 1 if mode == "single" else options.ranks
    batch = options.batch // (ranks if mode == "ddp" else 1)
    settings = {
        "data.source": "synthetic",
        "data.d_in": D_IN,
        "launch.gpus": f"cpu:{ranks}",
        "parallel.mode": mode,
        "sae.d_sae": d_sae,
        "sae.k": K,
        "train.batch_size": batch,
        "train.precision": "fp32",
    }
    argv = [sys.executable, "-m", "trainer", "bench", "--steps", str(n_steps), "--json"]
    argv += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    before = loopback_bytes()
    done = subprocess.run(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"], loopback_bytes() - before


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def expected_bytes(mode: str, d_sae: int, options: argparse.Namespace) -> float:
    """What a rank should send in a step."""
    n = options.ranks
    ring = 2 * (n - 1) / n * 4
    if mode == "ddp":
        return ring * (2 * D_IN * d_sae + d_sae + D_IN)
    candidates = min(K, -(-4 * K // n))
    return ring * options.batch * D_IN + (n - 1) * options.batch * candidates * 4 if mode == "tensor" else 0.0


def table(found: dict[int, dict[str, dict[str, float]]], options: argparse.Namespace) -> Table:
    title = f"{options.ranks} ranks of one thread against one, d_in {D_IN}, k {K}, {options.batch:,} tokens per step"
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
