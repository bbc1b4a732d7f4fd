"""Provides all GPU data shown on screens: samples, stored history and problems."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample, GpuSource, ProcessShares, is_identified
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.past import RecentHistory, merge, past
from sae_tui.gpu.ring import CAPACITY, RingReading
from sae_tui.gpu.sampler import Sampler, SamplerStatus
from sae_tui.gpu.stored import recent
from sae_tui.gpu.upkeep import Retention
from sae_tui.gpu.visible import all_hidden, count_visible, of_these, visible
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails

# After this time, another process has stored all the samples that it took before this process started.
STORED_BY_S = 6.0
# Without a persistence daemon, the driver must first initialise the GPUs, which takes several seconds per GPU.
OPENING_S = 15.0
# The time limit for pausing, so that the app can be suspended even if a driver or disk hangs.
_PAUSE_LIMIT_S = 3.0


class Monitor:
    """Samples all GPUs and buffers their history; stores it if this process is its host's elected writer."""

    def __init__(
        self,
        source: GpuSource,
        data: DataDir,
        jobs_by_uuid: Callable[[], Mapping[str, int]],
        *,
        interval_s: float = 1.0,
        retention: Retention | None = None,
        only: Collection[int] = (),
    ) -> None:
        """Prepare to sample all of the source's GPUs, and to show those in `only`, or all if it is empty."""
        self.source_name = source.name
        self.cuda = source.cuda
        self.stuck = False
        self._data = data
        self._only = only
        self.interval_s = interval_s
        self._sampler = Sampler(source, interval_s)
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._past_problem = ""
        # The GPUs (index and UUID) whose rings have been filled: by an early read of the store (False) and by the final
        # one (True).
        self._filled: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self._recorder = Recorder(self._sampler, data, jobs_by_uuid, retention=retention)

    @property
    def problem(self) -> str:
        """Why there are no GPUs or why their history is not stored, or "" if there is no problem."""
        if self._sampler.problem:
            return str(self._sampler.problem)
        if self.opening and time.monotonic() - self._started > OPENING_S:
            return "the GPU driver does not respond; restart the machine if this persists"
        samples = self._sampler.latest()
        answered = samples and all(sample.reason != faults.NO_ANSWER_YET for sample in samples)
        if answered and not visible(samples, self.source_name):
            return all_hidden(len(samples), self.source_name)
        return self._recorder.problem or self._past_problem

    @property
    def opening(self) -> bool:
        """True until the driver has listed the GPUs."""
        return self._sampler.status is SamplerStatus.OPENING

    @property
    def hidden(self) -> str:
        """Text like `2 of 8 GPUs, by CUDA_VISIBLE_DEVICES` if some GPUs are hidden, or "" if all are shown."""
        samples = self._sampler.latest()
        shown = visible(samples, self.source_name)
        return count_visible(len(shown), len(samples), self.source_name, n_shown=len(of_these(shown, self._only)))

    def start(self) -> None:
        self._started = time.monotonic()
        self._sampler.start()
        threading.Thread(target=self._fill_rings, name="gpu-past", daemon=True).start()
        self._recorder.start()

    def stop(self) -> None:
        """Stop sampling and storing within 0.5 s; set `stuck` to True if a thread hangs in the driver or on a disk."""
        self._stopped.set()
        stored = self._recorder.stop(timeout=0.3)
        self.stuck = not (self._sampler.stop(timeout=0.2) and stored)

    def pause(self) -> None:
        """Store the remaining samples, let another process take over, and close the driver; give up after 3 s."""
        self._recorder.pause(_PAUSE_LIMIT_S / 3)
        self._sampler.pause(_PAUSE_LIMIT_S * 2 / 3)

    def resume(self) -> None:
        """Resume sampling and storing."""
        self._started = time.monotonic()
        self._sampler.resume()
        self._recorder.resume()

    def change(self, interval_s: float, retention: Retention) -> None:
        """Change the sampling interval and the retention."""
        self.interval_s = interval_s
        self._sampler.pace(interval_s)
        self._recorder.retain(retention)

    def latest(self) -> tuple[GpuSample, ...]:
        """Return the latest sample of each visible GPU, in index order."""
        return of_these(visible(self._sampler.latest(), self.source_name), self._only)

    def readings_s(self) -> dict[int, float]:
        """Return the duration of each GPU's last read, in seconds."""
        return self._sampler.readings_s()

    def read_now(self) -> None:
        """Read all GPUs and their processes at once instead of at the next interval."""
        self._sampler.read_now()

    def want_shares(self, wanted: bool, *, every_sample: bool = False) -> None:
        """Start or stop reading processes' shares with each process list or, if `every_sample`, with each sample."""
        self._sampler.want_shares(wanted, every_sample=every_sample)

    def shares(self, index: int) -> Mapping[int, ProcessShares]:
        """Return a dict mapping each process's pid to its shares of the GPU.

        The dict is empty if the shares are not wanted or have not been read yet.
        """
        return self._sampler.shares(index)

    def look_at(self, index: int | None) -> None:
        """Start reading this GPU's details regularly, or stop if `index` is None."""
        self._sampler.look_at(index)

    def details(self, index: int) -> GpuDetails | None:
        """Return the latest details of the GPU selected by `look_at`, or None before they are first read."""
        return self._sampler.details(index)

    def past(self, n: int) -> RecentHistory:
        """Return each visible GPU's readings in the last `n` intervals."""
        rings = {sample.index: self._sampler.ring(sample.index) for sample in self.latest()}
        return past(rings, n, interval_s=self.interval_s, now=time.time())

    def _fill_rings(self) -> None:
        """Fill each GPU's ring with its stored history as soon as the GPU's UUID is known.

        Reread the store after `STORED_BY_S` to close the gap between the last batch stored by another process and this
        process's first sample. Continue until the monitor stops: a GPU may appear much later or replace another GPU.
        """
        begun, final = time.monotonic(), False
        while not self._stopped.wait(1.0 if final else 0.05):
            final = time.monotonic() - begun >= STORED_BY_S
            try:
                self._fill_new(final)
                self._past_problem = ""
            except Exception as error:
                # Invalid data in the store must not end this thread.
                self._past_problem = f"the stored GPU history cannot be read: {error!r}"

    def _fill_new(self, final: bool) -> None:
        filled = self._filled[final]
        fresh = [
            sample
            for sample in self._sampler.latest()
            if is_identified(sample) and filled.get(sample.index) != sample.uuid
        ]
        if fresh:
            self._fill(fresh)
            filled.update({sample.index: sample.uuid for sample in fresh})

    def _fill(self, samples: Sequence[GpuSample]) -> None:
        stored: Mapping[str, Sequence[RingReading]] = {}
        with contextlib.suppress(UserError):
            stored = recent(self._data.gpu_db, socket.gethostname(), CAPACITY * self.interval_s)
        for sample in samples:
            history = merge(
                stored.get(sample.uuid, ()), self._sampler.buffered(sample.index), self.interval_s, sample.timestamp
            )
            if history:
                self._sampler.ring(sample.index).extend_history(history, sample.uuid)
