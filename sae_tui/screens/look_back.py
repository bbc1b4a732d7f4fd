"""How much of the past a screen shows: the newest intervals, or a span that is read from the store in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen

from sae_tui.gpu.window import SPANS_S
from trainer.contract.errors import UserError

_REREAD_S = 5.0  # the store is written as often
T = TypeVar("T")


def span_keys(
    screen: str, group: Binding.Group | None = None, display: tuple[str, str] = ("+", "-"), *, show: bool = True
) -> list[Binding]:
    """Return the keys of a screen that has `action_longer`; `display` are the two that its foot and help name."""
    longer, shorter = display
    return [
        Binding("plus,greater_than_sign", "longer(1)", "Longer", key_display=longer, id=f"{screen}.longer", show=show,
                group=group, tooltip="More of the past: minutes, hours, a day, a week"),
        Binding("minus,less_than_sign", "longer(-1)", "Shorter", key_display=shorter, id=f"{screen}.shorter", show=show,
                group=group, tooltip="Less of the past"),
    ]  # fmt: skip


class LookBack(Generic[T]):
    """The span that a screen shows, and what was read of it.

    What is read belongs to a subject, such as a card; what comes late of another subject or span is not shown.
    """

    class Found(Message):
        """Something was read, and is to be drawn."""

    def __init__(self, screen: Screen[None], read: Callable[[str, float, int], T]) -> None:
        """Take who is told and how a span of so many seconds of a subject is read in at most so many columns."""
        self._screen, self._read = screen, read
        self._place = 0  # in `SPANS_S`, counted from 1; 0 is the newest intervals
        self._due = 0.0  # when to read next
        self._found: dict[tuple[str, float], T] = {}
        # Running reads. While a read hangs with its disk, the same read is not started again.
        self._under_way: set[tuple[str, float]] = set()

    @property
    def span_s(self) -> int | None:
        """How many seconds of the store are shown; None where the newest intervals are."""
        return SPANS_S[self._place - 1] if self._place else None

    def longer(self, by: int) -> None:
        """Show so many spans more, or where negative fewer."""
        self._place = max(0, min(len(SPANS_S), self._place + by))
        self.forget()

    def forget(self) -> None:
        """Forget what was read, and read anew when it is asked for."""
        self._found, self._due = {}, 0.0

    def stored(self, subject: str, n: int) -> T | None:
        """Return what was read last; have it read, for `n` columns, where that is due. None before it is there."""
        span_s = self.span_s
        if span_s is None:
            return None
        if n and time.monotonic() >= self._due and (subject, span_s) not in self._under_way:
            self._due = time.monotonic() + max(_REREAD_S, span_s / n)
            self._screen.run_worker(
                partial(self._fetch, subject, span_s, n),
                thread=True, group="look back", exclusive=True, exit_on_error=False,
            )  # fmt: skip
        return self._found.get((subject, span_s))

    def _fetch(self, subject: str, span_s: float, n: int) -> None:
        # Added here, not by the caller, since a worker may be cancelled before its thread starts.
        self._under_way.add((subject, span_s))
        try:
            self._found[subject, span_s] = self._read(subject, span_s, n)
        except UserError:  # told in the status line by those who store it
            self._due = time.monotonic() + _REREAD_S
        finally:
            self._under_way.discard((subject, span_s))
        self._screen.post_message(self.Found())
