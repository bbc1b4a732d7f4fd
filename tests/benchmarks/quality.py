"""Measures the held-out FVU over training time for several trainers with default settings, on the same rows.

    python tests/benchmarks/quality.py DATA [--peers NAME ...] [--steps 500 | --tokens N] [--d-sae 3072] [--k 32]
        [--seeds 0] [--rates 1] [--json FOLDER] [--save FOLDER]

DATA is a .safetensors file with `activations` [n_tokens, d_in], or a folder of such files. If the files contain
`document` [n_tokens], entire texts with at least 16,384 rows in total are held out; the same texts are held out for all
seeds. Without `document`, the seed selects 16,384 individual rows. All trainers train on the remaining rows in the same
order: in seeded permutations, one per epoch.

Every 25 steps, while the clock is stopped, the benchmark measures FVU and L0 as each library's users would see them.
The benchmark also measures the FVU with the k·n largest activations in a batch, which compares BatchTopK SAEs at equal
L0 regardless of their thresholds, and the share of latents that fire neither on the held-out rows nor on 65,536
training rows. With several seeds, a second table shows the mean FVU at equal L0, its standard deviation over seeds and
its standard error over held-out texts. Times include only training steps. The CPU time is divided by the number of
threads, which makes it equal to the wall time on an idle machine.

With --rates, sparsify is trained once for each multiple of its learning rate; the best of these is a tuned peer.

With --tokens, each recipe trains on that number of rows, and may choose how many rows each step has. Without --tokens,
each step has --batch rows. With --json, every curve is stored in FOLDER, and peers with a stored curve are not rerun.
Except for plain loops, --save saves each SAE in its library's format, in a folder for its recipe under FOLDER.
`probing.py` takes these folders as its input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

N_HELD_OUT = 16_384
N_FIRING = 65_536
# The number of rows OpenAI uses to initialise b_dec.
N_SAMPLE = 32_768
CHUNK = 4096


class Data:
    """Rows [n_tokens, d_in] in random order; entire texts are held out if `documents` [n_tokens] are known."""

    def __init__(self, x: Tensor, seed: int, device: str, documents: Tensor | None = None) -> None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        n_held_out = min(N_HELD_OUT, len(x) // 4)
        is_held_out = torch.arange(len(x)) >= len(x) - n_held_out
        if documents is not None:
            is_held_out = of_texts(documents, n_held_out)[order]
        self._seed, self.train = seed, x[order[~is_held_out]].to(device)
        self.held_out = x[order[is_held_out]].to(device).float()
        self.texts = None if documents is None else documents[order[is_held_out]].to(device)

    @property
    def sample(self) -> Tensor:
        return self.train[:N_SAMPLE].float()

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield batches endlessly; an incomplete batch at the end of an epoch is dropped."""
        generator = torch.Generator().manual_seed(self._seed + 1)
        while True:
            order = torch.randperm(len(self.train), generator=generator).to(self.train.device)
            for rows in order.split(batch_size):
                if len(rows) == batch_size:
                    yield self.train[rows].float()


def of_texts(documents: Tensor, n_rows: int) -> Tensor:
    """Return a mask [n_tokens] that selects all rows of random texts, at least `n_rows` rows in total."""
    texts, sizes = documents.unique(return_counts=True)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    n_texts = int((sizes[order].cumsum(0) < n_rows).sum()) + 1
    return torch.isin(documents, texts[order[:n_texts]])


@dataclasses.dataclass
class Point:
    """One point on a curve."""

    step: int
    cpu_s: float
    wall_s: float
    fvu: float
    l0: float
    fvu_at_k: float
    never_fired: float
    # The standard error of `fvu_at_k` over texts, or 0 if individual rows were held out.
    fvu_error: float = 0.0


@dataclasses.dataclass
class Result:
    """A recipe's curve, and everything that determines it."""

    recipe: str
    kind: str
    is_peer: bool
    version: str
    setup: dict[str, Any]
    threads: int
    curve: list[Point]

    @property
    def final(self) -> Point:
        return self.curve[-1]

    def seconds_to(self, fvu: float) -> float | None:
        """Return the CPU seconds until the curve reaches this FVU, interpolated linearly, or None if it never does."""
        for before, after in zip(self.curve, self.curve[1:], strict=False):
            if after.fvu_at_k <= fvu:
                share = (before.fvu_at_k - fvu) / max(before.fvu_at_k - after.fvu_at_k, 1e-12)
                return before.cpu_s + min(max(share, 0.0), 1.0) * (after.cpu_s - before.cpu_s)
        return None


