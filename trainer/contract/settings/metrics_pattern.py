"""Parses the patterns in `command.metrics`, like `step={step} loss={loss}`, which find numbers in program output."""

from __future__ import annotations

import re
import string

import msgspec

# The possessive quantifiers and the atomic group keep the matching time linear in the length of a line.
NUMBER = r"[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?>(?:[eE][-+]?\d++)?)|[-+]?(?:nan|inf)\b"
_NAME = re.compile(r"[A-Za-z_][\w./@-]{0,79}")
MOST_PATTERNS = 20
LONGEST_PATTERN = 500


class MetricsPattern(msgspec.Struct, frozen=True):
    """A pattern to search for in each line, and the names of the numbers that it finds."""

    regex: re.Pattern[str]
    names: tuple[str, ...]

    def find(self, line: str) -> dict[str, str]:
        """Return the numbers in a line, by name; {} if the line does not contain the pattern."""
        match = self.regex.search(line)
        return dict(zip(self.names, match.groups(), strict=True)) if match else {}


def parse_pattern(text: str) -> MetricsPattern:
    """Parse a pattern; raise `ValueError` with the reason if it is invalid.

    A name in braces matches a number, and white space matches any amount of white space. All other characters match
    themselves; braces are written `{{` and `}}`.
    """
    if len(text) > LONGEST_PATTERN:
        raise ValueError(f"is longer than {LONGEST_PATTERN} characters")
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        raise ValueError("has a single brace; write {loss} for a number, and {{ or }} for a brace itself") from None
    regex, names = "", list[str]()
    for literal, name, spec, conversion in parts:
        regex += _literal(literal)
        if name is None:
            continue
        if spec or conversion or not _NAME.fullmatch(name):
            raise ValueError("has an invalid name; names in braces look like {loss} or {train/loss}")
        if names and not literal:
            raise ValueError("has no text between two names; separate them, as in {step} {loss}")
        if name in names:
            raise ValueError(f"has the name {{{name}}} twice")
        names.append(name)
        # A pattern that begins with a name must not match the end of a longer number.
        regex += rf"(?<![\d.])({NUMBER})" if not regex else rf"\s*+({NUMBER})"
    if not names:
        raise ValueError("has no name in braces, like {loss}")
    return MetricsPattern(re.compile(regex, re.IGNORECASE), tuple(names))


def _literal(text: str) -> str:
    return r"\s++".join(map(re.escape, re.split(r"\s+", text)))
