"""Tests for reading ahead: items keep their order, only a limited number is read in advance, and the thread exits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from trainer.extraction.read_ahead import AHEAD, ReadAhead


def test_items_keep_their_order_and_an_error_is_raised_at_its_position() -> None:
    def items() -> Iterator[int]:
        yield from range(50)
        raise ValueError("the text is damaged")

    ahead = ReadAhead(items())
    assert [next(ahead) for _ in range(50)] == list(range(50))
    with pytest.raises(ValueError, match="the text is damaged"):
        next(ahead)
    assert list(ahead) == []
    assert list(ReadAhead(iter(range(3)))) == [0, 1, 2]


def test_reading_ahead_is_bounded_and_stops_after_closing() -> None:
    made, enough = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(10**6):
            made.append(number)
            if len(made) >= AHEAD:
                enough.set()
            yield number

    ahead = ReadAhead(items())
    assert enough.wait(60)
    assert next(ahead) == 0
    assert len(made) <= AHEAD + 1
    ahead.close()
    ahead._thread.join(60)
    assert not ahead._thread.is_alive()
    assert len(made) <= AHEAD + 2
    assert list(ahead) == []


def test_the_thread_exits_when_the_reader_is_garbage_collected() -> None:
    ahead = ReadAhead(iter(range(10**6)))
    thread = ahead._thread
    assert next(ahead) == 0
    del ahead
    thread.join(60)
    assert not thread.is_alive()
