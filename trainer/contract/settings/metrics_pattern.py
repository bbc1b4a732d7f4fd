"""Reads the patterns of `command.metrics`, like `step={step} loss={loss}`, which find numbers in a program's output."""

from __future__ import annotations

import re
import string

import msgspec

# The possessive quantifiers keep the time linear in the length of a line.
NUMBER = r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?+|[-+]?(?:nan|inf)\b"
_NAME = re.compile(r"[A-Za-z_][\w./@-]{0,79}")
MOST_PATTERNS = 20
LONGEST_PATTERN = 500


class MetricsPattern(msgspec.Struct, frozen=True):
    """A pattern that is searched for in each line, and the names of the numbers that it finds."""

    regex: re.Pattern[str]
    names: tuple[str, ...]

    def find(self, line: str) -> dict[str, str]:
        """Return the numbers in a line, by name; {} if the line does not contain the pattern."""
        match = self.regex.search(line)
        return dict(zip(self.names, match.groups(), strict=True)) if match else {}


def parse_pattern(text: str) -> MetricsPattern:
    """Parse a pattern; raise `ValueError` with the reason if it is invalid.

    A name in braces stands for a number, white space for any white space, and everything else for itself; `{{` and `}}`
    stand for braces.
    """
    if len(text) > LONGEST_PATTERN:
        raise ValueError(f"is longer than {LONGEST_PATTERN} characters")
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        raise ValueError("has a single brace; write {{ for a brace, and {loss} for a number") from None
    regex, names = "", list[str]()
    for literal, name, spec, conversion in parts:
        regex += _literal(literal)
        if name is None:
            continue
        if spec or conversion or not _NAME.fullmatch(name):
            raise ValueError("has a name that is not like {loss} or {train/loss}")
        if names and not literal:
            raise ValueError("has no text between two names")
        if name in names:
            raise ValueError(f"has the name {{{name}}} twice")
        names.append(name)
        # At the start of a pattern, do not begin within a number.
        regex += rf"(?<![\d.])({NUMBER})" if not regex else rf"\s*+({NUMBER})"
    if not names:
        raise ValueError("has no name in braces, like {loss}")
    return MetricsPattern(re.compile(regex, re.IGNORECASE), tuple(names))


def _literal(text: str) -> str:
    return r"\s++".join(map(re.escape, re.split(r"\s+", text)))
