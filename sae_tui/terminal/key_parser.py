"""Turns terminal input into messages: reports which keys arrived together, and joins pasted text from several reads.

A terminal may send any bytes: text in another encoding, mouse reports enabled by an earlier program, or replies to that
program's queries. Textual 8.2 stops reading at the first byte that is not UTF-8 and at some sequences, and interprets
an unknown sequence as keys.
"""

from __future__ import annotations

import os
import re
import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator

from textual import constants, events
from textual._xterm_parser import (
    _MAX_SEQUENCE_SEARCH_THRESHOLD as LONGEST_SEQUENCE,
)
from textual._xterm_parser import (
    BRACKETED_PASTE_END,
    BRACKETED_PASTE_START,
    SPECIAL_SEQUENCES,
    XTermParser,
    _re_cursor_position,
    _re_in_band_window_resize,
    _re_mouse_event,
    _re_terminal_mode_response,
)
from textual.message import Message

# At least this many characters in one read, some of them not bound to a command, are treated as pasted text.
FEWEST_PASTED = 4
# An escape counts as a key if nothing follows it for this long. Terminals send a sequence in one write, which slow
# connections rarely split. Any other beginning of a sequence is kept for `constants.ESCAPE_DELAY`.
_ESCAPE_S = constants.ESCAPE_DELAY if "ESCDELAY" in os.environ else 0.025
# A paste is considered complete if no more text arrives for this long.
_PAUSE_S = 3.0
_ESC = "\x1b"
# Escape followed by another key in one read. This excludes alt with backspace, tab, b or f, which terminals send for
# single keys that move or delete in text fields.
_ESCAPE_AND_KEY = re.compile("(\x1b+)(?=[^\x1bbf\x7f\t]|\\Z)")
# A complete ECMA-48 sequence: a key, a mouse report or a reply. The alternatives match, in this order:
# - a function key of the Linux console, or an old mouse report (see `TerminalDecoder`);
# - a shifted key of rxvt, which has no final letter, or any other control sequence;
# - a keypad key;
# - a string up to its terminator or an interrupting escape, or a terminator without a string.
_SEQUENCE = re.compile(
    r"(\x1b\[(?:\[(?:[A-E]|(?=[^A-E]))|M(?: {3}| {0,2}(?=[^ ]))|\d+\$(?![@-~])|(?![M\[])[ -?]*(?:[@-~]|(?=[^ -~])))"
    r"|\x1bO(?:[ -~]|(?=[^ -~]))"
    r"|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\|(?=\x1b[^\\]))"
    r"|\x1b\\)"
)
# An incomplete sequence or paste marker that further input may complete.
_BEGUN = re.compile(r"\x1b(?:\[(?:\[|M {0,2}|[ -?]*)|O|[\]P_^X][^\x07\x1b]*\x1b?)?\Z")
# Sequences handled by Textual that do not represent keys.
_KNOWN = (_re_cursor_position, _re_mouse_event, _re_terminal_mode_response)
# The maximum number of characters of an unterminated string kept by the parser while waiting for the end.
_LONGEST_STRING = 1024
# No screen has more columns or lines than this, and mouse positions in pixels are below 2^16.
_MOST_CELLS, _MOST_PIXELS = 2000, 65535
_OLD_REPORT = b"\x1b[M"


class Packet(events.Event, bubble=False):
    """Announces several keys arriving in one read; the keys follow as separate events."""

    def __init__(self, keys: Iterable[events.Key]) -> None:
        super().__init__()
        self.keys = tuple(keys)


class TerminalDecoder:
    """Decodes terminal input: UTF-8, with U+FFFD for any invalid byte.

    An old mouse report has three bytes from 32 to 255 that are not text: button, column and line. The decoder replaces
    them with spaces, so that the report stays three characters long.
    """

    def __init__(self) -> None:
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        # Trailing bytes that may start a report, and the number of bytes still missing from the current report.
        self._begun, self._n_left = b"", 0
        self._read_at = 0.0

    def decode(self, data: bytes, final: bool = False) -> str:
        """Return these bytes as text, up to the last complete character."""
        now, before = time.monotonic(), self._read_at
        if now - before > constants.ESCAPE_DELAY:
            self._begun, self._n_left = b"", 0
        self._read_at = now
        n_begun, text = len(self._begun), bytearray(self._begun + data)
        at = n_begun - len(_OLD_REPORT) if self._n_left else text.find(_OLD_REPORT)
        while at >= 0 or self._n_left:
            start = at + len(_OLD_REPORT)
            end = start + (self._n_left or 3)
            text[start:end] = b" " * (min(end, len(text)) - start)
            self._n_left = max(0, end - len(text))
            if self._n_left:
                break
            at = text.find(_OLD_REPORT, end)
        self._begun = next((part for part in (b"\x1b[", b"\x1b") if text.endswith(part)), b"")
        return self._decode(bytes(text[n_begun:]), final)


