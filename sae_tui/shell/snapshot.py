"""One reading of every GPU for a command, never longer than twice the limit."""

from __future__ import annotations

import msgspec

from sae_tui.gpu.base import GpuSample, GpuSource, SourceUnavailable
from sae_tui.gpu.once import LIMIT_S, on_thread, read_all
from sae_tui.jobs.availability import GpuChoice, choices, with_strangers
from sae_tui.jobs.locks import lock_folder
from sae_tui.jobs.occupancy import Occupancy
from trainer.contract.paths import DataDir


class Snapshot(msgspec.Struct, frozen=True):
    """Samples and what they mean for a new job; `problem` says why there are none."""

    samples: tuple[GpuSample, ...]
    choices: tuple[GpuChoice, ...]
    source_name: str
    cuda: bool
    problem: str = ""


def take(source: GpuSource, occupancy: Occupancy, data: DataDir, limit_s: float = LIMIT_S) -> Snapshot:
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
    held = with_strangers(occupancy.holders(), lock_folder(data, source.name), samples)
    return Snapshot(samples, choices(samples, held), source.name, source.cuda, problem)