def main() -> None:
    options = parse()
    # Ignore warnings that CSR tensors are experimental and that Triton is missing.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    x, documents = load(options.data)
    steps = -(-options.tokens // options.batch) if options.tokens else options.steps
    shape = x.shape[1], options.d_sae, options.k, options.batch, steps
    names, results = peers.available(options.peers), []
    for seed in options.seeds:
        data = Data(x, seed, options.device, documents)
        setup = peers.Setup(*shape, options.device, seed=seed, own_steps=bool(options.tokens))
        results.append(
            [
                found_or_run(name, dataclasses.replace(setup, rate=rate), data, options)
                for name in names
                for rate in (options.rates if peers.RECIPES[name].has_rate else [1.0])
            ]
        )
        Console(width=150).print(table(results[-1]))
    if len(results) > 1:
        Console(width=150).print(over_seeds(results))


def load(data: Path) -> tuple[Tensor, Tensor | None]:
    """Return the rows [n_tokens, d_in] from a file or folder, and each row's text index, or None if unknown."""
    files = [load_file(file) for file in (sorted(data.glob("*.safetensors")) if data.is_dir() else [data])]
    documents = [file["document"].long() for file in files if "document" in file]
    x = torch.cat([file["activations"].float() for file in files])
    return x, torch.cat(documents) if len(documents) == len(files) else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--peers", nargs="+", default=list(peers.RECIPES), choices=list(peers.RECIPES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, help="number of rows to train on, instead of --steps")
    parser.add_argument("--every", type=int, default=25, help="number of steps between two measurements")
    parser.add_argument("--d-sae", type=int, default=3072)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="multiples of sparsify's learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="store curves here, and reuse the curves of peers")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save each trained SAE here")
    parser.add_argument("--again", action="store_true", help="run peers even if their curves are stored")
    return parser.parse_args()


def found_or_run(name: str, setup: peers.Setup, data: Data, options: argparse.Namespace) -> Result:
    of_seed = f"-{setup.seed}" if len(options.seeds) > 1 else ""
    recipe, shown = peers.RECIPES[name], name if setup.rate == 1 else f"{name} × {setup.rate:g}"
    path = options.json / f"{file_name(shown)}{of_seed}.json" if options.json else None
    stored = read(path) if path and recipe.module != "trainer" and not options.again else None
    if stored and stored.setup == dataclasses.asdict(setup) and stored.final.step == setup.n_steps:
        print(f"{shown}: from {path}")
        return stored
    result = Result(
        shown, recipe.kind, recipe.is_peer, recipe.version(), dataclasses.asdict(setup), options.threads, []
    )
    trainer = peers.build(name, setup, data.sample)
    for point in train(trainer, setup, data, options.every):
        print(f"{shown}: step {point.step} FVU {point.fvu_at_k:.4f} after {point.cpu_s:.1f} s", flush=True)
        result.curve.append(point)
        write(path, result)
    if options.save and trainer.writes_sae and setup.seed == options.seeds[0]:
        folder = options.save / file_name(shown)
        folder.mkdir(parents=True, exist_ok=True)
        trainer.save(folder)
    return result


def file_name(recipe: str) -> str:
    return recipe.replace(" ", "_")


def read(path: Path) -> Result | None:
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return Result(**stored | {"curve": [Point(**point) for point in stored["curve"]]})


