"""The time span shown on a screen: the latest samples, or a longer span read from the store by a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen

from sae_tui.gpu.window import SPANS_S
from sae_tui.widgets.old_keys import old_key
from trainer.contract.errors import UserError

_REREAD_S = 5.0  # the interval between writes to the store
T = TypeVar("T")


def span_keys(screen: str, group: Binding.Group | None = None, *, show: bool = True) -> list[Binding]:
    """Return the keys for changing a screen's span with `action_longer`."""
    return [
        Binding("greater_than_sign", "longer(1)", "Longer", key_display=">", id=f"{screen}.longer", show=show,
                group=group, tooltip="Show a longer time span: minutes, hours, a day, a week"),
        Binding("less_than_sign", "longer(-1)", "Shorter", key_display="<", id=f"{screen}.shorter", show=show,
                group=group, tooltip="Show a shorter time"),
        # On the dashboard, these change the priority of a job while the jobs table has the focus.
        old_key("plus", "longer(1)"),
        old_key("minus", "longer(-1)"),
    ]  # fmt: skip


class LookBack(Generic[T]):
    """The time span shown on a screen, and the data read for it.

    The data belongs to a subject, such as a GPU. Late data for an earlier subject or span is not shown.
    """

    class Found(Message):
        """Data was read and should be drawn."""

    def __init__(self, screen: Screen[None], read: Callable[[str, float, int], T]) -> None:
        """Use `read` to read a subject's last seconds into at most n columns, and notify `screen` of the data."""
        self._screen, self._read = screen, read
        self._place = 0  # index into `SPANS_S` plus 1; 0 means the latest samples
        self._due = 0.0  # time of the next read
        self._found: dict[tuple[str, float], T] = {}
        # The reads in progress. While a read hangs, for example on a disk, the same read is not started again.
        self._under_way: set[tuple[str, float]] = set()

    @property
    def span_s(self) -> int | None:
        """The span read from the store, in seconds, or None while the latest samples are shown."""
        return SPANS_S[self._place - 1] if self._place else None

    def longer(self, by: int) -> None:
        """Move by `by` steps to longer spans or, if negative, to shorter ones."""
        self._place = max(0, min(len(SPANS_S), self._place + by))
        self.forget()

    def forget(self) -> None:
        """Discard the data so that the next request reloads it."""
        self._found, self._due = {}, 0.0

    def stored(self, subject: str, n: int) -> T | None:
        """Return the latest data, or None before the first read; start a new read for `n` columns if one is due."""
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
        # Register the read here rather than in the caller, because a worker may be cancelled before its thread starts.
        self._under_way.add((subject, span_s))
        try:
            self._found[subject, span_s] = self._read(subject, span_s, n)
        except UserError:  # the status line already shows store errors
            self._due = time.monotonic() + _REREAD_S
        finally:
            self._under_way.discard((subject, span_s))
        self._screen.post_message(self.Found())
