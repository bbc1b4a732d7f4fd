"""A table of the GPU operations in a step for each architecture.

The table is tracked in git, so that changes are reviewed.

PYTHONPATH=tests python -m support.step_table > tests/trainer/ops_of_a_step.csv
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from support.fake_gpu import job_of, one_of_ranks
from support.roofline import cost
from support.step_ops import recorded_step

from trainer.contract.settings.catalog import ARCHITECTURES

# Shape B from `tests/benchmarks/gpu_step.py`: two matrices of 75 MB.
SAE, D_IN = {"d_sae": 24576, "k": 32}, 768
COLUMNS = "architecture,case,ops of the passes,ops of the update,kernels launched,MB of the passes,MB of the update"


class Way(NamedTuple):
    """A variant of a step: its training settings, and the number of ranks that split the latents."""

    train: dict[str, Any]
    n_ranks: int = 1


PLAIN = Way({"precision": "bf16"})
# Maps the words after "topk" in the table to a variant of the step.
OTHERS = {
    "with int8 state": Way({"precision": "bf16", "state": "int8"}),
    "in fp16": Way({"precision": "fp16"}),
    "on 2 ranks": Way({"precision": "bf16"}, n_ranks=2),
}


def rows() -> Iterator[str]:
    """Yield the lines of the CSV table, starting with the column names."""
    yield COLUMNS
    for architecture in ARCHITECTURES:
        for case in cases(architecture):
            yield row(architecture, case)
    for words, way in OTHERS.items():
        for case in cases("topk"):
            yield row("topk", case, way).replace("topk", f"topk {words}")


def cases(architecture: str) -> tuple[str, str]:
    """Return the two cases for an architecture: without and with AuxK, or few and many active latents."""
    return ("no dead", "auxk") if "top" in architecture else ("sparse", "dense")


def row(architecture: str, case: str, way: Way = PLAIN) -> str:
    """Return the line for one architecture in one case."""
    ranks, mode = one_of_ranks(1, way.n_ranks)
    job = job_of(SAE | {"architecture": architecture}, {"batch_size": 4096} | way.train, mode)
    step = recorded_step(job, D_IN, dead=case == "auxk", dense=case == "dense", parallel=ranks)
    launches = sum(cost(op).launches for op in step.ops)
    of_passes, of_update = (round(sum(op.bytes for op in ops) / 1e6) for ops in (step.passes, step.update))
    numbers = len(step.passes), len(step.update), launches, of_passes, of_update
    return ",".join(map(str, (architecture, case, *numbers)))


if __name__ == "__main__":
    print(*rows(), sep="\n")
