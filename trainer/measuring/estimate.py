"""Estimates a training run's memory use and time in advance, for the `estimate` command."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.paths import box_file
from trainer.contract.planning.check_job import chosen_indices, wanted_devices
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory
from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.model_placement import ModelPlacement, place_model
from trainer.contract.planning.step_time import run_seconds
from trainer.contract.planning.training import check_division
from trainer.contract.settings.job import JobConfig
from trainer.contract.wording import plural
from trainer.measuring.parts_table import parts_of, table
from trainer.ranks.device_choice import refuse_bad
from trainer.ranks.devices import Device, gpus_here

# The number of runnable processes per core at which a job starts to take noticeably longer.
_BUSY = 1.5


class Estimate(msgspec.Struct, frozen=True):
    """The estimated speed, and the estimated memory use on each training GPU and each GPU that only runs the model."""

    placed: ModelPlacement
    device_name: str

    @property
    def job(self) -> JobConfig:
        return self.placed.settled.job

    @property
    def memory(self) -> Memory:
        return self.placed.settled.memory

    @property
    def seconds(self) -> float:
        return run_seconds(self.placed.settled.work, self.placed.settled.time)

    @property
    def tokens_per_s(self) -> float:
        return self.placed.settled.work.tokens_per_step / self.placed.settled.time.total_s

    @classmethod
    def of(cls, job: JobConfig) -> Estimate:
        """Estimate a job whose data can be read; "auto" settings are resolved for this machine."""
        shape, devices = job.data_shape(), wanted_devices(job)
        device = "cpu" if job.on_cpu else "cuda"
        gpus = [] if device == "cpu" else gpus_here()
        name = CPU if device == "cpu" else gpus[0].name if gpus else "GPU"
        return cls(place_model(job, shape, devices, name, read_box(box_file()), _capacity(job, gpus)), name)

    def as_json(self) -> dict[str, Any]:
        """Return the output for `--json`: the memory in bytes, the time, the speed and the resolved settings.

        `per_model_gpu` is None unless some GPUs only run the language model.
        """
        reader = self.placed.reader
        return {
            "per_gpu": parts_of(self.memory),
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "mode": self.job.parallel.mode,
            "device": self.device_name,
            "is_measured": self.placed.is_measured,
            "hold_out": self.job.hold_out,
            "model_gpus": self.placed.model_gpus,
            "per_model_gpu": parts_of(reader) if reader else None,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text output: the memory as a table and a bar, warnings, and the time."""
        work = self.placed.settled.work
        of = f", for {len(work.members)} SAEs" if self.job.sweep else ""
        yield f"per {'process' if self.device_name == CPU else 'GPU'}, on {work.ranks}{of}:"
        yield from table(self.memory)
        if reader := self.placed.reader:
            yield f"per GPU that only runs the language model: {reader.total / 2**20:,.1f} MiB"
        if self.placed.model_gpus or self.placed.why:
            yield self.placed.sentence
        yield self._held_out
        if self.device_name == CPU and (busy := busy_sentence(os.getloadavg()[0], len(os.sched_getaffinity(0)))):
            yield busy
        yield from (f"warning: {problem}" for problem in check_division(work))
        by = "speeds measured here" if self.placed.is_measured else f"assumed speeds of a typical {self.device_name}"
        clock = datetime.timedelta(seconds=round(self.seconds))
        yield f"about {clock} ({self.tokens_per_s:,.0f} tokens/s, {self.job.parallel.mode}) by {by}"

    @property
    def _held_out(self) -> str:
        work = self.placed.settled.work
        n = self.job.data.held_out(work.shape.n_tokens, work.ranks)
        how = {
            "texts": "all rows of some texts",
            "blocks": "blocks of neighbouring rows, since not all shards record their texts",
            "rows": "individual rows",
        }
        of_stream = "the first rows" if work.shape.n_tokens is None else how["rows"]
        what = of_stream if self.job.hold_out == "rows" else how[self.job.hold_out]
        return f"held out: about {n:,} rows, {what} (data.hold_out)" if n else "no rows are held out"


def estimate_training(job: JobConfig) -> Estimate:
    """Estimate a job; raise `JobFileError` if it cannot run on any machine."""
    # Ignore problems with this machine or its GPUs, since the job may be meant for another machine.
    refuse_bad(job, [], Path.cwd(), only=("data.", "sae.", "train."))
    return Estimate.of(job)


def busy_sentence(load: float, n_cores: int) -> str | None:
    """Return a sentence about how much a load average slows a job down, or None if the load is too low to matter."""
    times = load / n_cores
    if times < _BUSY:
        return None
    return f"{plural(n_cores, 'core')}, load {load:.0f}: the job may take about {times:.0f} times as long"


def _capacity(job: JobConfig, gpus: list[Device]) -> DeviceMemory:
    """Return the total memory of a job's smallest GPU; a job that names no GPUs uses the GPUs with the most memory."""
    named, devices = chosen_indices(job), wanted_devices(job)
    sizes = sorted((gpu.memory_bytes for gpu in gpus if not named or gpu.index in named), reverse=True)
    return DeviceMemory(total_bytes=sizes[devices - 1]) if len(sizes) >= devices else UNKNOWN_MEMORY
