"""What a screen needs of the GPUs: sampler, stored history and their problems behind one small face."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

from sae_tui.gpu.base import GpuSample, GpuSource
from sae_tui.gpu.history import Recorder, Retention, recent
from sae_tui.gpu.past import Past, past
from sae_tui.gpu.ring import CAPACITY
from sae_tui.gpu.sampler import Sampler, Status
from trainer.contract.paths import DataDir
from trainer.contract.problems import UserError

# A driver without a persistence daemon wakes up every card first, which takes seconds each.
OPENING_S = 15.0


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
        if self.opening and time.monotonic() - self._started > OPENING_S:
            return "the GPU driver does not answer; restart the machine if it stays so"
        return self._recorder.problem or ""

    @property
    def opening(self) -> bool:
        """Whether the driver has not said yet which GPUs there are."""
        return self._sampler.status is Status.OPENING

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
        """The newest sample of every card, by index."""
        return self._sampler.latest()

    def past(self, n: int) -> Past:
        """What every card did in the last `n` intervals."""
        rings = {sample.index: self._sampler.ring(sample.index) for sample in self.latest()}
        return past(rings, n, interval_s=self._interval_s, now=time.time())

    def _fill_rings(self) -> None:
        """The history outlives the app: what was stored is drawn from the first moment on."""
        try:
            past = recent(self._data.gpu_db, socket.gethostname(), CAPACITY * self._interval_s, self._interval_s)
        except UserError:
            return
        for index, readings in past.items():
            self._sampler.ring(index).extend_history(readings)
