from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.parallel.waiting import CudaWaiting


class Event:
    """A simulated GPU event that is complete if its number is at most `done`. Events are one second apart."""

    done, recorded = 0, 0

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0

    def record(self) -> None:
        Event.recorded += 1
        self._at = Event.recorded

    def query(self) -> bool:
        return self._at <= Event.done

    def synchronize(self) -> None:
        Event.done = max(Event.done, self._at)

    def elapsed_time(self, end: Any) -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end._at - self._at)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "done", 0)
    monkeypatch.setattr(Event, "recorded", 0)


def test_taken_waits_exclude_later_waits_even_if_they_are_read_afterwards() -> None:
    waiting = CudaWaiting()
    for _ in range(3):
        with waiting.measure():
            pass
    Event.done = 4
    taken = waiting.take()
    assert Event.done == 4
    with waiting.measure():
        pass
    assert (taken.seconds(), Event.done) == (3.0, 6)
    assert waiting.take().seconds() == 1.0


def test_completed_events_do_not_accumulate() -> None:
    waiting = CudaWaiting()
    for _ in range(10):
        with waiting.measure():
            pass
        Event.done = Event.recorded
    with waiting.measure():
        pass
    assert len(waiting._since._under_way) == 1
    assert waiting.take().seconds() == 11.0