def write(path: Path | None, result: Result) -> None:
    """Write a result; called after every point, so an interrupted run keeps the points measured so far."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")


def train(recipe: peers.Recipe, setup: peers.Setup, data: Data, every: int) -> Iterator[Point]:
    """Train; yield a point at step 0, every few steps and at the end. The clocks run only during steps."""
    cpu_s = wall_s = 0.0
    yield measure(recipe, data, 0, cpu_s, wall_s)
    batch_size, n_steps = recipe.steps_of(setup)
    for step, x in zip(range(1, n_steps + 1), data.batches(batch_size), strict=False):
        wall, cpu = time.perf_counter(), time.process_time()
        recipe.step(x)
        synchronise(setup.device)
        wall_s += time.perf_counter() - wall
        cpu_s += (time.process_time() - cpu) / torch.get_num_threads()
        if step % every == 0 or step == n_steps:
            yield measure(recipe, data, step, cpu_s, wall_s)


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.no_grad()
def measure(recipe: peers.Recipe, data: Data, step: int, cpu_s: float, wall_s: float) -> Point:
    fvu, l0, fired = evaluate(recipe.reconstruct_at_k, data.held_out)
    fvu_at_k, error = fvu, error_over_texts(recipe.reconstruct_at_k, data)
    if recipe.kind == "batchtopk":
        fvu, l0, _ = evaluate(recipe.reconstruct, data.held_out)
    _, _, fired_in_training = evaluate(recipe.reconstruct_at_k, data.train[:N_FIRING])
    never_fired = float((~(fired | fired_in_training)).float().mean())
    return Point(step, cpu_s, wall_s, fvu, l0, fvu_at_k, never_fired, error)


def error_over_texts(reconstruct: Any, data: Data) -> float:
    """Return the standard error of the held-out FVU over texts, or 0 if individual rows were held out.

    This is the standard error of a ratio of sums over independent texts; see Cochran (1977), Sampling Techniques,
    section 6.4.
    """
    if data.texts is None:
        return 0.0
    mean = data.held_out.mean(dim=0)
    sums = torch.zeros(2, int(data.texts.max()) + 1, dtype=torch.float64, device=data.texts.device)
    for x, texts in zip(data.held_out.split(CHUNK), data.texts.split(CHUNK), strict=True):
        errors = (x - reconstruct(x).x_hat).square().sum(1), (x - mean).square().sum(1)
        sums.index_add_(1, texts, torch.stack(errors).double())
    residual = sums[0] - sums[0].sum() / sums[1].sum() * sums[1]
    return float(residual.square().sum().sqrt() / sums[1].sum())


@torch.no_grad()
def evaluate(reconstruct: Any, x: Tensor) -> tuple[float, float, Tensor]:
    """Return FVU and L0 over the rows of x, and a mask [d_sae] of the latents that fired."""
    error, n_active, fired = 0.0, 0, None
    mean = x.mean(dim=0, dtype=torch.float32)
    variance = sum(float((chunk.float() - mean).square().sum()) for chunk in x.split(CHUNK))
    for chunk in x.split(CHUNK):
        reconstruction = reconstruct(chunk.float())
        error += float((chunk.float() - reconstruction.x_hat).square().sum())
        n_active += int(reconstruction.active.sum())
        now = reconstruction.active.any(dim=0)
        fired = now if fired is None else fired | now
    assert fired is not None
    return error / variance, n_active / len(x), fired


def table(results: list[Result]) -> Table:
    shown = Table("recipe", "version", title="held-out FVU after equal tokens, and time to reach the best peer's FVU")
    for heading in ("FVU", "L0", "FVU at k", "never fired", "CPU s", "wall s", "s to best peer", "× faster"):
        shown.add_column(heading, justify="right")
    for result in results:
        final = result.final
        cells = f"{final.fvu:.4f}", f"{final.l0:.1f}", f"{final.fvu_at_k:.4f}", f"{final.never_fired:.1%}"
        times = f"{final.cpu_s:.1f}", f"{final.wall_s:.1f}"
        shown.add_row(result.recipe, result.version, *cells, *times, *race(result, results))
    return shown


def over_seeds(results: list[list[Result]]) -> Table:
    shown = Table("recipe", title=f"held-out FVU at equal L0, {len(results)} seeds")
    for heading in ("FVU", "over seeds ±", "over texts ±", "L0 as exported", "never fired"):
        shown.add_column(heading, justify="right")
    for of_recipe in zip(*results, strict=True):
        points = [result.final for result in of_recipe]
        columns = torch.tensor([[one.fvu_at_k, one.fvu_error, one.l0, one.never_fired] for one in points]).double()
        fvu, error, l0, never_fired = columns.mean(0).tolist()
        spread = f"{columns[:, 0].std():.4f}"
        shown.add_row(of_recipe[0].recipe, f"{fvu:.4f}", spread, f"{error:.4f}", f"{l0:.1f}", f"{never_fired:.1%}")
    return shown


def race(result: Result, results: list[Result]) -> tuple[str, str]:
    """Return the seconds to reach the lowest FVU of any peer of the same kind, and the speed-up over that peer.

    The peer's lowest FVU is used rather than its last one, because FVU can rise again: sparsify's FVU was 0.1226 after
    300 of 500 steps and 0.1260 at the end.
    """
    rivals = [point for other in results if other.is_peer and other.kind == result.kind for point in other.curve]
    if not rivals:
        return "", ""
    best = min(rivals, key=lambda point: point.fvu_at_k)
    seconds = result.seconds_to(best.fvu_at_k)
    return (f"{seconds:.1f}", f"{best.cpu_s / seconds:.1f}") if seconds else ("never", "")


if __name__ == "__main__":
    main()
