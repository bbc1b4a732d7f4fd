"""Reads TOML with limits on size, depth and key length, so that any file is read quickly."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainer.contract.files import open_plain
from trainer.contract.trust import distrust_of_open, open_own

LARGEST = 2**20
DEEPEST = 20
# The maximum length of a key or number outside quotes. On absurdly long keys or numbers, tomllib takes seconds or uses
# up all memory.
LONGEST_WORD = 100

# An unclosed string extends to the end of its line or of the file; otherwise, the remaining text would be searched
# again for each such string.
_STRING = r'"""(?:[^\\]|\\.?)*?(?:"""|\Z)|' + r"'''.*?(?:'''|\Z)|" + r'"(?:[^"\\\n]|\\[^\n]?)*"?|' + r"'[^'\n]*'?"
_TOKEN = re.compile(rf"(?P<text>{_STRING})|#[^\n]*|(?P<word>[\w+-]+)|(?P<sign>[\[\]{{}}.,=\n])", re.DOTALL)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise `ValueError` with a one-sentence message if it is invalid or exceeds this module's limits."""
    if len(text) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    if reason := next(_beyond(text), ""):
        raise ValueError(reason)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path: Path) -> str:
    """Read the text of a TOML file; raise `ValueError` if the file is too large or not UTF-8."""
    with path.open("rb") as stream:
        return _text_of(stream)


def read_plain_text(path: Path) -> str:
    """Read a file in a data or run folder like `read_text`; raise `OSError` for a pipe, which could block."""
    with open_plain(path) as stream:
        return _text_of(stream)


def read_own_text(path: Path, owners: Collection[int] = ()) -> str:
    """Read a file like `read_text`.

    Raise `UserError` if anyone other than this user and root (or, if given, the users in `owners`) may have written the
    file.
    """
    with open_own(path, owners) as stream:
        return _text_of(stream)


class Judged:
    """Reads a file like `read_plain_text`, and sets `distrust` to the reason not to trust the file, or to "".

    The text and the reason come from the same open file, because the path may refer to another file later. With
    `pipes`, pipes are also read.
    """

    def __init__(self, *, pipes: bool = False) -> None:
        self.distrust = ""
        self._pipes = pipes

    def __call__(self, path: Path) -> str:
        with path.open("rb") if self._pipes else open_plain(path) as stream:
            self.distrust = distrust_of_open(path, os.fstat(stream.fileno()), pipes=self._pipes)
            return _text_of(stream)


def _text_of(stream: BinaryIO) -> str:
    content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    # Windows editors write a byte order mark at the start.
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def table_of(config: str) -> dict[str, Any]:
    """Return the table in a job file's stored text, or an empty table if the text cannot be parsed."""
    try:
        return parse_toml(config)
    except ValueError:
        return {}


def _beyond(text: str) -> Iterator[str]:
    """Yield the reasons why TOML exceeds the limits: nesting that is too deep, or keys or numbers that are too long."""
    depth = dots = 0
    for token in _TOKEN.finditer(text):
        if token["word"] and len(token["word"]) > LONGEST_WORD:
            line = text.count("\n", 0, token.start()) + 1
            yield f"line {line} contains a key or number of more than {LONGEST_WORD} characters"
        sign = token["sign"]
        depth += (sign in ("[", "{")) - (sign in ("]", "}")) if sign else 0
        dots = dots + 1 if sign == "." else 0 if sign else dots
        if depth > DEEPEST or dots > DEEPEST:
            line = text.count("\n", 0, token.start()) + 1
            yield f"line {line} is nested more than {DEEPEST} deep"
