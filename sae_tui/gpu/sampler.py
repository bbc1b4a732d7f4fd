"""Reads each GPU on its own thread so that a hung GPU never blocks the other GPUs or the app."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from sae_tui.gpu import AUTO, faults
from sae_tui.gpu.base import GpuSample, GpuSource, ProcessShares, SourceUnavailable
from sae_tui.gpu.detailed import (
    DetailedSource,
    HurriedSource,
    RememberingSource,
    ReopeningSource,
    SharesSource,
    vendor_of,
)
from sae_tui.gpu.once import CLOSE_LIMIT_S, close_source
from sae_tui.gpu.read import Probe
from sae_tui.gpu.ring import CAPACITY, Ring, RingReading
from trainer.contract.planning.gpu_vendors import VENDORS

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails

PROCESSES_EVERY_S = 3.0
REOPEN_EVERY_S = 10.0
# The minimum interval between attempts to reopen a driver that opens but does not recognise its GPUs.
_REOPEN_AFTER_S = 5.0
SILENT_AFTER_S = 5.0
# If a read takes longer than this, the driver's buffered samples are skipped, as reading them requires more calls.
_QUICK_S = 0.3


class SamplerStatus(StrEnum):
    """The state of the sampler; in state UNAVAILABLE, `Sampler.problem` explains why."""

    OPENING = "opening"
    READY = "ready"
    UNAVAILABLE = "unavailable"
    STOPPED = "stopped"


@dataclass(slots=True)
class _SampledGpu:
    """A GPU's latest sample and ring, written only by that GPU's thread."""

    sample: GpuSample
    ring: Ring
    answered: float  # The monotonic time of the last driver response.
    took_s: float = 0.0  # The duration of the last read.
    buffered: tuple[RingReading, ...] | None = None  # The driver's buffer at the first healthy read.
    details: GpuDetails | None = None
    shares: Mapping[int, ProcessShares] | None = None  # Maps pids to their shares of the GPU; None until read.


class Sampler:
    """Keeps the latest sample and the recent history for each GPU in a source."""

    def __init__(
        self,
        source: GpuSource,
        interval_s: float = 1.0,
        *,
        capacity: int = CAPACITY,
    ) -> None:
        self.source = source
        self.problem: SourceUnavailable | None = None
        self._status = SamplerStatus.OPENING
        self._interval = interval_s
        self._capacity = capacity
        self._gpus: tuple[_SampledGpu, ...] = ()
        self._rings: dict[int, Ring] = {}
        self._threads: list[threading.Thread] = []
        self._opened = 0.0  # The monotonic time at which the driver was last opened.
        self._probe = Probe(source.name)
        self._changed = threading.Condition()
        self._stopping = self._paused = self._is_open = False
        self._looked_at: int | None = None
        self._shares_wanted = self._shares_with_every_sample = False
        self._n_asked = 0

    @property
    def status(self) -> SamplerStatus:
        return self._status

    @property
    def count(self) -> int:
        """The number of GPUs, or 0 until the source is open."""
        return len(self._gpus)

    def start(self) -> None:
        """Start sampling and return without waiting for the source, which may hang; a second call does nothing."""
        if not self._threads:
            self._spawn(self._run, "gpu-source")

    def stop(self, timeout: float = 0.5) -> bool:
        """Stop all threads; return False if one is stuck in the driver and only `os._exit` can end the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._hurry()
        deadline = time.monotonic() + timeout
        # Join the first thread before the others, which it starts: once it has exited, no more threads are added.
        ended = all(_join(thread, deadline) for thread in self._threads)
        if ended and self._status is SamplerStatus.READY:
            ended = _join(self._spawn(self.source.close, "gpu-close"), deadline)
        self._status = SamplerStatus.STOPPED
        return ended

    def pause(self, timeout: float) -> bool:
        """Close the driver until `resume` is called; GPUs cannot be reset while the driver is open.

        Return False if the driver is not closed within `timeout` seconds.
        """
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._hurry()
            return self._changed.wait_for(lambda: not self._is_open, timeout)

    def _hurry(self) -> None:
        if isinstance(self.source, HurriedSource):
            self.source.hurry()

    def resume(self) -> None:
        """Make the sampler's own thread reopen the driver after a pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def latest(self) -> tuple[GpuSample, ...]:
        """Return each GPU's latest sample, in index order; GPUs that no longer respond have unhealthy samples."""
        now = time.monotonic()
        return tuple(self._current(gpu, now) for gpu in self._gpus)

    def ring(self, index: int) -> Ring:
        """Return a GPU's ring, which may be requested and filled before the source is open."""
        if index not in self._rings:
            self._rings.setdefault(index, Ring(self._capacity))
        return self._rings[index]

    def buffered(self, index: int) -> tuple[RingReading, ...]:
        """Return the readings buffered by the driver when the GPU was first read, oldest first."""
        return (self._gpus[index].buffered or ()) if index < len(self._gpus) else ()

    def readings_s(self) -> dict[int, float]:
        """Return the duration of each GPU's last read, in seconds."""
        return {index: gpu.took_s for index, gpu in enumerate(self._gpus)}

    def want_shares(self, wanted: bool, *, every_sample: bool = False) -> None:
        """Start or stop reading processes' shares with each process list or, if `every_sample`, with each sample."""
        self._shares_with_every_sample = every_sample
        if wanted == self._shares_wanted:
            return
        with self._changed:
            self._shares_wanted = wanted
            self._changed.notify_all()

    def shares(self, index: int) -> Mapping[int, ProcessShares]:
        """Return a dict mapping each process's pid to its shares of the GPU.

        The dict is empty if the shares are not wanted or have not been read yet.
        """
        return (self._gpus[index].shares or {}) if self._shares_wanted and index < len(self._gpus) else {}

    def read_now(self) -> None:
        """Read all GPUs and their processes at once instead of at the next interval."""
        with self._changed:
            self._n_asked += 1
            self._changed.notify_all()

    def look_at(self, index: int | None) -> None:
        """Start reading this GPU's details regularly, or stop if `index` is None."""
        if index == self._looked_at:
            return
        with self._changed:
            self._looked_at = index
            self._changed.notify_all()

    def details(self, index: int) -> GpuDetails | None:
        """Return the latest details of the GPU selected by `look_at`, or None before they are first read."""
        return self._gpus[index].details if index < len(self._gpus) and index == self._looked_at else None

    def _run(self) -> None:
        while (count := self._open()) is not None:
            old = self._gpus
            self._gpus = tuple(self._new_gpu(index, old) for index in range(count))
            self.problem, self._status, self._opened = None, SamplerStatus.READY, time.monotonic()
            for gpu in self._gpus:
                self._spawn(self._watch, f"gpu-{gpu.sample.index}", gpu)
            while not (self._stopping or self._paused or self._must_reopen_safely()):
                self._record_silence()
                self._wait_until(time.monotonic() + self._interval)
            if self._stopping:
                return
            self._close()

    def _open(self) -> int | None:
        """Open the source and return the number of GPUs, or None if the sampler stops first.

        Retry every `REOPEN_EVERY_S`, to detect a driver that becomes available later.
        """
        while self._may_open():
            try:
                return self.source.open()
            except SourceUnavailable as error:
                problem = error
            except Exception as error:
                problem = SourceUnavailable(f"the GPU source {self.source.name} failed: {error!r}", "", is_broken=True)
            self.problem, self._status = problem, SamplerStatus.UNAVAILABLE
            self._now_closed()
            # If the driver is broken, keep the GPUs, which still exist, but mark them as unreadable.
            self._gpus = tuple(self._unread(gpu, problem.reason) for gpu in self._gpus if problem.is_broken)
            self._wait_until(time.monotonic() + REOPEN_EVERY_S)
        return None

    def _may_open(self) -> bool:
        """Wait while the sampler is paused; return False once it stops."""
        with self._changed:
            if self._paused:
                self._status = SamplerStatus.OPENING
                # The last readings are outdated after the pause.
                self._gpus = tuple(self._unread(gpu, faults.NO_ANSWER_YET) for gpu in self._gpus)
            self._changed.wait_for(lambda: self._stopping or not self._paused)
            self._is_open = not self._stopping
            return self._is_open

    def _now_closed(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _must_reopen_safely(self) -> bool:
        with contextlib.suppress(Exception):  # Source errors must not end this thread.
            return self._must_reopen()
        return False

    def _must_reopen(self) -> bool:
        """Return whether the driver must be reopened: its GPUs have changed or recovered, or none can be read."""
        now = time.monotonic()
        if now - self._opened < _REOPEN_AFTER_S:
            return False
        if isinstance(self.source, ReopeningSource) and self.source.must_reopen:
            return True
        unread = [gpu for gpu in self._gpus if not gpu.sample.healthy and not self._is_silent(gpu, now)]
        if len(unread) == len(self._gpus):
            return now - self._opened >= REOPEN_EVERY_S
        if self.source.name not in (AUTO, *VENDORS):
            return False
        # Consider only GPUs that were readable before: resetting one GPU does not affect the other GPUs.
        lost = [gpu.sample.index for gpu in unread if gpu.sample.unread_since is not None]
        return self._probe.finds(lost, now)

    def _close(self) -> None:
        """Stop all GPU threads that are not stuck, and close the driver so that it can be reopened."""
        # Each thread exits once its entry is no longer in `_gpus`, so replace all entries with copies.
        self._gpus = tuple(replace(gpu) for gpu in self._gpus)
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_LIMIT_S
        watchers, self._threads = self._threads[1:], self._threads[:1]
        self._threads += [thread for thread in watchers if not _join(thread, deadline)]
        close_source(self.source)
        self._now_closed()

    def _watch(self, gpu: _SampledGpu) -> None:
        """Sample one GPU once per clock interval; skip missed intervals."""
        index = gpu.sample.index
        deadline = processes_due = time.monotonic()
        n_asked, was_unseen = self._n_asked, False
        while self._is_current(gpu):
            # Float sums are not exact, so allow a margin of half an interval.
            due = deadline + self._interval / 2 >= processes_due or not gpu.sample.healthy
            # Also list the processes when an unlisted process begins to use the GPU, but only once: a process in
            # another container is never listed, so trying with every sample would double the number of driver calls.
            due = due or (gpu.sample.is_used_unseen and not was_unseen) or n_asked != self._n_asked
            n_asked, was_unseen = self._n_asked, gpu.sample.is_used_unseen
            try:
                self._turn(gpu, due)
            except Exception as error:
                # Errors in a driver's response must not end this thread.
                blank = _blank(gpu.sample, f"reading it failed: {error!r}")
                gpu.sample, gpu.answered = _lost(gpu.sample, blank), time.monotonic()
            if due:
                processes_due = deadline + PROCESSES_EVERY_S
            deadline = time.monotonic() + until_next(time.time(), self._interval)
            self._wait_until(deadline, looking=index, gpu=gpu, n_asked=n_asked)
            deadline = min(deadline, time.monotonic())

    def _turn(self, gpu: _SampledGpu, due: bool) -> None:
        """Read a GPU once, including its processes if `due`."""
        index, begun = gpu.sample.index, time.monotonic()
        sample = self._read(gpu.sample, processes=due)
        if not self._is_current(gpu):
            return
        if not sample.healthy:
            sample = _lost(gpu.sample, sample)
        if sample.uuid != gpu.sample.uuid:
            gpu.buffered = None  # Another GPU has this index now.
        # Update the ring before the latest sample so that the ring never belongs to an older GPU than the sample.
        gpu.ring.append(sample)
        gpu.sample, gpu.answered = sample, time.monotonic()
        gpu.took_s = gpu.answered - begun
        if gpu.buffered is None and sample.healthy:
            gpu.buffered = self._read_buffer(index) if gpu.took_s < _QUICK_S else ()
        if not self._shares_wanted:
            gpu.shares = None
        elif due or self._shares_with_every_sample or gpu.shares is None:
            gpu.shares = self._read_shares(sample)
        gpu.details = self._read_details(sample) if index == self._looked_at else None

    def _is_current(self, gpu: _SampledGpu) -> bool:
        """Return whether a GPU is still sampled: the sampler has neither stopped nor reopened the driver."""
        index = gpu.sample.index
        return not self._stopping and index < len(self._gpus) and self._gpus[index] is gpu

    def _read(self, last: GpuSample, *, processes: bool) -> GpuSample:
        try:
            sample = self.source.sample(last.index, processes=processes)
        except Exception as error:
            return _blank(last, f"reading it failed: {error!r}")
        if processes or not sample.healthy:
            return sample
        failed = {key: words for key, words in last.failed.items() if key == "processes"}
        failed = {**failed, **sample.failed}
        # Keep the values that are read only with the processes, unless this is a different GPU.
        kept = last if last.uuid == sample.uuid else sample
        return replace(sample, processes=kept.processes, condition=kept.condition, failed=failed)

    def _read_shares(self, sample: GpuSample) -> Mapping[int, ProcessShares]:
        # Without this check, every idle GPU would be queried at every interval.
        if sample.healthy and sample.processes and isinstance(self.source, SharesSource):
            with contextlib.suppress(Exception):
                return self.source.shares(sample.index, sample)
        return {}

    def _read_buffer(self, index: int) -> tuple[RingReading, ...]:
        if isinstance(self.source, RememberingSource):
            with contextlib.suppress(Exception):
                return self.source.buffered(index)
        return ()

    def _read_details(self, sample: GpuSample) -> GpuDetails | None:
        if not sample.healthy or not isinstance(self.source, DetailedSource):
            return None
        with contextlib.suppress(Exception):  # Missing details must not make the GPU unreadable.
            return self.source.details(sample.index, sample)
        return None

    def pace(self, interval_s: float) -> None:
        """Change the sampling interval."""
        with self._changed:
            self._interval = interval_s
            self._changed.notify_all()

    def _current(self, gpu: _SampledGpu, now: float) -> GpuSample:
        if not self._is_silent(gpu, now):
            return gpu.sample
        return _blank(gpu.sample, f"has not responded for {now - gpu.answered:.0f} s")

    def _is_silent(self, gpu: _SampledGpu, now: float) -> bool:
        """Return whether the current read of a GPU is taking too long, or False if the GPU is already unreadable."""
        if self._status is SamplerStatus.OPENING:
            return False
        waiting = gpu.sample.healthy or gpu.sample.reason == faults.NO_ANSWER_YET
        return waiting and now - gpu.answered > max(SILENT_AFTER_S, 3 * self._interval)

    def _record_silence(self) -> None:
        """Append an unhealthy sample to each silent GPU's ring so that its history keeps advancing."""
        for gpu, sample in zip(self._gpus, self.latest(), strict=True):
            if sample is not gpu.sample:
                gpu.ring.append(sample)

    def _new_gpu(self, index: int, old: Sequence[_SampledGpu]) -> _SampledGpu:
        """Return a GPU's initial state, including its last sample from before the driver was reopened, if any."""
        vendor = vendor_of(self.source, index)
        if index < len(old) and old[index].sample.vendor == vendor:
            return _SampledGpu(old[index].sample, self.ring(index), time.monotonic())
        sample = GpuSample(index, f"GPU-index-{index}", f"GPU {index}", time.time(), healthy=False,
                           reason=faults.NO_ANSWER_YET, failed={"uuid": "unknown"}, vendor=vendor)  # fmt: skip
        return _SampledGpu(sample, self.ring(index), time.monotonic())

    @staticmethod
    def _unread(gpu: _SampledGpu, reason: str) -> _SampledGpu:
        sample = _lost(gpu.sample, _blank(gpu.sample, reason))
        gpu.ring.append(sample)
        return _SampledGpu(sample, gpu.ring, time.monotonic())

    def _wait_until(
        self, deadline: float, *, looking: int | None = None, gpu: _SampledGpu | None = None, n_asked: int | None = None
    ) -> None:
        """Wait until the deadline.

        Return early if the sampler stops or pauses, if its settings or GPUs change, or if a GPU is to be read now.
        """
        interval, was, shares = self._interval, self._looked_at, self._shares_wanted
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping
                    or self._interval != interval
                    or (gpu is None and self._paused)
                    or n_asked not in (None, self._n_asked)
                    or (looking is not None and was != self._looked_at == looking)
                    or (gpu is not None and self._shares_wanted and not shares)
                    or (gpu is not None and not self._is_current(gpu))
                ),
                timeout=max(0.0, deadline - time.monotonic()),
            )

    def _spawn(self, target: Callable[..., None], name: str, *arguments: _SampledGpu) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread


