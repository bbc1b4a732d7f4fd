"""Compares SAEs from several trainers at one hook by k-sparse probing: how well an SAE's k best latents predict labels.

    python tests/benchmarks/probing.py JOB.toml HOOK FOLDER [--sets 24] [--json FILE]

FOLDER contains a folder for each SAE, as written by `quality.py --save`. JOB.toml is the extraction that wrote the
training rows, and HOOK is one of its hooks. The model reads the texts once, and every SAE gets the same rows. Each AUC
is shown with its standard error over the splits into training and test texts. The difference from the first SAE is
averaged over the data sets, and shown with its standard error over the data sets. A difference of less than two
standard errors is shown as "same".
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from trainer.contract.runs.report_card import Auc, Probing
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import load_as
from trainer.evaluation.exported import read_exported
from trainer.evaluation.probe_sets import read_sets
from trainer.evaluation.probing import KS, LabelledRows, last_rows, probe, probe_rows
from trainer.extraction.language_model import LanguageModel

CPU = torch.device("cpu")


def main() -> None:
    options = parse()
    dense = probe_rows(labelled_rows(options))
    found: dict[str, Probing] = {}
    for folder in sorted(one for one in options.folder.iterdir() if one.is_dir()):
        sae = read_exported(folder, CPU)
        found[folder.name] = probe(dense, lambda rows, sae=sae: sae.encode(rows).values)
        print(f"{folder.name}: {', '.join(f'{one.auc:.4f}' for one in found[folder.name].k.values())}", flush=True)
    Console(width=150).print(table(found, options.hook))
    if options.json:
        options.json.write_text(json.dumps({name: figures(one) for name, one in found.items()}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, metavar="JOB.toml")
    parser.add_argument("hook")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", type=int, default=24, help="number of data sets of labelled texts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def labelled_rows(options: argparse.Namespace) -> list[LabelledRows]:
    """Run the model on the texts; the unembedding is not needed, so the model may be an encoder."""
    job = load_as(ExtractJob, options.job)
    job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, hooks=[options.hook]))
    model = LanguageModel(job, CPU)
    sets = read_sets(options.sets)
    return [LabelledRows(one.name, last_rows(model, one.texts, job.text.context), one.labels) for one in sets]


def table(found: dict[str, Probing], hook: str) -> Table:
    first, *_ = found.values()
    dense = first.dense
    title = f"{hook}: AUC over {first.n_sets} sets, {first.n_seeds} splits; all activations: {with_error(dense)}"
    drawn = Table("SAE", title=title)
    for k in KS:
        for name in (f"k = {k}", "difference from the first"):
            drawn.add_column(name, justify="right")
    for name, probing in found.items():
        cells = []
        for k in map(str, KS):
            cells += [with_error(probing.k[k]), "" if probing is first else difference(probing.k[k], first.k[k])]
        drawn.add_row(name, *cells)
    return drawn


def with_error(auc: Auc) -> str:
    return f"{auc.auc:.4f} ± {auc.seed_error:.4f}"


def difference(auc: Auc, other: Auc) -> str:
    """Return the mean difference over the sets, its standard error, and a verdict."""
    differences = [value - other.of_sets[name] for name, value in auc.of_sets.items()]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    verdict = "same" if abs(mean) < 2 * error else "better" if mean > 0 else "worse"
    return f"{mean:+.4f} ± {error:.4f} {verdict}"


def figures(probing: Probing) -> dict[str, Any]:
    return {"dense": probing.dense.auc, **{k: probing.k[k].of_sets for k in map(str, KS)}}


if __name__ == "__main__":
    main()
