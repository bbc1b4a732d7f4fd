"""Prints the output of commands: JSON for scripts, aligned text for people."""

from __future__ import annotations

import math
import select
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from trainer.contract.output import complain, show_text
from trainer.contract.printable import printable, printable_json
from trainer.contract.wording import number

UNKNOWN = "-"


def say(text: str = "") -> None:
    """Print a line to stdout and flush it; replace control characters, such as those from logs."""
    _write(printable(text))


def say_all(lines: Iterable[str]) -> None:
    """Print lines from an iterable that may yield millions of them. The lines must not contain control characters.

    The output is written 30 lines at a time, so that Python's buffer never flushes on its own and only the explicit
    flush can encounter a full disk or a closed pipe.
    """
    lines = iter(lines)
    while held := list(islice(lines, 30)):
        _write("\n".join(held))


class LiveLine:
    """The last line on a terminal, updated in place; it is not shown if standard output is not a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shown = ""

    def show(self, line: str) -> None:
        """Replace the line, cut to the width of the terminal."""
        shown = printable(line)[: shutil.get_terminal_size().columns - 1]
        if self._is_terminal and shown != self._shown:
            show_text(f"\r{shown}\x1b[K")
            self._shown = shown

    def say_above(self, lines: Sequence[str]) -> None:
        """Print lines in place of the live line, which must be shown again afterwards."""
        if lines:
            self.show("")
        for line in lines:
            say(line)


def warn(text: str) -> None:
    complain(f"sae-tui: {printable(text)}\n")


def show_json(value: Any, *, in_a_line: bool = False) -> None:
    """Print a value as JSON: indented for people, or on one line for a stream."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a file name that is not valid UTF-8
        encoded = msgspec.json.encode(_as_utf8(msgspec.to_builtins(value)))
    _write(printable_json((encoded if in_a_line else msgspec.json.format(encoded, indent=2)).decode()))


def _as_utf8(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_utf8(inner) for inner in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns as wide as their content, with columns of numbers right-aligned."""
    cells = [[text(value) for value in row] for row in rows]
    lines = [list(headings), *cells]
    widths = [max(cells_of(line[column]) for line in lines) for column in range(len(headings))]
    right = [bool(cells) and all(_is_quantity(row[column]) for row in cells) for column in range(len(headings))]
    for line in lines:
        columns = [pad(*column) for column in zip(line, widths, right, strict=True)]
        say("  ".join(columns).rstrip())


def cells_of(text: str) -> int:
    """Return how many cells of a terminal a text takes: wide characters take two, and combining ones none."""
    if text.isascii():
        return len(text)
    kinds = ((unicodedata.category(char), unicodedata.east_asian_width(char)) for char in text)
    return sum(0 if category in ("Mn", "Me", "Cf") else 1 + (width in "WF") for category, width in kinds)


def chopped(text: str, width: int) -> list[str]:
    """Break a text into pieces of at most `width` cells."""
    pieces = [""]
    for char in text:
        if pieces[-1] and cells_of(pieces[-1] + char) > width:
            pieces.append("")
        pieces[-1] += char
    return pieces


def pad(text: str, width: int, at_right: bool = False) -> str:
    """Return the text padded to `width` cells of a terminal; wide characters, as of Chinese, take two."""
    space = " " * (width - cells_of(text))
    return space + text if at_right else text + space


def show_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print `name  value` lines."""
    pairs = [(name, text(value)) for name, value in fields]
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        say(f"{name.ljust(width)}  {value}")


def text(value: object) -> str:
    """Return a value as the text of a table cell, exactly as it will be printed."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return ", ".join(map(text, value)) or UNKNOWN
    return printable(str(value)).replace("\t", " ")


def clock_time(timestamp: float | None) -> str:
    return UNKNOWN if timestamp is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def output_closes_within(wait_s: float) -> bool:
    """Return True as soon as the reader of standard output has closed it; return False after `wait_s` seconds."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
    return any(event & gone for _, event in reader.poll(max(0.0, wait_s) * 1000))


def _write(text: str) -> None:
    show_text(text + "\n")


def _is_quantity(cell: str) -> bool:
    return cell == UNKNOWN or cell[0].isdigit()
