"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MARK = "�"
# Characters that are special in Markdown.
MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~$])")
# Characters that names must not contain: C0 and C1 control characters (which control a terminal), line separators, and
# marks that change the reading direction.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replace with a visible mark every character that could control a terminal or reorder text; keep tabs.

    All characters that Unicode classifies as unprintable are replaced, such as C0 and C1 control characters and
    right-to-left marks. Line ends are also replaced to keep the text on one line.
    """
    return text if text.isprintable() else "".join(char if _is_shown(char) else MARK for char in text)


def on_one_line(text: str) -> str:
    """Apply `printable`, and show line ends as spaces, for example in a program given to `python -c`."""
    return printable(" ".join(text.splitlines()))


def printable_lines(text: str) -> str:
    """Apply `printable` to every line, and keep the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def in_markdown(text: str, longest: int = 120) -> str:
    """Escape untrusted text for Markdown, on one line, truncated to `longest` characters."""
    cut = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return MARKDOWN.sub(r"\\\1", printable(cut))


def printable_json(text: str) -> str:
    """Escape unprintable characters in JSON, in the form `\\u001b`, without changing the value."""
    return _escape_unprintable(text, lambda char: json.dumps(char)[1:-1])


def printable_toml(text: str) -> str:
    """Escape unprintable characters in TOML, in the form `\\U0000001b`, without changing the values.

    Strings must be in double quotes, not TOML literal strings.
    """
    return _escape_unprintable(text, lambda char: f"\\U{ord(char):08x}")


def is_utf8(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8; one with undecodable bytes from a terminal cannot."""
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
