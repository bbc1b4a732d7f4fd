"""Measures the energy that a job's GPUs take while it has them, and writes it into the job's row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from sae_tui.gpu.energy import CardMeter, Used
from sae_tui.gpu.stored import energy_readings
from sae_tui.jobs.supervisor_log import tolerate
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job

# So seldom that it costs nothing, and so often that a job whose supervisor is killed has lost next to nothing.
EVERY_S = 30.0
J_PER_WH = 3600.0
# Seconds. A smaller step ahead is an ordinary adjustment of the clock.
JUMP_S = 60.0


class EnergyMeter:
    """Adds what one attempt takes to what the earlier ones took; for a job without GPUs it does nothing.

    It reads the stored samples of the GPUs, whoever stores them. What others do on a GPU that is shared with them is
    part of it.
    """

    def __init__(
        self,
        data: DataDir,
        control: Control,
        job: Job,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now by `clock`, which the samples have as well; `steady` is never set back."""
        self._steady = steady
        self._latest = self._latest_steady = 0.0
        self._data, self._control, self._job, self._clock = data, control, job, clock
        self._cards = tuple(zip(job.gpu_ids, job.gpu_uuids, strict=False))
        self._begin(clock())
        self._due = steady() + EVERY_S
        # The energy used before: by earlier attempts, and by this one before its clock jumped.
        self._before: Used | None = None

    def turn(self) -> None:
        """Bring the job's row up to date, twice a minute."""
        if self._steady() >= self._due:
            self._due = self._steady() + EVERY_S
            self.end()

    def end(self) -> None:
        """Bring the job's row up to date at once; a store that cannot be used now is noted, and tried again later."""
        if not self._cards:
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
        self._meters = {uuid: CardMeter(now) for uuid in self._job.gpu_uuids}

    def _total(self, until: float) -> Used:
        """Return what the job has taken until then, with all that was before."""
        if self._before is None:
            self._before = _used_before(self._control, self._job)
        return sum((meter.used(until) for meter in self._meters.values()), start=self._before)

    def _read(self, until: float) -> None:
        path = self._data.gpu_db
        if not path.exists():
            return
        after = {uuid: meter.newest for uuid, meter in self._meters.items()}
        for uuid, readings in energy_readings(path, self._job.host, self._cards, after, until).items():
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
    """Return what the attempts before have taken, by the job's row; by the row as it was where it is lost."""
    with contextlib.suppress(UserError):
        job = control.job(job.id)
    return Used(
        (job.energy_wh or 0.0) * J_PER_WH, job.energy_s or 0.0, job.energy_known_s or 0.0, job.energy_counted_s or 0.0
    )
