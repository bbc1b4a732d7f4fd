"""Measures the energy used by GPUs while a job holds them, and writes it to the job's row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from sae_tui.gpu.energy import GpuMeter, Used
from sae_tui.gpu.stored import energy_readings
from sae_tui.jobs.supervisor_log import tolerate
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job

# The interval between updates. More frequent updates would cost time; with less frequent ones, a killed supervisor
# would lose more energy readings.
EVERY_S = 30.0
J_PER_WH = 3600.0
# Smaller forward clock steps are regarded as ordinary adjustments.
JUMP_S = 60.0


class EnergyMeter:
    """Adds one attempt's energy to the energy used by earlier attempts; does nothing for a job without GPUs.

    The energy is computed from stored GPU samples, no matter which process stored them. A shared GPU's energy includes
    energy used by other jobs on that GPU.
    """

    def __init__(
        self,
        data: DataDir,
        control: Control,
        job: Job,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start measuring now; `clock` is the clock used for the samples, and `steady` is a clock that never jumps."""
        self._steady = steady
        self._latest = self._latest_steady = 0.0
        self._data, self._control, self._job, self._clock = data, control, job, clock
        self._gpus = tuple(zip(job.gpu_ids, job.gpu_uuids, strict=False))
        self._begin(clock())
        self._due = steady() + EVERY_S
        # The energy used by earlier attempts, and by this attempt before the clock jumped.
        self._before: Used | None = None

    def turn(self) -> None:
        """Update the job's row if the last update was more than `EVERY_S` ago."""
        if self._steady() >= self._due:
            self._due = self._steady() + EVERY_S
            self.end()

    def end(self) -> None:
        """Update the job's row now; if the store is unavailable, log the error."""
        if not self._gpus:
            return
        with tolerate("measuring the energy"):
            now, steady = self._clock(), self._steady()
            expected = self._latest + steady - self._latest_steady
            if now < self._latest or now > expected + JUMP_S:
                self._before = self._total(self._latest if now < self._latest else expected)
                self._begin(now)
            self._latest, self._latest_steady = now, steady
            self._read(now)
            self._write(self._total(now))

    def _begin(self, now: float) -> None:
        self._latest, self._latest_steady = now, self._steady()
        self._meters = {uuid: GpuMeter(now) for uuid in self._job.gpu_uuids}

    def _total(self, until: float) -> Used:
        """Return the energy used by the job up to the time `until`, including its earlier attempts."""
        if self._before is None:
            self._before = _used_before(self._control, self._job)
        return sum((meter.used(until) for meter in self._meters.values()), start=self._before)

    def _read(self, until: float) -> None:
        path = self._data.gpu_db
        if not path.exists():
            return
        after = {uuid: meter.newest for uuid, meter in self._meters.items()}
        for uuid, readings in energy_readings(path, self._job.host, self._gpus, after, until).items():
            for reading in readings:
                self._meters[uuid].add(reading)

    def _write(self, total: Used) -> None:
        self._control.update(
            self._job.id,
            energy_wh=total.joules / J_PER_WH if total.known_s else None,
            energy_s=total.lasted_s,
            energy_known_s=total.known_s,
            energy_counted_s=total.counted_s,
        )


def _used_before(control: Control, job: Job) -> Used:
    """Return the energy of earlier attempts from the job's row in the store or, if it cannot be read, from `job`."""
    with contextlib.suppress(UserError):
        job = control.job(job.id)
    return Used(
        (job.energy_wh or 0.0) * J_PER_WH, job.energy_s or 0.0, job.energy_known_s or 0.0, job.energy_counted_s or 0.0
    )
