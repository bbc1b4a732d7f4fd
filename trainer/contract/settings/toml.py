"""TOML of bounded size, depth and length of words: whatever else a file holds, reading it takes a moment."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainer.contract.files import open_plain
from trainer.contract.trust import open_own

LARGEST = 2**20
DEEPEST = 20
# Outside quotes: a key or a number. tomllib takes seconds, or the whole memory, for what nobody means.
LONGEST_WORD = 100

# One that is not closed goes to the end of its line or of the file, or else the rest would be looked through for each.
_STRING = r'"""(?:[^\\]|\\.?)*?(?:"""|\Z)|' + r"'''.*?(?:'''|\Z)|" + r'"(?:[^"\\\n]|\\[^\n]?)*"?|' + r"'[^'\n]*'?"
_TOKEN = re.compile(rf"(?P<text>{_STRING})|#[^\n]*|(?P<word>[\w+-]+)|(?P<sign>[\[\]{{}}.,=\n])", re.DOTALL)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML file; raises `ValueError` in one sentence where it is none, or beyond what is read."""
    if len(text) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MB")
    if reason := next(_beyond(text), ""):
        raise ValueError(reason)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path: Path) -> str:
    """The text of a file that should be TOML; raises `ValueError` where it is too large, or not UTF-8."""
    with path.open("rb") as stream:
        return _text_of(stream)


def read_plain_text(path: Path) -> str:
    """The same, of a file that has its place among ours: raises `OSError` for a pipe, which would keep us waiting."""
    with open_plain(path) as stream:
        return _text_of(stream)


def read_own_text(path: Path) -> str:
    """The same; raises `UserError` where somebody else may have written it."""
    with open_own(path) as stream:
        return _text_of(stream)


def _text_of(stream: BinaryIO) -> str:
    content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MB")
    return content.decode().replace("\r\n", "\n").replace("\r", "\n")


def table_of(config: str) -> dict[str, Any]:
    """The table of a job file as it was stored; empty where it cannot be read."""
    try:
        return parse_toml(config)
    except ValueError:
        return {}


def _beyond(text: str) -> Iterator[str]:
    """What of it is too deep or too long."""
    depth = dots = 0
    for token in _TOKEN.finditer(text):
        if token["word"] and len(token["word"]) > LONGEST_WORD:
            line = text.count("\n", 0, token.start()) + 1
            yield f"line {line} holds a word or number of more than {LONGEST_WORD} characters"
        sign = token["sign"]
        depth += (sign in ("[", "{")) - (sign in ("]", "}")) if sign else 0
        dots = dots + 1 if sign == "." else 0 if sign else dots
        if depth > DEEPEST or dots > DEEPEST:
            line = text.count("\n", 0, token.start()) + 1
            yield f"line {line} is nested more than {DEEPEST} deep"
