"""Reads every GPU on a thread of its own, so that one that hangs never stops the others or the keys."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample, GpuSource, SourceUnavailable
from sae_tui.gpu.ring import CAPACITY, Ring

PROCESSES_EVERY_S = 3.0
REOPEN_EVERY_S = 10.0
SILENT_AFTER_S = 5.0


class Status(StrEnum):
    """Where the sampler is; with UNAVAILABLE, `Sampler.problem` says why."""

    OPENING = "opening"
    READY = "ready"
    UNAVAILABLE = "unavailable"
    STOPPED = "stopped"


@dataclass(slots=True)
class _Card:
    """What is known of a card; written by its own thread only."""

    sample: GpuSample
    ring: Ring
    answered: float  # monotonic time of the last answer


class Sampler:
    """Keeps the newest sample and the recent past of every GPU of a source.

    `on_sample` is called on a sampling thread after each sample and each change of `status`; it must neither
    block nor raise.
    """

    def __init__(
        self,
        source: GpuSource,
        interval_s: float = 1.0,
        on_sample: Callable[[], None] | None = None,
        *,
        capacity: int = CAPACITY,
    ) -> None:
        self.source = source
        self.problem: SourceUnavailable | None = None
        self._status = Status.OPENING
        self._interval = interval_s
        self._notify = on_sample or (lambda: None)
        self._capacity = capacity
        self._cards: tuple[_Card, ...] = ()
        self._rings: dict[int, Ring] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._stopping = False

    @property
    def status(self) -> Status:
        return self._status

    @property
    def count(self) -> int:
        """Number of GPUs; 0 until the source is open."""
        return len(self._cards)

    def start(self) -> None:
        """Return at once: the source, too, is opened on a thread, since that may hang. A second call does nothing."""
        if not self._threads:
            self._spawn(self._run, "gpu-source")

    def stop(self, timeout: float = 0.5) -> bool:
        """End all threads; False where one is stuck in the driver, so that only `os._exit` is sure to leave."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        # The source's thread is the first: once it has ended, no further one is added.
        ended = all(_ended(thread, deadline) for thread in self._threads)
        if ended and self._status is Status.READY:
            ended = _ended(self._spawn(self.source.close, "gpu-close"), deadline)
        self._status = Status.STOPPED
        return ended

    def latest(self) -> tuple[GpuSample, ...]:
        """The newest sample of every card, by index; one that has been silent for long is shown as unhealthy."""
        now = time.monotonic()
        return tuple(self._current(card, now) for card in self._cards)

    def ring(self, index: int) -> Ring:
        """The recent past of a card; may be asked for, and filled from the store, before the source is open."""
        if index not in self._rings:
            self._rings.setdefault(index, Ring(self._capacity))
        return self._rings[index]

    def _run(self) -> None:
        count = self._open()
        if count is None:
            return
        self._cards = tuple(self._new_card(index) for index in range(count))
        self.problem, self._status = None, Status.READY
        for index in range(count):
            self._spawn(self._watch, f"gpu-{index}", index)
        while not self._stopping:
            self._record_silence()
            self._wait_until(time.monotonic() + self._interval)

    def _open(self) -> int | None:
        """The number of GPUs; tried again now and then, so that a driver that comes back is seen. None at stop."""
        while not self._stopping:
            try:
                return self.source.open()
            except SourceUnavailable as error:
                problem = error
            except Exception as error:
                problem = SourceUnavailable(f"the GPU source {self.source.name} failed: {error!r}", "")
            known, self.problem, self._status = self.problem, problem, Status.UNAVAILABLE
            if str(known) != str(problem):
                self._notify()
            self._wait_until(time.monotonic() + REOPEN_EVERY_S)
        return None

    def _watch(self, index: int) -> None:
        """Samples one card once in every interval of the clock; those that were missed are left out."""
        card = self._cards[index]
        deadline = processes_due = time.monotonic()
        while not self._stopping:
            # Half an interval of slack, since sums of floats never meet exactly.
            due = deadline + self._interval / 2 >= processes_due or not card.sample.healthy
            # Who has just begun to use it is not left unnamed until then.
            due = due or card.sample.is_used_unseen
            sample = self._read(card.sample, processes=due)
            card.sample, card.answered = sample, time.monotonic()
            card.ring.append(sample)
            self._notify()
            if due:
                processes_due = deadline + PROCESSES_EVERY_S
            deadline = time.monotonic() + until_next(time.time(), self._interval)
            self._wait_until(deadline)
            deadline = min(deadline, time.monotonic())

    def _read(self, last: GpuSample, *, processes: bool) -> GpuSample:
        try:
            sample = self.source.sample(last.index, processes=processes)
        except Exception as error:
            return _blank(last, f"reading it failed: {error!r}")
        if processes or not sample.healthy:
            return sample
        failed = {key: words for key, words in last.failed.items() if key == "processes"}
        return replace(sample, processes=last.processes, failed={**sample.failed, **failed})

    def _current(self, card: _Card, now: float) -> GpuSample:
        silent_s = now - card.answered
        waiting = card.sample.healthy or card.sample.reason == faults.NO_ANSWER_YET
        if not waiting or silent_s <= max(SILENT_AFTER_S, 3 * self._interval):
            return card.sample
        return _blank(card.sample, f"has not answered for {silent_s:.0f} s")

    def _record_silence(self) -> None:
        """A gap in the history of a silent card, so that its line neither freezes nor lags behind the others."""
        silent = [(card, sample) for card, sample in zip(self._cards, self.latest(), strict=True)
                  if sample is not card.sample]  # fmt: skip
        for card, sample in silent:
            card.ring.append(sample)
        if silent:
            self._notify()

    def _new_card(self, index: int) -> _Card:
        sample = GpuSample(index, f"GPU-index-{index}", f"GPU {index}", time.time(), healthy=False,
                           reason=faults.NO_ANSWER_YET, failed={"uuid": "unknown"})  # fmt: skip
        return _Card(sample, self.ring(index), time.monotonic())

    def _wait_until(self, deadline: float) -> None:
        """Return at the deadline, or at once when the sampler stops or the interval is changed."""
        interval = self._interval
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._interval != interval, timeout=max(0.0, deadline - time.monotonic())
            )

    def _spawn(self, target: Callable[..., None], name: str, *arguments: int) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread


def interval_of(timestamp: float, interval_s: float) -> int:
    """The number of the interval of the clock in which a time lies: the same for all cards, apps and hosts."""
    return math.floor(timestamp / interval_s)


def until_next(now: float, interval_s: float) -> float:
    """Seconds until the next interval of the clock has begun.

    A tenth into it, so that who wakes up a little early, or while the clock is being adjusted, is not in the last one.
    """
    return (interval_of(now, interval_s) + 1.1) * interval_s - now


def _ended(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _blank(last: GpuSample, reason: str) -> GpuSample:
    """A sample without values for a card that cannot be read; who it is stays known."""
    failed = {key: words for key, words in last.failed.items() if key == "uuid"}
    return GpuSample(
        last.index, last.uuid, last.name, time.time(), healthy=False, reason=reason, failed=failed
    )  # fmt: skip
