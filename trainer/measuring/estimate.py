"""Estimates what memory a training needs and how long it takes, before anything runs; the `estimate` command."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import msgspec

from trainer.contract.paths import data_dir
from trainer.contract.planning.check_job import chosen_indices, wanted_ranks
from trainer.contract.planning.forecast import NO_ROOM, Forecast, Room, forecast
from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.measuring.parts_table import parts_of, table
from trainer.ranks.devices import Device, gpus_here


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
        gpus = [] if device == "cpu" else gpus_here()
        name = CPU if device == "cpu" else gpus[0].name if gpus else "GPU"
        work, room = Workload(job, ranks, shape, name), _room(job, gpus)
        (expected,) = forecast(work, read_box(data_dir().box_file), counts=(ranks,), room=room)
        return cls(expected, name)

    def as_json(self) -> dict[str, Any]:
        """Return bytes under `per_gpu`, the time and the mode."""
        return {
            "per_gpu": parts_of(self.memory),
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
        yield from table(self.memory)
        by = "speeds measured here" if self.forecast.is_measured else f"assumed speeds of a usual {self.device_name}"
        clock = datetime.timedelta(seconds=round(self.forecast.seconds))
        yield f"about {clock} ({self.forecast.tokens_per_s:,.0f} tokens/s, {self.job.parallel.mode}) by {by}"


def _room(job: JobConfig, gpus: list[Device]) -> Room:
    """Return the total memory of the smallest GPU that the job names, or of the largest ones if it names none."""
    named, ranks = chosen_indices(job), wanted_ranks(job)
    sizes = sorted((gpu.memory_bytes for gpu in gpus if not named or gpu.index in named), reverse=True)
    return Room(total_bytes=sizes[ranks - 1]) if len(sizes) >= ranks else NO_ROOM
