"""Handles keys in the order they were typed, even if many arrive at once.

Textual 8.2 passes a character to the focused field immediately, but a bound key first bubbles up to the app through the
queue of every widget in between. The screen or field that such a key opens receives keys only several messages later.
Over a slow connection, several keys arrive in one read, so typing `/quick` would quit the app.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import ClassVar

from textual import events
from textual.app import App, ScreenStackError
from textual.message_pump import MessagePump

from sae_tui.terminal.key_parser import FEWEST_PASTED, Packet

# A key that has not been handled within this time no longer delays later keys.
_LONGEST_S = 5.0
# A key that quits the app is dispatched after this time, even if earlier keys are still waiting.
_URGENT_AFTER_S = 1.0
# How often to poll a screen where a key is still waiting for an answer.
_LOOK_S = 0.01
_URGENT = ("ctrl+c", "ctrl+q")


Typed = events.Key | events.Paste | Packet


class KeysInOrder(App[None]):
    """Dispatches a key only after the previous key has been handled, including moving the focus or opening a screen.

    Text pasted while no field has the focus is not treated as keys, even if the terminal does not mark pasted text.
    """

    # The ids of the key bindings that open a text field.
    BEFORE_TEXT: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self._typed: deque[Typed] = deque()
        self._dispatched: Typed | None = None
        self._path: list[MessagePump] = []
        self._feeder: asyncio.Task[None] | None = None
        self._pasted: tuple[events.Key, ...] = ()

    async def on_event(self, event: events.Event) -> None:
        """Queue typed keys and dispatch them in turn; dispatch all other events immediately."""
        if isinstance(event, events.InputEvent) and not self._screen_stack:
            return  # there is no screen for input arriving while the app exits
        if not isinstance(event, Typed) or event.is_forwarded:
            await super().on_event(event)
        elif event is self._dispatched:
            target = self.focused or self.screen
            self._path = [*target.ancestors_with_self]
            await super().on_event(event)
        else:
            self._typed.append(event)
            if isinstance(event, events.Key) and event.key in _URGENT:
                self.set_timer(_URGENT_AFTER_S, lambda: self._hurry(event))
            if self._feeder is None or self._feeder.done():
                self._feeder = asyncio.create_task(self._feed(), name="keys in order")

    async def _feed(self) -> None:
        # There is no screen for keys typed while the app exits.
        with contextlib.suppress(ScreenStackError):
            await self._feed_all()

    async def _feed_all(self) -> None:
        while self._typed:
            event = self._typed.popleft()
            if isinstance(event, Packet):
                self._judge(event)
            elif not any(event is key for key in self._pasted) and not self._refuses(event):
                self._dispatch(event)
                try:
                    await asyncio.wait_for(self._wait_until_handled(event), _LONGEST_S)
                except TimeoutError:
                    continue

    def _dispatch(self, event: Typed) -> None:
        self._dispatched, self._path = event, []
        self.post_message(event)

    def _hurry(self, event: events.Key) -> None:
        """Dispatch a key that quits the app ahead of other queued keys if an earlier key is stuck."""
        if event in self._typed:
            self._typed.remove(event)
            self._dispatch(event)

    async def _wait_until_handled(self, event: Typed) -> None:
        """Wait until the key and everything caused by it have been handled."""
        await _wait_for_queue(self)
        for pump in self._path:
            if event._stop_propagation:
                break
            await _wait_for_queue(pump)
        if isinstance(event, events.Key) and not (event.is_printable and event._stop_propagation):
            await self._wait_until_settled()

    async def _wait_until_settled(self) -> None:
        """Wait until focus and screen no longer change and no key is waiting for an answer from the screen."""
        before = None
        while before != (before := (self.screen, self.focused)):
            for pump in [*(self.focused or self.screen).ancestors_with_self, *self._path]:
                await _wait_for_queue(pump)
            while getattr(self.screen, "has_to_answer", False):
                await asyncio.sleep(_LOOK_S)

    # The following methods handle pasted text.

    def _takes_text(self) -> bool:
        return self.focused is not None and self.focused.check_consume_key("a", "a")

    def _refuses(self, event: Typed) -> bool:
        """Return True if text is pasted while no field accepts it, and notify the user."""
        if not isinstance(event, events.Paste) or self._takes_text():
            return False
        self._tell_pasted()
        return True

    def _judge(self, packet: Packet) -> None:
        """Drop the keys in a packet that looks like pasted text: at least one character is not bound to a command."""
        bound = self.screen.active_bindings
        text = []
        for key in packet.keys:
            binding = bound[key.key].binding if key.key in bound else None
            if not (key.is_printable or key.key in ("enter", "tab")) or (binding and binding.id in self.BEFORE_TEXT):
                break
            text.append(key)
        letters = [key.key for key in text if key.is_printable]
        if len(letters) >= FEWEST_PASTED and not bound.keys() >= set(letters) and not self._takes_text():
            self._pasted = packet.keys
            self._tell_pasted()

    def _tell_pasted(self) -> None:
        slash = self.screen.active_bindings.get("slash")
        instead = f"; press / to {slash.binding.description.lower()}" if slash else ""
        self.notify(f"Pasted text is ignored here{instead}.", severity="warning", markup=False)


async def _wait_for_queue(pump: MessagePump) -> None:
    """Wait until a widget has handled everything in its queue; return immediately if it is being removed."""
    reached = asyncio.Event()
    if pump.call_later(reached.set):
        await reached.wait()
