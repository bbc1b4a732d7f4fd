"""One reading of every GPU for a command, never longer than twice the limit."""

from __future__ import annotations

import msgspec

from sae_tui.gpu.base import GpuSample, GpuSource, SourceUnavailable
from sae_tui.gpu.once import LIMIT_S, on_thread, read_all
from sae_tui.jobs.availability import GpuChoice, choices
from sae_tui.jobs.occupancy import Occupancy


class Snapshot(msgspec.Struct, frozen=True):
    """Samples and what they mean for a new job; `problem` says why there are none."""

    samples: tuple[GpuSample, ...]
    choices: tuple[GpuChoice, ...]
    source_name: str
    cuda: bool
    problem: str = ""


def take(source: GpuSource, occupancy: Occupancy, limit_s: float = LIMIT_S) -> Snapshot:
    """Reads all cards at the same time; never takes longer than twice the limit."""
    samples: tuple[GpuSample, ...] = ()
    problem = ""
    try:
        count = on_thread(source.open).result(limit_s)
        samples = read_all(source, count, limit_s)
    except SourceUnavailable as error:
        problem = str(error)
    except TimeoutError:
        problem = f"the GPU driver did not answer within {limit_s:g} s; see whether nvidia-smi does"
    return Snapshot(samples, choices(samples, occupancy.holders()), source.name, source.cuda, problem)
