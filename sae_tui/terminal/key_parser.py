"""What the terminal sends, made into messages: which keys arrived together, and pasted text however it was cut."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

from textual import constants, events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.message import Message

# This many characters in one read are taken for pasted text if some of them are bound to nothing.
FEWEST_PASTED = 4
# A paste of which nothing more comes for this time is taken for complete.
_PAUSE_S = 3.0
_ESC = "\x1b"
# Escape and a key that came in one read, and not what terminals send for one key: \x1b[A, \x1bOP, the answers to
# questions, and alt with backspace, tab, b and f, by which text fields move and delete.
_ESCAPE_AND_KEY = re.compile("(\x1b+)(?=[^\x1b\\[O\\]P_^X\\\\bf\x7f\t])")


class Packet(events.Event, bubble=False):
    """Announces several keys that were read at once; they follow one by one."""

    def __init__(self, keys: Iterable[events.Key]) -> None:
        super().__init__()
        self.keys = tuple(keys)


class PacketParser(XTermParser):
    """Tells which keys arrived together, and takes pasted text out of what it hands to Textual.

    Where the marker that ends a paste comes in two parts, 100 ms apart, Textual 8.2 takes all that is typed from then
    on for pasted text: no key does anything any more.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        # The text that is being pasted, or what may become the marker before one.
        self._pending = ""
        self._pasting = False
        self._read_at = 0.0

    def feed(self, data: str) -> Iterable[Message]:
        """Return the messages for what the terminal sent, first a `Packet` for several keys; "" ends the input."""
        if not data:
            return super().feed(data)
        messages = list(self._messages(data))
        keys = [message for message in messages if isinstance(message, events.Key)]
        return [Packet(keys), *messages] if len(keys) >= FEWEST_PASTED else messages

    def tick(self) -> Iterator[Message]:
        """Stop waiting for the rest of a sequence or paste that has not come in time, and yield what there is."""
        yield from super().tick()
        longest = _PAUSE_S if self._pasting else constants.ESCAPE_DELAY
        if not (self._pasting or self._pending) or time.monotonic() - self._read_at < longest:
            return
        pending, self._pending = self._pending, ""
        if self._pasting:
            self._pasting = False
            yield _paste_event(pending)
        elif pending == _ESC:
            yield events.Key("escape", _ESC)
        else:
            yield from super().feed(pending)

    def _messages(self, data: str) -> Iterator[Message]:
        self._read_at = time.monotonic()
        data, self._pending = self._pending + data, ""
        while data:
            if self._pasting:
                text, marker, rest = data.partition(BRACKETED_PASTE_END)
                if not marker:
                    self._pending = data
                    return
                yield _paste_event(text)
            else:
                keys, marker, rest = data.partition(BRACKETED_PASTE_START)
                if not marker:
                    keys, self._pending = _before_a_marker(keys)
                yield from self._keys(keys)
            self._pasting ^= bool(marker)
            data = rest

    def _keys(self, data: str) -> Iterator[Message]:
        """Take escape and a key for two: over a slow line they arrive together, and Textual drops the first.

        A digit after escape is alt with that digit.
        """
        first, *rest = _ESCAPE_AND_KEY.split(data)
        yield from super().feed(first) if first else ()
        for escapes, text in zip(rest[::2], rest[1::2], strict=True):
            with_alt = text[0] in "0123456789"
            yield from (events.Key("escape", _ESC) for _ in escapes[with_alt:])
            if with_alt:
                yield events.Key(f"alt+{text[0]}", None)
            if rest_of := text[with_alt:]:
                yield from super().feed(rest_of)


def _before_a_marker(data: str) -> tuple[str, str]:
    """Split off an end that may be the first part of the marker before a paste; return both parts."""
    for length in range(len(BRACKETED_PASTE_START) - 1, 0, -1):
        if data.endswith(BRACKETED_PASTE_START[:length]):
            return data[:-length], data[-length:]
    return data, ""


def _paste_event(text: str) -> events.Paste:
    """Return a paste of the text without what steers a terminal."""
    return events.Paste("".join(char for char in text if char.isprintable() or char in "\t\r\n"))
