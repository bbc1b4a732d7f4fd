"""Other people's text made safe to print on a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MARK = "�"
# Characters with a meaning in Markdown.
MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~$])")
# Characters that no name may hold: control characters of C0 and C1, which steer a terminal, line separators, and the
# marks that change the direction of reading.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with a mark in place of everything that could steer a terminal or reorder its words; tabs stay.

    That is whatever Unicode does not call printable: control characters of C0 and C1, such as the escape, the marks of
    right-to-left text, and line ends, since the text is to stay on one line.
    """
    return text if text.isprintable() else "".join(char if _is_shown(char) else MARK for char in text)


def printable_lines(text: str) -> str:
    """Make every line of a text `printable` and keep its line ends."""
    return "\n".join(map(printable, text.split("\n")))


def in_markdown(text: str, longest: int = 120) -> str:
    """Escape a foreign text for Markdown, on one line and cut to `longest` characters."""
    cut = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return MARKDOWN.sub(r"\\\1", printable(cut))


def printable_json(text: str) -> str:
    """Escape what is not printable in a JSON text as `\\u001b`; its value stays the same."""
    return _escape_unprintable(text, lambda char: json.dumps(char)[1:-1])


def printable_toml(text: str) -> str:
    """Escape what is not printable in a TOML text as `\\U0000001b`; its values stay the same.

    Its strings must be in double quotes, not in literal ones.
    """
    return _escape_unprintable(text, lambda char: f"\\U{ord(char):08x}")


def is_utf8(text: str) -> bool:
    """Tell whether a text can be stored as UTF-8; bytes of another encoding, which a terminal may send, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escape_unprintable(text: str, escape: Callable[[str], str]) -> str:
    return "\n".join(
        line if line.isprintable() else "".join(char if char.isprintable() else escape(char) for char in line)
        for line in text.split("\n")
    )


def _is_shown(char: str) -> bool:
    return char.isprintable() or char == "\t"