def interval_of(timestamp: float, interval_s: float) -> int:
    """Return the number of the clock interval containing a time.

    The numbers are the same for all GPUs, apps and hosts.
    """
    return math.floor(timestamp / interval_s)


def until_next(now: float, interval_s: float) -> float:
    """Return the seconds until a tenth of the next clock interval has passed.

    Without this margin, a thread that wakes slightly early, or while the clock is being adjusted, could wake in the
    previous interval.
    """
    return (interval_of(now, interval_s) + 1.1) * interval_s - now


def _join(thread: threading.Thread, deadline: float) -> bool:
    """Wait for a thread until the deadline; return whether it has exited."""
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _lost(last: GpuSample, sample: GpuSample) -> GpuSample:
    """Set an unhealthy sample's `unread_since` to the time when the previously readable GPU became unreadable."""
    return replace(sample, unread_since=sample.timestamp if last.healthy else last.unread_since)


def _blank(last: GpuSample, reason: str) -> GpuSample:
    """Return a sample without values for an unreadable GPU; keep the GPU's identity."""
    failed = {key: words for key, words in last.failed.items() if key == "uuid"}
    return GpuSample(
        last.index, last.uuid, last.name, time.time(), healthy=False, reason=reason, failed=failed, vendor=last.vendor
    )
