"""Estimates what memory a job needs and how long it takes, before anything runs; the `estimate` command."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.paths import data_dir
from trainer.contract.planning.check_job import chosen_indices, wanted_ranks
from trainer.contract.planning.forecast import NO_ROOM, Forecast, Room, forecast
from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.memory_bar import LETTERS, cells
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.ranks.devices import Device, visible_gpus

_BAR_WIDTH = 74


class Estimate(msgspec.Struct, frozen=True):
    """The bytes of each part on every rank, and the forecast by the speeds of this box."""

    forecast: Forecast
    device_name: str

    @property
    def job(self) -> JobConfig:
        return self.forecast.settled.job

    @property
    def memory(self) -> Memory:
        return self.forecast.settled.memory

    @classmethod
    def of(cls, job: JobConfig) -> Estimate:
        """Estimate a job whose data can be read; `auto` is settled as it would be on this machine."""
        shape, ranks = job.data_shape(), wanted_ranks(job)
        device = "cpu" if job.on_cpu else "cuda"
        gpus = [] if device == "cpu" else _gpus()
        name = CPU if device == "cpu" else gpus[0].name if gpus else "GPU"
        work, room = Workload(job, ranks, shape, name), _room(job, gpus)
        (expected,) = forecast(work, read_box(data_dir().box_file), counts=(ranks,), room=room)
        return cls(expected, name)

    def as_json(self) -> dict[str, Any]:
        """Return bytes under `per_gpu`, the time and the mode."""
        per_gpu = msgspec.structs.asdict(self.memory) | {"total": self.memory.total}
        return {
            "per_gpu": per_gpu,
            "seconds": self.forecast.seconds,
            "tokens_per_s": self.forecast.tokens_per_s,
            "mode": self.job.parallel.mode,
            "device": self.device_name,
            "is_measured": self.forecast.is_measured,
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for people: the bytes of every part, a bar of all of them, and the time."""
        of = f", for {len(self.forecast.settled.work.members)} SAEs" if self.job.sweep else ""
        yield f"per {'process' if self.device_name == CPU else 'GPU'}, on {self.forecast.ranks}{of}:"
        for name, n_bytes in self.as_json()["per_gpu"].items():
            yield f"  {LETTERS.get(name, ' ')} {name:<14}{n_bytes / 2**20:>10,.1f} MiB"
        widths = cells(self.memory, _BAR_WIDTH)
        yield f"  [{''.join(LETTERS[name] * n_cells for name, n_cells in widths.items())}]"
        by = "speeds measured here" if self.forecast.is_measured else f"assumed speeds of a usual {self.device_name}"
        clock = datetime.timedelta(seconds=round(self.forecast.seconds))
        yield f"about {clock} ({self.forecast.tokens_per_s:,.0f} tokens/s, {self.job.parallel.mode}) by {by}"


def _gpus() -> list[Device]:
    """Return the GPUs of this machine; none where torch cannot list them, which is no matter here."""
    with contextlib.suppress(UserError):
        return visible_gpus()
    return []


def _room(job: JobConfig, gpus: list[Device]) -> Room:
    """Return the total memory of the smallest GPU that the job names, or of the largest ones if it names none."""
    named, ranks = chosen_indices(job), wanted_ranks(job)
    sizes = sorted((gpu.memory_bytes for gpu in gpus if not named or gpu.index in named), reverse=True)
    return Room(total_bytes=sizes[ranks - 1]) if len(sizes) >= ranks else NO_ROOM
