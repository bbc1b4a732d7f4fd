"""Reads code blocks and shell commands from README.md and docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLS = ("bash", "sh", "console")
_FENCE = re.compile(r"^```(?P<language>\w*)(?:[ ]+title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)
# A command within a sentence, such as `sae-tui job ID`.
_INLINE = re.compile(r"(?<!`)`((?:sae-tui|sae-train|python -m trainer) [^`]+)`(?!`)")
_BORDERS = {"|", "||", "&&", ";", "&", "(", ")"}
_INTO = {">", ">>"}
_ASSIGNMENT = re.compile(r"\w+=")
_SUBSTITUTED = re.compile(r"\$\(([^()]*)\)")


@dataclass(frozen=True)
class Block:
    """A code block: its location, its language, and the name of the file whose content it shows."""

    place: str
    language: str
    title: str
    text: str


def pages() -> list[Path]:
    """Return the README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(*languages: str) -> list[Block]:
    """Return the code blocks in these languages from all pages."""
    return [block for page in pages() for block in blocks_of(page) if block.language in languages]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        place = f"{page.relative_to(ROOT)}:{line}"
        yield Block(place, found["language"], found["title"] or "", found["text"])


def commands() -> list[tuple[str, list[str]]]:
    """Return every command in a shell block, with its location."""
    return [(block.place, argv) for block in blocks(*SHELLS) for argv in commands_of(block)]


def inline_commands() -> list[tuple[str, list[str]]]:
    """Return every inline command of this project's programs, with its page."""
    found = [(page, span) for page in pages() for span in _INLINE.findall(page.read_text())]
    return [(str(page.relative_to(ROOT)), argv) for page, span in found for argv in _simple(span)]


def commands_of(block: Block) -> list[list[str]]:
    """Return each command in a block as an argument list; in a console block, the lines with a prompt are commands."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [argv for line in lines for argv in _simple(line)]


def _simple(line: str) -> Iterator[list[str]]:
    """Split a shell line into simple commands, without operators and assignments.

    A command substitution counts as a simple command.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    argv: list[str] = []
    for token in [*lexer, ";"]:
        if token not in _BORDERS:
            argv.append(token)
            continue
        if not _INTO.isdisjoint(argv):
            argv = argv[: next(place for place, word in enumerate(argv) if word in _INTO)]
        while argv and _ASSIGNMENT.match(argv[0]):
            argv.pop(0)
        if argv:
            yield argv
        for word in argv:
            for inner in _SUBSTITUTED.findall(word):
                yield from _simple(inner)
        argv = []
