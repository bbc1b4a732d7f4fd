"""Compares the automatic learning rate with lower learning rates in long runs, by the FVU on held-out texts.

    python tests/benchmarks/long_runs.py ROWS RESULTS.jsonl [--steps 2000 10000 50000] [--d-sae 1536] [--seeds 0]
        [--recipes NAME ...] [--batch 512] [--threads 1]
    python tests/benchmarks/long_runs.py RESULTS.jsonl

ROWS is a folder that an extraction has written for one hook: shards with `activations` [n_tokens, d_in] and `document`.
One text in 20 is held out entirely, and the same texts are held out for every seed. Every recipe trains on the same
rows in the same order. Every run is completed, because the FVU improves most while the learning rate is falling. Each
result is one line in RESULTS. Runs that already have a result are skipped, so an interrupted benchmark can be resumed.
Without ROWS, only the existing results are printed.

The recipe `default` uses the automatic rate. `short` uses the rate that would be chosen automatically for a run of
1,000 steps. `/3` and `/10` divide that rate by 3 and by 10, and use 5 % warm-up. `plain` is the Adam TopK of Gao et al.
(2024) and sparsify, with a rate of 2e-4 * sqrt(2^14 / d_sae), 5 % warm-up, decay over the last fifth, free encoders,
and betas of 0.9 and 0.999.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.contract.planning.rates import LONG_RUN_STEPS

K = 32
CHUNK = 4096
ONE_TEXT_IN = 20
WARM_UP = {"warmup_fraction": 0.05}


def settings_of(recipe: str, d_sae: int, batch: int) -> dict[str, Any]:
    """Return the `trainer.api.train` settings for a recipe."""
    if recipe == "default":
        return {}
    if recipe == "plain":
        adam = {"encoder_follows": "off", "decay_fraction": 0.2, "beta1": 0.9, "beta2": 0.999}
        return {"lr": 2e-4 * math.sqrt(2**14 / d_sae), **adam, **WARM_UP}
    if recipe == "short":
        return {"lr_length": "off"}
    return {"lr": short_rate(d_sae, batch) / int(recipe.removeprefix("/")), **WARM_UP}


RECIPES = ("default", "short", "/3", "/10", "plain")


def short_rate(d_sae: int, batch: int) -> float:
    """Return the rate that `lr = "auto"` selects for a run of 1,000 steps."""
    from trainer.contract.planning.rates import full_rate
    from trainer.contract.planning.workload import Layout
    from trainer.contract.settings.job_file import parse_job

    sae = {"d_sae": d_sae, "k": K}
    job, problems = parse_job(
        {"data": {"path": "rows"}, "sae": sae, "train": {"n_steps": LONG_RUN_STEPS, "batch_size": batch}}
    )
    assert job is not None, problems
    return full_rate(Layout(job, 1), d_sae, is_transcoder=False)


class Rows:
    """The rows [n_tokens, d_in] from one hook; some texts are held out with all their rows."""

    def __init__(self, folder: Path) -> None:
        files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        self._rows = torch.cat([file.get_tensor("activations") for file in files])
        self.documents = torch.cat([file.get_tensor("document") for file in files]).long()
        texts = self.documents.unique()
        drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: len(texts) // ONE_TEXT_IN]
        is_held_out = torch.isin(self.documents, texts[drawn])
        self.train, self.held_out = torch.where(~is_held_out)[0], torch.where(is_held_out)[0]

    def batches(self, size: int, seed: int) -> Iterator[Tensor]:
        """Yield batches of training rows forever, in a new order for each pass."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for numbers in self.train[torch.randperm(len(self.train), generator=generator)].split(size):
                if len(numbers) == size:
                    yield self._rows[numbers].float()

    def held_out_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out rows with the indices of their texts."""
        for numbers in self.held_out.split(CHUNK):
            yield self._rows[numbers].float(), self.documents[numbers]


def measure(fitted: Any, rows: Rows) -> dict[str, float]:
    """Return the FVU on held-out texts, its standard error over texts, and the share of latents that never fire."""
    mean = sum(x.double().sum(0) for x, _ in rows.held_out_batches()) / len(rows.held_out)
    n_texts = int(rows.documents.max()) + 1
    error, spread = torch.zeros(2, n_texts, dtype=torch.float64)
    fired = torch.zeros(fitted.sae.d_sae, dtype=torch.bool)
    for x, texts in rows.held_out_batches():
        error.index_add_(0, texts, (x - fitted.reconstruct(x)).double().square().sum(1))
        spread.index_add_(0, texts, (x - mean).square().sum(1))
        fired |= (fitted.encode(x) > 0).any(0)
    fvu = float(error.sum() / spread.sum())
    residual = error - fvu * spread
    return {
        "fvu": fvu,
        "fvu_error": float(residual.square().sum().sqrt() / spread.sum()),
        "never_fire": float((~fired).float().mean()),
    }


def run(rows: Rows, setup: dict[str, Any]) -> dict[str, Any]:
    """Train one SAE and return its measurements."""
    from trainer.api import train

    d_sae, batch, n_steps, seed = (setup[name] for name in ("d_sae", "batch", "steps", "seed"))
    settings = settings_of(setup["recipe"], d_sae, batch)
    began = time.process_time()
    fitted = train(rows.batches(batch, seed), n_steps=n_steps, device="cpu", d_sae=d_sae, k=K, seed=seed, **settings)
    return {
        **setup,
        **measure(fitted, rows),
        "batch_fvu": fitted.values["fvu"],
        "passes": n_steps * batch / len(rows.train),
        "rows": len(rows.train),
        "cpu_s": time.process_time() - began,
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    results = options.paths[-1]
    if len(options.paths) == 2:
        fill(options.paths[0], results, options)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    if options.svg:
        options.svg.write_text(curves(found))
    print(table(found))


COLOURS = dict(zip(RECIPES, ("#1a7f37", "#cf222e", "#bf8700", "#8250df", "#57606a"), strict=True))
WIDTH, HEIGHT, LEFT, BOTTOM, FVUS = 360, 260, 48, 36, (0.125, 0.19)


def curves(results: list[dict[str, Any]]) -> str:
    """Return an SVG plot of FVU against the number of steps, with a panel for each hook and a curve for each recipe.

    Only SAEs with 1,536 latents are included.
    """
    hooks, parts = sorted({one["hook"] for one in results}, reverse=True), []
    for column, hook in enumerate(hooks):
        left = column * WIDTH
        parts.append(text(left + LEFT, 16, f"{hook}, 1,536 latents: held-out FVU by steps"))
        for fvu in (0.13, 0.15, 0.17, 0.19):
            parts += [text(left + 8, height_of(fvu) + 4, f"{fvu:.2f}"), rule(left, height_of(fvu))]
        for steps in (2000, 10_000, 50_000):
            parts.append(text(left + place_of(steps) - 16, HEIGHT - 14, f"{steps:,}"))
        for number, recipe in enumerate(RECIPES):
            points: dict[int, list[float]] = {}
            for one in results:
                if (one["hook"], one["d_sae"], one["recipe"]) == (hook, 1536, recipe):
                    points.setdefault(one["steps"], []).append(one["fvu"])
            path = [
                f"{left + place_of(steps):.1f},{height_of(sum(fvus) / len(fvus)):.1f}"
                for steps, fvus in sorted(points.items())
            ]
            style = f'fill="none" stroke="{COLOURS[recipe]}" stroke-width="2"'
            parts.append(f'<polyline points="{" ".join(path)}" {style}/>')
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3" fill="{COLOURS[recipe]}"/>'
                for x, y in (one.split(",") for one in path)
            ]
            parts.append(text(left + WIDTH - 60, 40 + 16 * number, recipe, COLOURS[recipe]))
    size = f'width="{WIDTH * len(hooks)}" height="{HEIGHT}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', ground, *parts, "</svg>"]) + "\n"


def place_of(steps: int) -> float:
    return LEFT + 12 + (WIDTH - LEFT - 80) * math.log(steps / 2000) / math.log(25)


def height_of(fvu: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 28) * (fvu - FVUS[0]) / (FVUS[1] - FVUS[0])


def text(x: float, y: float, words: str, colour: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="12" fill="{colour}">{words}</text>'


def rule(left: int, y: float) -> str:
    return f'<line x1="{left + LEFT}" y1="{y:.1f}" x2="{left + WIDTH - 70}" y2="{y:.1f}" stroke="#d0d7de"/>'


def fill(folder: Path, results: Path, options: argparse.Namespace) -> None:
    """Run the cases that do not have a result yet, and append their results."""
    rows = Rows(folder)
    for n_steps in options.steps:
        for seed in options.seeds:
            for recipe in options.recipes:
                setup = {"hook": folder.name, "d_sae": options.d_sae, "batch": options.batch, "steps": n_steps}
                setup |= {"seed": seed, "recipe": recipe}
                done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
                if not any(setup.items() <= one.items() for one in done):
                    with results.open("a") as file:
                        file.write(json.dumps(run(rows, setup)) + "\n")


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table: one line per hook, width and length, with means over seeds."""
    lines = [
        f"| hook | latents | steps | passes | {' | '.join(RECIPES)} |",
        f"|---|---|---|---|{'---|' * len(RECIPES)}",
    ]
    cases = dict.fromkeys((one["hook"], one["d_sae"], one["steps"]) for one in results)
    for hook, d_sae, steps in sorted(cases):
        of_case = [one for one in results if (one["hook"], one["d_sae"], one["steps"]) == (hook, d_sae, steps)]
        cells = [cell([one for one in of_case if one["recipe"] == recipe], of_case) for recipe in RECIPES]
        lines.append(f"| {hook} | {d_sae:,} | {steps:,} | {of_case[0]['passes']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(of_recipe: list[dict[str, Any]], of_case: list[dict[str, Any]]) -> str:
    """Return the mean FVU over seeds, and its excess in percent over the default recipe's mean for the same seeds."""
    if not of_recipe:
        return "–"
    mean = sum(one["fvu"] for one in of_recipe) / len(of_recipe)
    seeds = {one["seed"] for one in of_recipe}
    default = [one["fvu"] for one in of_case if one["recipe"] == "default" and one["seed"] in seeds]
    away = f" ({100 * (mean / (sum(default) / len(default)) - 1):+.1f} %)" if default else ""
    return f"{mean:.4f}{away if of_recipe[0]['recipe'] != 'default' else ''}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="[ROWS] RESULTS")
    parser.add_argument("--steps", type=int, nargs="+", default=[2000, 10_000, 50_000])
    parser.add_argument("--d-sae", type=int, default=1536)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="write the curves to this SVG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
