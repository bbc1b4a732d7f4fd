"""Prints modelled speed-ups on several GPUs: every mode compared with our step on one GPU.

    python tests/benchmarks/speedup.py [--gpu "NVIDIA H200"] [--d-in 2304] [--d-sae 65536] [--batch 4096]
    python tests/benchmarks/speedup.py --markdown | --write

The first command uses the speeds in `box.json` if this GPU has been measured by jobs or by `sae-tui doctor --probe`,
and published speeds otherwise. In weak scaling, every GPU adds `--batch` tokens to a step. In strong scaling, a step
has `--batch` tokens on any number of GPUs. `--markdown` prints the tables for docs/explanation/parallel.md, based on
published speeds and on the two-process CPU speed-ups measured by `scaling.py --json cpu_ranks.json`. `--write` replaces
the tables in the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from trainer.contract.paths import data_dir
from trainer.contract.planning.forecast import DeviceMemory, Forecast, forecast
from trainer.contract.planning.hardware import MeasuredHardware, read_box
from trainer.contract.planning.step_time import wire_of
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.sources import DataShape

COUNTS = (1, 2, 4, 8)
MODES: dict[str, dict[str, Any]] = {
    "ddp without ZeRO-1": {"mode": "ddp", "zero": False},
    "ddp": {"mode": "ddp"},
    "ddp, bf16 gradients": {"mode": "ddp", "gradients": "bf16"},
    "tensor": {"mode": "tensor"},
    "auto": {"mode": "auto"},
}
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "parallel.md"
BEGIN, END = "<!-- speedup.py begins -->", "<!-- speedup.py ends -->"
CPU_RANKS = Path(__file__).with_name("cpu_ranks.json")
GIB, PROMISED = 2**30, {2: 1.8, 4: 3.2, 8: 6.8}


class Shape(NamedTuple):
    """The sizes of an SAE, and the number of tokens per GPU and step."""

    d_in: int
    d_sae: int
    k: int
    batch: int = 4096


class Gpu(NamedTuple):
    """A GPU in the tables: its driver name, its memory in GiB, and the link between several such GPUs."""

    name: str
    gib: int
    link: str


SHAPES = {"A": Shape(2304, 65536, 64), "B": Shape(768, 24576, 32)}
GPUS = (
    Gpu("NVIDIA H200", 141, "NVLink"),
    Gpu("NVIDIA H100 80GB HBM3", 80, "NVLink"),
    Gpu("NVIDIA A100-SXM4-80GB", 80, "NVLink"),
    Gpu("NVIDIA L40S", 48, "PCIe"),
    Gpu("NVIDIA GeForce RTX 3090", 24, "PCIe, through host memory"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--d-sae", type=int, default=65536)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--markdown", action="store_true", help="print the tables of the page")
    parser.add_argument("--write", action="store_true", help="replace the tables in the page")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text()))
    elif options.markdown:
        print(markdown())
    else:
        show(Shape(options.d_in, options.d_sae, options.k, options.batch), options.gpu)


def show(shape: Shape, gpu: str) -> None:
    """Print the speed-ups for all modes on this GPU."""
    title = f"speed-up over one {gpu}: d_in {shape.d_in}, d_sae {shape.d_sae}, k {shape.k}, {shape.batch} tokens"
    table = Table(title=title)
    for name in ("step", "mode", *(f"{count} GPUs" for count in COUNTS[1:])):
        table.add_column(name, justify="left" if name in ("step", "mode") else "right")
    box, is_measured = read_box(data_dir().box_file), False
    for kind, fixed in (("weak", False), ("strong", True)):
        for mode, parallel in MODES.items():
            rows = forecasts(shape, gpu, parallel, box, fixed=fixed)
            is_measured = all(row.is_measured for row in rows)
            words = (f"{row.speed_up:.2f} ({row.settled.job.parallel.mode})" for row in rows[1:])
            table.add_row(kind, mode, *words)
    console = Console(width=120)
    console.print(table)
    console.print("speeds measured here" if is_measured else "speeds assumed from published figures", highlight=False)


def forecasts(
    shape: Shape,
    gpu: str,
    parallel: dict[str, Any],
    box: MeasuredHardware,
    *,
    fixed: bool = False,
    gib: int | None = None,
) -> list[Forecast]:
    """Return forecasts for 1, 2, 4 and 8 GPUs named `gpu` with, if given, `gib` GiB of memory each."""
    work = Workload(job(shape, parallel, fixed=fixed), 1, DataShape(shape.d_in, None, 10**9), gpu)
    capacity = DeviceMemory(total_bytes=None if gib is None else gib * GIB)
    return forecast(work, box, counts=COUNTS, capacity=capacity)


def job(shape: Shape, parallel: dict[str, Any], *, fixed: bool) -> JobConfig:
    train = {"batch_size": shape.batch} | ({"global_batch_size": shape.batch} if fixed else {})
    table = {
        "data": {"source": "synthetic", "d_in": shape.d_in},
        "sae": {"d_sae": shape.d_sae, "k": shape.k},
        "train": train,
        "parallel": parallel,
    }
    made, problems = parse_job(table)
    assert made is not None, problems
    return made


# Tables for the page


def markdown() -> str:
    return "\n\n".join([exchange_table(), speed_table(), cpu_table()])


def page_with(page: str) -> str:
    """Return the page with new tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGE.name} has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


