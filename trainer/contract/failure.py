"""What has gone wrong, as JSON: the one answer of a command that fails where a script has asked for JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from trainer.contract.errors import BadUsage, JobFileError, Problem
from trainer.contract.json_file import decode_as
from trainer.contract.output import show_text
from trainer.contract.printable import printable_json

# A flag, an argument or a setting of a job file before the colon of a message.
_FIELD = re.compile(r"(--[a-z][a-z-]*|[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+|[A-Z][A-Z_]+(?:\.toml)?): (?=\S)")


class Failure(msgspec.Struct, frozen=True):
    """One thing that is wrong: where, what, and what to do."""

    field: str | None
    message: str
    fix: str | None


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a command that has failed; `others` is there where more than one thing is wrong."""

    error: Failure
    others: tuple[Failure, ...] = ()


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Tell whether a command line asks for JSON, also one that no parser takes."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def show_failure(error: Exception | str) -> None:
    """Print what is wrong as one line of JSON on standard output."""
    text = msgspec.json.encode(refusal(error)).decode()
    show_text(f"{printable_json(text)}\n")


def told_failure(output: bytes | str) -> str:
    """Return as one sentence what a command told last that has failed; "" where its last line is no such answer."""
    lines = output.splitlines()
    try:
        first = decode_as(lines[-1] if lines else b"", Refusal).error
    except ValueError:
        return ""
    where = f"{first.field}: " if first.field else ""
    return f"{where}{first.message}{f'; {first.fix}' if first.fix else ''}"


def refusal(error: Exception | str) -> Refusal:
    """Return what is wrong as it is told to a script."""
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
    """Split `what is wrong; what to do` at the first semicolon outside brackets."""
    depth = 0
    for place, char in enumerate(sentence):
        depth += (char == "(") - (char == ")")
        if depth == 0 and sentence.startswith("; ", place):
            return sentence[:place], sentence[place + 2 :]
    return sentence, None


def _utf8(text: str) -> str:
    """Replace what is no UTF-8, as the name of a file may be."""
    return text.encode(errors="replace").decode()
