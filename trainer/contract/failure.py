"""Errors in the JSON format printed by a failed command with `--json`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from trainer.contract.errors import BadUsage, JobFileError, Problem
from trainer.contract.json_file import decode_as
from trainer.contract.output import show_text
from trainer.contract.printable import printable_json

# Matches a flag, an argument or a job file setting followed by a colon and a message.
_FIELD = re.compile(r"(--[a-z][a-z-]*|[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+|[A-Z][A-Z_]*(?:\.toml)?): (?=\S)")


class Failure(msgspec.Struct, frozen=True):
    """One error: the field, what is wrong, and how to fix it."""

    field: str | None
    message: str
    fix: str | None


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """The output of a failed command; `others` contains further errors."""

    error: Failure
    others: tuple[Failure, ...] = ()


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line requests JSON; this also works if the parser would reject the command line."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def show_failure(error: Exception | str) -> None:
    """Print an error as one line of JSON to standard output."""
    text = msgspec.json.encode(refusal(error)).decode()
    show_text(f"{printable_json(text)}\n")


def failure_in(output: bytes | str) -> str:
    """Return the error in a failed command's last output line, as a sentence; "" if that line is not a `Refusal`."""
    lines = output.splitlines()
    try:
        first = decode_as(lines[-1] if lines else b"", Refusal).error
    except ValueError:
        return ""
    where = f"{first.field}: " if first.field else ""
    return f"{where}{first.message}{f'; {first.fix}' if first.fix else ''}"


def refusal(error: Exception | str) -> Refusal:
    """Convert an error to the output of a failed command."""
    if isinstance(error, BadUsage):
        return Refusal(Failure(*_field_and_rest(_utf8(error.message)), error.fix))
    if isinstance(error, JobFileError):
        first, *others = map(_of_problem, error.problems)
        return Refusal(first, tuple(others))
    field, sentence = _field_and_rest(_utf8(str(error)))
    return Refusal(Failure(field, *_what_and_fix(sentence)))


def _of_problem(problem: Problem) -> Failure:
    return Failure(_utf8(problem.path) or None, *_what_and_fix(_utf8(problem.message)))


def _field_and_rest(sentence: str) -> tuple[str | None, str]:
    match = _FIELD.match(sentence)
    return (match[1], sentence[match.end() :]) if match else (None, sentence)


def _what_and_fix(sentence: str) -> tuple[str, str | None]:
    """Split `what is wrong; what to do` at the first semicolon outside parentheses."""
    depth = 0
    for place, char in enumerate(sentence):
        depth += (char == "(") - (char == ")")
        if depth == 0 and sentence.startswith("; ", place):
            return sentence[:place], sentence[place + 2 :]
    return sentence, None


def _utf8(text: str) -> str:
    """Replace characters that cannot be encoded as UTF-8; file names may contain such characters."""
    return text.encode(errors="replace").decode()