def exchange_table() -> str:
    """Return a table of the megabytes that each GPU sends per step in each mode, with weak scaling."""
    heads = [f"{name}, {count} GPUs" for name in SHAPES for count in COUNTS[1:]]
    rows = []
    for mode, parallel in {**MODES, "hybrid of 2": {"mode": "hybrid", "latent_ranks": 2}}.items():
        if mode == "auto":
            continue
        cells = [sent(shape, parallel, count) for shape in SHAPES.values() for count in COUNTS[1:]]
        rows.append([mode, *cells])
    return f"Modelled MB sent by each GPU per step, with 4,096 tokens per GPU:\n\n{as_table(['mode', *heads], rows)}"


def sent(shape: Shape, parallel: dict[str, Any], count: int) -> str:
    if parallel.get("latent_ranks", 1) >= count:
        return ""
    work = Workload(job(shape, parallel, fixed=False), count, DataShape(shape.d_in, None, 10**9), GPUS[0].name)
    return f"{wire_of(work).n_bytes / 1e6:,.0f}"


def speed_table() -> str:
    """Return a table with the mode that `auto` selects on each GPU, the step time and the speed-up."""
    heads = ["GPU", "link", "SAE", "1 GPU, ms", *(f"{count} GPUs" for count in COUNTS[1:])]
    rows = []
    for gpu in GPUS:
        for name, shape in SHAPES.items():
            found = forecasts(shape, gpu.name, {"mode": "auto"}, MeasuredHardware(), gib=gpu.gib)
            cells = [speed_cell(row) for row in found[1:]]
            rows.append([gpu.name, gpu.link, name, f"{1e3 * found[0].settled.time.total_s:.1f}", *cells])
    targets = [f"{times} ×" for times in PROMISED.values()]
    rows.append(["at least intended", "", "", "", *targets])
    words = "Modelled speed-up of `auto` over one GPU, step time and selected mode, with 4,096 tokens per GPU:"
    return f"{words}\n\n{as_table(heads, rows)}"


def speed_cell(row: Forecast) -> str:
    parallel = row.settled.job.parallel
    mode = f"hybrid of {parallel.latent_ranks}" if parallel.mode == "hybrid" else parallel.mode
    cell = f"{row.speed_up:.1f} ×, {1e3 * row.settled.time.total_s:.1f} ms, {mode}"
    return cell if row.settled.fits else f"{cell}, too large"


def cpu_table() -> str:
    """Return a table of the speed-ups measured with two CPU processes."""
    measured = json.loads(CPU_RANKS.read_text())
    modes = ("ddp", "tensor")
    rows = [
        [f"{int(d_sae):,}", *(f"{found[mode]['speed_up']:.2f} ×" for mode in modes)]
        for d_sae, found in measured.items()
    ]
    words = "**Measured** speed-up of two CPU processes over one, with d_in 384, k 32 and 4,096 tokens per step:"
    return f"{words}\n\n{as_table(['latents', *modes], rows)}"


def as_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
