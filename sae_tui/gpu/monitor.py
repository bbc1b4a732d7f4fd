"""What a screen needs of the GPUs: sampler, stored history and their problems behind one small face."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample, GpuSource
from sae_tui.gpu.history import Recorder, Retention, recent
from sae_tui.gpu.ring import CAPACITY
from sae_tui.gpu.sampler import SILENT_AFTER_S, Sampler, Status
from sae_tui.gpu.visible import all_hidden, counted, limit_of, visible
from trainer.contract.paths import DataDir
from trainer.contract.problems import UserError


class Monitor:
    """Samples, keeps the past of every card, and stores it if this process is the one of its host that does."""

    def __init__(
        self,
        source: GpuSource,
        data: DataDir,
        jobs_by_uuid: Callable[[], Mapping[str, int]],
        *,
        interval_s: float = 1.0,
        retention: Retention | None = None,
    ) -> None:
        self.source_name = source.name
        self.cuda = source.cuda
        self.stuck = False
        self._limit = limit_of(source)
        self._data = data
        self._interval_s = interval_s
        self._sampler = Sampler(source, interval_s)
        self._started = time.monotonic()
        self._recorder = Recorder(self._sampler, data, jobs_by_uuid, retention=retention or Retention())

    @property
    def problem(self) -> str:
        """Why there are no GPUs, or why their history is not stored; empty while all is well."""
        if self._sampler.problem:
            return str(self._sampler.problem)
        if self._sampler.status is Status.OPENING and time.monotonic() - self._started > SILENT_AFTER_S:
            return "the GPU driver does not answer; restart the machine if it stays so"
        samples = self._sampler.latest()
        answered = samples and all(sample.reason != faults.NO_ANSWER_YET for sample in samples)
        if answered and not visible(samples, self._limit):
            return all_hidden(self._limit, len(samples))
        return self._recorder.problem or ""

    @property
    def hidden(self) -> str:
        """`2 of 8 GPUs, by CUDA_VISIBLE_DEVICES`; nothing where all are shown."""
        return counted(len(self.latest()), self._sampler.count)

    def start(self) -> None:
        self._started = time.monotonic()
        self._sampler.start()
        threading.Thread(target=self._fill_rings, name="gpu-past", daemon=True).start()
        self._recorder.start()

    def stop(self) -> None:
        """Ends sampling and storing within 0.5 s; `stuck` tells whether a thread is caught in the driver."""
        stored = self._recorder.stop(timeout=0.3)
        self.stuck = not (self._sampler.stop(timeout=0.2) and stored)

    def latest(self) -> tuple[GpuSample, ...]:
        """The newest sample of every card that may be used, by index."""
        return visible(self._sampler.latest(), self._limit)

    def column(self, index: int, name: str, n: int) -> list[float | None]:
        """The last `n` values of a card, newest last."""
        return self._sampler.ring(index).column(name, n)

    def _fill_rings(self) -> None:
        """The history outlives the app: what was stored is drawn from the first moment on."""
        try:
            past = recent(self._data.gpu_db, socket.gethostname(), CAPACITY * self._interval_s, self._interval_s)
        except UserError:
            return
        for index, readings in past.items():
            self._sampler.ring(index).extend_history(readings)
