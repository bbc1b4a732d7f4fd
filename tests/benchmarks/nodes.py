"""Shows what a second node brings: step times by the cost model, and measured times over a slow link next to the model.

python tests/benchmarks/nodes.py              # modelled: 1 × 8 and 2 × 8 H100 GPUs, by the speed of the link
python tests/benchmarks/nodes.py --measure    # measured: two network namespaces with two CPU ranks each; needs root

The model chooses the fastest mode and settings for each layout, with the same number of tokens per step. Its speeds are
the assumed ones: published figures for H100 GPUs with NVLink, and 80 % of the link's nominal speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from support.network_nodes import Node, obstacle, two_nodes

from trainer.contract.paths import RunPaths
from trainer.contract.planning.choose_mode import PlannedResources, Settled, settle
from trainer.contract.planning.hardware import assumed_speeds
from trainer.contract.planning.step_time import wire_of
from trainer.contract.planning.workload import Workload
from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.settings.sources import DataShape

GPU, ON_NODE, FREE_BYTES = "NVIDIA H100 80GB HBM3", 8, 76 * 10**9
# The share of a link's nominal speed that large transfers reach.
REACHED = 0.8
LINKS_GBIT = (100, 200, 400, 3200)
TOKENS = (32_768, 131_072)
# A second node pays if it makes steps faster by this factor.
PAYS = 1.1
WIDTHS = tuple(2**power for power in range(15, 22))


class Shape(NamedTuple):
    """An SAE to train; k is the number of active latents."""

    name: str
    d_in: int
    d_sae: int
    k: int


SHAPES = (
    Shape("GPT-2 small residual", 768, 24_576, 32),
    Shape("Llama-8B residual", 4096, 65_536, 64),
    Shape("Llama-8B residual", 4096, 131_072, 64),
)


def best(shape: Shape, nodes: int, tokens: int, gbit: float = 0.0) -> Settled:
    """Return the fastest way to train on this many nodes; each step has the same number of tokens on any number."""
    train = {"precision": "bf16", "global_batch_size": tokens, "batch_size": "auto", "n_tokens": 10**9}
    job = job_of(shape, train, launch={"backend": "slurm", "nodes": nodes, "gpus": f"auto:{ON_NODE}"})
    speeds = assumed_speeds(GPU, "bf16", nodes)
    if nodes > 1:
        speeds = msgspec.structs.replace(speeds, node_bytes_per_s=REACHED * gbit * 1e9 / 8)
    work = Workload(job, nodes * ON_NODE, DataShape(shape.d_in, None, 10**9), GPU)
    return settle(work, PlannedResources(speeds, FREE_BYTES))


def job_of(shape: Shape, train: dict[str, object], **sections: dict[str, object]) -> JobConfig:
    table = {"data": {"path": "acts"}, "sae": {"d_sae": shape.d_sae, "k": shape.k}, "train": train} | sections
    job, problems = parse_job(table)
    # This machine may lack sbatch, which the model does not need.
    assert job, problems
    return job


def modelled(console: Console) -> None:
    table = Table(title="Modelled step times on nodes with 8 H100 GPUs, at the same number of tokens per step")
    for name in ("SAE", "tokens", "1 × 8", *(f"2 × 8, {gbit} Gb/s" for gbit in LINKS_GBIT)):
        table.add_column(name, justify="left" if name == "SAE" else "right")
    for shape in SHAPES:
        for tokens in TOKENS:
            one = best(shape, 1, tokens)
            cells = [cell(best(shape, 2, tokens, gbit), one) for gbit in LINKS_GBIT]
            label = f"{shape.name}, {shape.d_sae:,} latents"
            table.add_row(label, f"{tokens:,}", f"{ms(one)} {mode(one)}", *cells)
    console.print(table)


def cell(two: Settled, one: Settled) -> str:
    return f"{ms(two)} {mode(two)}, {gain(two, one):.2f}×"


def gain(two: Settled, one: Settled) -> float:
    return one.time.with_dead_s / two.time.with_dead_s


def widths(console: Console) -> None:
    """Print the smallest SAE of a Llama-8B residual stream that a second node makes clearly faster."""
    table = Table(title=f"Latents (d_in 4,096) from which 2 × 8 GPUs are {PAYS:g} times as fast as 1 × 8")
    for name in ("tokens", *(f"{gbit} Gb/s" for gbit in LINKS_GBIT)):
        table.add_column(name, justify="right")
    for tokens in (32_768, 131_072, 524_288):
        table.add_row(f"{tokens:,}", *(least_width(tokens, gbit) for gbit in LINKS_GBIT))
    console.print(table)


def least_width(tokens: int, gbit: float) -> str:
    for width in WIDTHS:
        shape = Shape("", 4096, width, 64)
        one, two = best(shape, 1, tokens), best(shape, 2, tokens, gbit)
        if one.fits and two.fits and gain(two, one) >= PAYS:
            return f"{width:,}"
    return f"more than {WIDTHS[-1]:,}"


def ms(way: Settled) -> str:
    return f"{1000 * way.time.with_dead_s:.1f} ms"


def mode(way: Settled) -> str:
    parallel = way.job.parallel
    return f"hybrid of {parallel.latent_ranks}" if parallel.mode == "hybrid" else parallel.mode


def measured(console: Console, n_steps: int) -> None:
    table = Table(title="Step times of 2 × 2 CPU ranks on two network namespaces")
    for name in ("link", "mode", "node MB/step", "expected ms", "measured ms", "expected / measured"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    shape = Shape("small", 128, 4096, 16)
    for mbit in (100, 400, 1600):
        for name in ("ddp", "hybrid"):
            with two_nodes(mbit * 1e6) as nodes, tempfile.TemporaryDirectory() as folder:
                found, node_mb = bench(shape, name, nodes, Path(folder), n_steps)
            ratio = found["expected_step_ms"] / found["step_ms"]
            figures = [f"{node_mb:.1f}", f"{found['expected_step_ms']:.0f}", f"{found['step_ms']:.0f}", f"{ratio:.2f}"]
            table.add_row(f"{mbit} Mb/s", name, *figures)
    console.print(table)


def bench(shape: Shape, name: str, nodes: tuple[Node, Node], folder: Path, n_steps: int) -> tuple[dict, float]:
    """Time steps on two nodes with two ranks each; return rank 0's figures, and the MB that a node sends per step."""
    train = {"batch_size": 256, "n_steps": 1000, "precision": "fp32"}
    job = job_of(shape, train, parallel={"mode": name, "shares": "even"})
    paths = RunPaths(folder)
    paths.create()
    paths.job_file.write_text(dump_job(job))
    spec = write_spec(RankSpec(folder, folder, 1, 4, "cpu", on_one_host=False))
    argv = [sys.executable, "-P", "-m", "trainer.measuring.bench_rank", str(spec), str(shape.d_in), "0", str(n_steps)]
    ranks = [
        nodes[rank // 2].start(
            argv, {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
            | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]  # fmt: skip
    for rank in ranks:
        errors = rank.communicate(timeout=600)[1]
        if rank.returncode:
            sys.exit(errors)
    work = Workload(job, 4, DataShape(shape.d_in, None, 10**6), "CPU process")
    return msgspec.json.decode((folder / "found.json").read_bytes()), wire_of(work, 2).node_bytes / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure steps over throttled links on this machine")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    console = Console(width=160)
    if not options.measure:
        modelled(console)
        widths(console)
    elif reason := obstacle():
        sys.exit(reason)
    else:
        measured(console, options.steps)


if __name__ == "__main__":
    main()
