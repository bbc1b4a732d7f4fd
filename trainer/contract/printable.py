"""Text that somebody else has written, as a terminal may have it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MARK = "�"
# What no name may hold, since it steers a terminal or the order of reading: C0 and C1, separators of lines,
# directions of writing.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with a mark in place of all that could steer a terminal or turn its words around; tabs stay.

    That is what Unicode does not call printable: control characters of C0 and C1, such as the escape, the marks of
    right-to-left text, and line ends, of which one text has none to the terminal.
    """
    return text if text.isprintable() else "".join(char if _is_shown(char) else MARK for char in text)


def printable_lines(text: str) -> str:
    """The same of a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """JSON of the same value in which what is not printable is written as `\\u001b`."""
    return _escaped(text, lambda char: json.dumps(char)[1:-1])


def printable_toml(text: str) -> str:
    """TOML of the same values in which what is not printable is written as `\\U0000001b`; its strings are in quotes."""
    return _escaped(text, lambda char: f"\\U{ord(char):08x}")


def is_utf8(text: str) -> bool:
    """Whether it can be stored; bytes of another encoding, which a terminal may send, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    return "\n".join(
        line if line.isprintable() else "".join(char if char.isprintable() else escape(char) for char in line)
        for line in text.split("\n")
    )


def _is_shown(char: str) -> bool:
    return char.isprintable() or char == "\t"
