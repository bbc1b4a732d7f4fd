"""Benchmarks the entire chain on a real model, from activations to evaluated SAEs, and compares it with SAELens.

    make model && .venv/bin/python tests/benchmarks/chain.py [--tokens 100_000] [--layers 12 20] [--json FILE]

SmolLM2-135M reads the Python reference manual, or the text in `--text FILE`. Both trainers get the same rows in the
same order, and the same d_sae, k, batch size and number of steps. All other settings keep each trainer's defaults.
`trainer eval` evaluates both SAEs on the same held-out rows and, spliced into the model, on the same text, which was
not used for extraction. Probes are trained if sae-probes is installed. Then our extraction, a plain loop using the
transformers library, and SAELens take turns running the model, `--repeats` times each (`peers/reading.py`). Each
reader's fastest run is reported. `loader.py` measures how fast stored rows are read. The duration of each stage is also
printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
import tomli_w
import torch
from peers import reading
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))
# Neither our code nor other tools may contact the hub.
os.environ["HF_HUB_OFFLINE"] = "1"

RECIPES = {"topk": "SaeLens topk", "batch_topk": "SaeLens batchtopk"}
DATA = ("layer", "rows", "left out: first", "outliers", "γ", "norm: median", "largest")
QUALITY = ("layer", "SAE of", "FVU", "L0", "never fire", "CE score", "KL score", "AUC k=1", "k=16", "all", "tokens/s")


def main() -> None:
    options = parse()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        chain = Chain(Path(folder), options)
        result: dict[str, Any] = {}
        for result in chain.run():
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="number of rows to extract and train on")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 20])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="number of tokens in a forward pass")
    parser.add_argument("--architecture", choices=tuple(RECIPES), default="topk")
    parser.add_argument("--d-sae", type=int, default=4608)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=4096, help="number of held-out rows")
    parser.add_argument("--spliced-tokens", type=int, default=4096, help="number of tokens for the spliced loss")
    parser.add_argument("--sets", type=int, default=12, help="number of data sets of labelled texts for probing")
    parser.add_argument(
        "--speed-tokens", type=int, default=32_768, help="number of tokens for each reader; 0 skips the readers"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--text", type=Path, help=".jsonl file with a column `text`; default: the Python reference")
    parser.add_argument(
        "--folder", type=Path, help="folder for temporary files; default: the system's temporary folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    return parser.parse_args()


class Chain:
    """Runs the benchmark stages in one folder, and times each stage."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self._seconds: dict[str, float] = {}
        self._has_probe = importlib.util.find_spec("sae_probes") is not None

    def run(self) -> Iterator[dict[str, Any]]:
        """Run all stages; yield the partial results after each layer, and all results at the end."""
        options = self.options
        with self._timed("model to a folder"):
            asked = self._asked()
        with self._timed("extract"):
            extracted = self._extract(asked)
        result: dict[str, Any] = {"extracted": extracted, "layers": {}, "readers": {}, "seconds": self._seconds}
        for layer in options.layers:
            result["layers"][str(layer)] = self._layer(layer)
            yield result
        if options.speed_tokens:
            result["readers"] = self._rates(asked)
            yield result

    def _asked(self) -> reading.Asked:
        """Write the text and the model in the formats that the readers require."""
        from support.real_model import FILE, why_not, write_text

        options, text = self.options, self.folder / "text.jsonl"
        if reason := why_not():
            sys.exit(f"chain.py: {reason}")
        if options.text:
            shutil.copyfile(options.text, text)
        else:
            write_text(text)
        unpack(FILE, self.folder / "model")
        shape = options.context, options.batch_tokens, options.speed_tokens
        return reading.Asked(self.folder / "model", text, options.layers, *shape)

    def _extract(self, asked: reading.Asked) -> dict[str, Any]:
        options = self.options
        job = self._write(
            "extract.toml",
            kind="extract",
            model={"path": str(asked.model), "hooks": [f"resid_post.{layer}" for layer in options.layers]},
            text={"path": str(asked.text), "context": asked.context},
            extract={"n_tokens": options.tokens, "batch_tokens": asked.batch_tokens, "output": "rows"},
        )
        return self._trainer("extract", job)

    def _layer(self, layer: int) -> dict[str, Any]:
        """Train our SAE and SAELens's SAE on one layer's rows, and evaluate both."""
        rows = f"rows/resid_post.{layer}"
        with self._timed(f"inspect {layer}"):
            facts = self._trainer("inspect", rows)
        job = self._write(f"train-{layer}.toml", **self._training(rows))
        with self._timed(f"train {layer}"):
            trained = self._trainer("run", job, "--out", f"ours-{layer}")
        with self._timed(f"train {layer}, SAELens"):
            rate = self._train_saelens(rows, self.folder / f"peer-{layer}")
        held_out = f"data.held_out_tokens={self.options.held_out}"
        self._trainer("import", f"peer-{layer}", "--data", rows, "--out", f"theirs-{layer}", "--set", held_out)
        cards = {}
        for name in ("ours", "theirs"):
            with self._timed(f"eval {layer}" if name == "ours" else f"eval {layer}, SAELens"):
                cards[name] = self._judge(f"{name}-{layer}")
        with self._timed(f"export {layer}"):
            self._trainer("export", f"ours-{layer}", "--out", f"saelens-{layer}")
        return {"facts": facts, "cards": cards, "tokens_per_s": {"ours": trained["tokens_per_s"], "theirs": rate}}

    def _training(self, rows: str) -> dict[str, Any]:
        options = self.options
        return {
            "data": {"path": str(self.folder / rows), "held_out_tokens": options.held_out},
            "sae": {"architecture": options.architecture, "d_sae": options.d_sae, "k": options.k},
            "train": {"batch_size": options.batch, "n_steps": options.steps, "precision": "fp32", "seed": 0},
        }

    def _train_saelens(self, rows: str, out: Path) -> float:
        """Train SAELens's SAE on the same batches as our SAE, save it, and return the tokens per second."""
        from trainer.activations.shards import Shards
        from trainer.activations.training_data import IndexedData
        from trainer.parallel.group import Group

        options, source = self.options, Shards(path=str(self.folder / rows))
        data = IndexedData(source, options.held_out, 0, Group())
        setup = peers.Setup(source.d_in, options.d_sae, options.k, options.batch, options.steps)
        recipe: Any = peers.build(RECIPES[options.architecture], setup, data.read(0, options.batch).x.float())
        began = time.perf_counter()
        for step in range(options.steps):
            recipe.step(data.read(step * options.batch, options.batch).x.float())
        rate = options.steps * options.batch / (time.perf_counter() - began)
        recipe.sae.save_inference_model(out)
        return rate

    def _judge(self, run: str) -> dict[str, Any]:
        words = ["--model", "auto", "--tokens", self.options.spliced_tokens, "--contexts", 0]
        probes = ["--probe", "--sets", self.options.sets] if self._has_probe else []
        card: dict[str, Any]
        (card,) = self._trainer("eval", run, *words, *probes)["cards"]
        return card

    def _rates(self, asked: reading.Asked) -> dict[str, float]:
        """Return each reader's tokens/s; the readers take turns, so that other load affects them all equally."""
        rates = {kind.name: 0.0 for kind in reading.READERS}
        for _ in range(self.options.repeats):
            for kind in reading.READERS:
                with self._timed(f"read by {kind.name}"):
                    rates[kind.name] = max(rates[kind.name], reading.measure(kind, asked))
        return rates

    def _write(self, name: str, **table: Any) -> str:
        (self.folder / name).write_text(tomli_w.dumps(table | {"launch": {"gpus": "cpu"}}))
        return name

    def _trainer(self, *arguments: object) -> Any:
        return json.loads(self._output(*arguments, "--json").splitlines()[-1])

    def _output(self, *arguments: object) -> str:
        argv = [sys.executable, "-m", "trainer", *map(str, arguments)]
        path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
        env = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(argv, capture_output=True, text=True, cwd=self.folder, env=env)
        if done.returncode:
            sys.exit(f"chain.py: {' '.join(argv[2:])}: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self._seconds[stage] = self._seconds.get(stage, 0.0) + spent
        print(f"{stage}: {spent:.1f} s", file=sys.stderr, flush=True)


def unpack(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a model folder with fp32 weights, because SAELens does not load GGUF files."""
    import transformers

    name = {"gguf_file": file.name}
    packed = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **name)
    # transformers treats weights from a GGUF file as quantized and refuses to save them.
    config = transformers.AutoConfig.from_pretrained(file.parent, **name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **name).save_pretrained(folder)


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the results as tables."""
    shape = f"d_sae {options.d_sae:,}, k {options.k}, {options.steps:,} steps of {options.batch:,} rows"
    console = Console(width=150)
    console.print(filled("statistics of the model's rows", DATA, map(data_row, *zip(*per_layer(result), strict=True))))
    title = f"{options.architecture}: {shape}"
    console.print(filled(title, QUALITY, [row for layer, told in per_layer(result) for row in quality(layer, told)]))
    if readers := result["readers"]:
        plain = readers[reading.Plain.name]
        rows = [(one.name, one.does, rated(readers[one.name], plain)) for one in reading.READERS]
        title = f"tokens/s up to layer {max(options.layers)}, {options.batch_tokens:,} tokens in a forward pass"
        console.print(filled(title, ("reader", "does", "tokens/s"), rows))
    seconds = [(stage, f"{spent:.1f}") for stage, spent in result["seconds"].items()]
    console.print(filled(f"{torch.get_num_threads()} threads", ("stage", "s"), seconds))


def filled(title: str, columns: Any, rows: Any) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ("layer", "SAE of", "reader", "does", "stage") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def per_layer(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each layer's name and results, with the extraction results added."""
    return [(layer, told | {"extracted": result["extracted"]}) for layer, told in result["layers"].items()]


def data_row(layer: str, told: dict[str, Any]) -> tuple[str, ...]:
    facts, left_out = told["facts"], told["extracted"]["left_out"]
    counts = facts["n_tokens"], left_out["first tokens"], left_out["outlier norms"]
    norms = f"{facts['median_norm']:.1f}", f"{facts['largest_norm']:.1f}"
    return layer, *(f"{count:,}" for count in counts), f"{facts['gamma']:.2f}", *norms


def quality(layer: str, told: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield one table row for each trainer's SAE."""
    for name, whose in (("ours", "ours"), ("theirs", "SAELens")):
        card = told["cards"][name]
        figures, spliced, probing = card["figures"], card["spliced"], card.get("probing")
        fvu = f"{figures['fvu']:.4f} ± {figures['fvu_error']:.4f}"
        scores = f"{spliced['ce_score']:.4f}", f"{spliced['kl_score']:.4f}"
        aucs = [f"{one['auc']:.3f}" for one in (*probing["k"].values(), probing["dense"])] if probing else ["–"] * 3
        rate = f"{told['tokens_per_s'][name]:,.0f}"
        yield layer, whose, fvu, f"{figures['l0']:.1f}", f"{figures['dead']:.1%}", *scores, *aucs, rate


def rated(rate: float, plain: float) -> str:
    return f"{rate:,.0f} ({rate / plain:.2f} ×)"


if __name__ == "__main__":
    main()