class PacketParser(XTermParser):
    """Reports which keys arrived together, and removes pasted text before Textual parses the input.

    If the end marker of a paste arrives in two parts, 100 ms apart, Textual 8.2 treats everything typed afterwards as
    pasted text, so keys no longer work.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        # The pasted text received so far, or characters that may turn out to be its start marker.
        self._pending = ""
        self._pasting = False
        self._read_at = 0.0
        self._escaped = False  # Whether the last input was an escape that was taken for a key.

    def feed(self, data: str) -> Iterable[Message]:
        """Return the messages for terminal input, preceded by a `Packet` for several keys; "" ends the input."""
        if not data:
            return super().feed(data)
        messages = list(self._messages(data))
        keys = [message for message in messages if isinstance(message, events.Key)]
        return [Packet(keys), *messages] if len(keys) >= FEWEST_PASTED else messages

    @property
    def left_s(self) -> float | None:
        """The seconds until `tick` stops waiting for the remainder of a sequence or paste; None if none has begun."""
        ends = [] if self._timeout_time is None else [self._timeout_time]
        if self._pasting or self._pending:
            ends.append(self._read_at + self._longest_s)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    @property
    def _longest_s(self) -> float:
        if self._pasting:
            return _PAUSE_S
        return _ESCAPE_S if self._pending == _ESC else constants.ESCAPE_DELAY

    def tick(self) -> Iterator[Message]:
        """Stop waiting for the remainder of an overdue sequence or paste, and yield what has arrived."""
        yield from super().tick()
        if not (self._pasting or self._pending) or time.monotonic() - self._read_at < self._longest_s:
            return
        pending, self._pending = self._pending, ""
        if self._pasting:
            self._pasting = False
            yield _paste_event(pending)
        elif pending == _ESC:
            self._escaped = True
            yield events.Key("escape", _ESC)
        elif len(pending) == 2:
            yield from super().feed(pending)  # alt with a key that can also start a sequence

    def parse_mouse_code(self, code: str) -> Message | None:
        """Return the event for a mouse report, or None if its position cannot be on any screen."""
        if any(int(number) > _MOST_PIXELS for number in re.findall(r"\d+", code)):
            return None
        try:
            return super().parse_mouse_code(code)
        except ZeroDivisionError:  # a terminal that reports its size as 0 pixels
            return None

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        """Return the keys in a sequence, or an empty list if its numbers do not represent characters."""
        try:
            keys = list(super()._sequence_to_key_events(sequence, alt))
            for key in keys:
                f"{key.key}{key.character or ''}".encode()
        except (ValueError, OverflowError):
            return []
        return keys

    def _messages(self, data: str) -> Iterator[Message]:
        now, before = time.monotonic(), self._read_at
        # Complete a sequence whose remainder is late, which would otherwise be read as keys or leave a paste unmarked.
        is_late = self._escaped and data[0] in "[O" and now - before < constants.ESCAPE_DELAY
        self._read_at, self._escaped = now, False
        data, self._pending = (_ESC if is_late else self._pending) + data, ""
        while data:
            if self._pasting:
                text, marker, rest = data.partition(BRACKETED_PASTE_END)
                if not marker:
                    self._pending = data
                    return
                yield _paste_event(text)
            else:
                keys, marker, rest = data.partition(BRACKETED_PASTE_START)
                begun = _BEGUN.search(keys)
                if begun and (begun[0] != _ESC or not marker):
                    # Drop an incomplete sequence before a marker, because its remainder can no longer arrive.
                    keys, self._pending = keys[: begun.start()], "" if marker else begun[0][:_LONGEST_STRING]
                yield from self._keys(keys)
            self._pasting ^= bool(marker)
            data = rest

    def _keys(self, data: str) -> Iterator[Message]:
        """Yield the events for these characters, dropping unknown sequences."""
        parts = _SEQUENCE.split(data)
        for text, sequence in zip(parts[::2], [*parts[1::2], ""], strict=True):
            yield from self._typed(text)
            if sequence and self._knows(sequence):
                yield from super().feed(sequence)

    def _knows(self, sequence: str) -> bool:
        if len(sequence) > LONGEST_SEQUENCE:
            return False
        if size := _re_in_band_window_resize.fullmatch(sequence):
            rows, columns, *pixels = (int(number.partition(":")[0]) for number in size.groups())
            return 0 < min(rows, columns) <= max(rows, columns) <= _MOST_CELLS and max(pixels) <= _MOST_PIXELS
        if sequence in SPECIAL_SEQUENCES or any(pattern.match(sequence) for pattern in _KNOWN):
            return True
        return bool(self._sequence_to_key_events(sequence))

    def _typed(self, data: str) -> Iterator[Message]:
        """Split escape followed by a key into two keys.

        Over a slow connection both arrive together, and Textual would drop the escape. Escape followed by a digit is
        alt with that digit.
        """
        first, *rest = _ESCAPE_AND_KEY.split(data)
        yield from super().feed(first) if first else ()
        for escapes, text in zip(rest[::2], rest[1::2], strict=True):
            with_alt = text[:1] in tuple("0123456789")
            yield from (events.Key("escape", _ESC) for _ in escapes[with_alt:])
            if with_alt:
                yield events.Key(f"alt+{text[0]}", None)
            if rest_of := text[with_alt:]:
                yield from super().feed(rest_of)


def _paste_event(text: str) -> events.Paste:
    """Return a paste event for the text, without control characters."""
    return events.Paste("".join(char for char in text if char.isprintable() or char in "\t\r\n"))
