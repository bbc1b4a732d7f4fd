"""What more GPUs bring, by the cost model: every mode against our own step on one of them.

    python tests/benchmarks/speedup.py [--card "NVIDIA H200"] [--d-in 2304] [--d-sae 65536] [--batch 4096]

Speeds are those of `box.json` where jobs or `sae-tui doctor --probe` measured this card, else published ones. Weak:
every GPU brings `--batch` tokens to the step; strong: the step stays what it is on one.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from trainer.contract.paths import data_dir
from trainer.contract.planning.forecast import forecast
from trainer.contract.planning.hardware import read_box
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.sources import DataShape

COUNTS = (1, 2, 4, 8)
MODES = {
    "ddp without ZeRO-1": {"mode": "ddp", "zero": False},
    "ddp": {"mode": "ddp"},
    "ddp, bf16 gradients": {"mode": "ddp", "gradients": "bf16"},
    "tensor": {"mode": "tensor"},
    "auto": {"mode": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="NVIDIA H200")
    parser.add_argument("--d-in", type=int, default=2304)
    parser.add_argument("--d-sae", type=int, default=65536)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    options = parser.parse_args()
    title = (
        f"times one {options.card}: d_in {options.d_in}, d_sae {options.d_sae}, k {options.k}, {options.batch} tokens"
    )
    table = Table(title=title)
    for name in ("step", "mode", *(f"{count} GPUs" for count in COUNTS[1:])):
        table.add_column(name, justify="left" if name in ("step", "mode") else "right")
    is_measured = False
    for kind, fixed in (("weak", False), ("strong", True)):
        for mode, parallel in MODES.items():
            rows = speed_ups(options, parallel, fixed=fixed)
            is_measured = all(measured for *_, measured in rows)
            table.add_row(kind, mode, *(f"{times:.2f} ({chosen})" for times, chosen, _ in rows))
    console = Console(width=120)
    console.print(table)
    console.print("speeds measured here" if is_measured else "speeds assumed from published figures", highlight=False)


def speed_ups(options: argparse.Namespace, parallel: dict[str, str], *, fixed: bool) -> list[tuple[float, str, bool]]:
    """Return the speed-up over one GPU, the mode, and whether speeds were measured, for 2, 4 and 8 GPUs."""
    shape = DataShape(options.d_in, None, 10**9)
    work = Workload(job(options, parallel, fixed=fixed), 1, shape, options.card)
    rows = forecast(work, read_box(data_dir().box_file), counts=COUNTS)
    return [
        (row.tokens_per_s / rows[0].tokens_per_s, row.settled.job.parallel.mode, row.is_measured) for row in rows[1:]
    ]


def job(options: argparse.Namespace, parallel: dict[str, str], *, fixed: bool) -> JobConfig:
    train = {"batch_size": options.batch} | ({"global_batch_size": options.batch} if fixed else {})
    table = {
        "data": {"source": "synthetic", "d_in": options.d_in},
        "sae": {"d_sae": options.d_sae, "k": options.k},
        "train": train,
        "parallel": parallel,
    }
    made, problems = parse_job(table)
    assert made is not None, problems
    return made


if __name__ == "__main__":
    main()
