"""Compares measured step times with the predictions of the cost model that `auto` and the forecasts use.

python tests/benchmarks/cost_model.py [--gpus cpu:2] [--steps 8]

`trainer bench` measures every shape. Like a run, `trainer bench` first measures the speed of each rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

# Each shape's d_in, d_sae, k, and number of tokens per rank and step.
SHAPES = ((64, 1024, 16, 4096), (384, 3072, 32, 4096), (384, 16384, 32, 4096), (768, 6144, 32, 1024))
ARCHITECTURES = ("topk", "batch_topk", "jumprelu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", default="cpu:2", help="devices in the format of launch.gpus, with a count, such as cpu:2"
    )
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    device, _, ranks = options.gpus.partition(":")
    table = Table(title=f"expected and measured step times on {options.gpus}")
    for name in ("d_in", "d_sae", "k", "tokens", "architecture", "mode", "expected ms", "measured ms", "ratio"):
        table.add_column(name, justify="left" if name in ("architecture", "mode") else "right")
    runs = [(shape, "topk", mode, ranks) for shape in SHAPES for mode in ("ddp", "tensor")]
    runs += [(shape, name, "single", "1") for shape in SHAPES[:2] for name in ARCHITECTURES]
    ratios = []
    for shape, architecture, mode, n in runs:
        bench_result = bench(shape, architecture, mode, f"{device}:{n}", options.steps)
        ratios.append(bench_result["expected_step_ms"] / bench_result["step_ms"])
        figures = (f"{bench_result['expected_step_ms']:.1f}", f"{bench_result['step_ms']:.1f}", f"{ratios[-1]:.2f}")
        table.add_row(*map(str, shape), architecture, f"{mode} on {n}", *figures)
    console = Console(width=120)
    console.print(table)
    console.print(f"expected / measured: {min(ratios):.2f} to {max(ratios):.2f}", highlight=False)


def bench(shape: tuple[int, ...], architecture: str, mode: str, gpus: str, n_steps: int) -> dict[str, Any]:
    d_in, d_sae, k, batch = shape
    settings = {
        "data.source": "synthetic", "data.d_in": d_in, "launch.gpus": gpus, "parallel.mode": mode,
        "parallel.shares": "even", "sae.architecture": architecture, "sae.d_sae": d_sae, "sae.k": k,
        "train.batch_size": batch,
    }  # fmt: skip
    argv = [sys.executable, "-m", "trainer", "bench", "--steps", str(n_steps), "--json"]
    argv += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
