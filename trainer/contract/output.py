"""Writes standard output and error of a command, in any locale and even if they are closed, full or broken pipes."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

from trainer.contract.errors import BadUsage, UserError, sentence
from trainer.contract.exits import Exit
from trainer.contract.printable import printable_lines

# Replacements for characters that a terminal without UTF-8 cannot show.
_PLAIN = {"…": "...", "·": "-", "–": "-", "°": "", "×": "x", "µ": "u", "→": "->", "✓": "+", "✗": "x", "•": "*"}


# Actions of this command that must not be repeated; see `has_done`.
_DONE: list[str] = []

# The start of an argparse message about an argument, such as `argument -n/--count: `.
_ARGUMENT = re.compile(r"argument ([^\s:]+): ")


class OutputLost(UserError):
    """Standard output can no longer be written."""


class SafeParser(argparse.ArgumentParser):
    """A parser that replaces control characters in its messages: arguments may be file names chosen by other users."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Python 3.14 colours its messages; the filter would turn the colour codes into visible marks.
        self.color = False

    def error(self, message: str) -> NoReturn:
        """Raise `BadUsage`, since the caller knows whether to report to a person or to a script."""
        known = _ARGUMENT.match(message)
        name = f"{known[1].split('/')[-1]}: " if known else ""
        said = message[known.end() :] if known else message
        raise BadUsage(name + said, printable_lines(self.sentence_on(message)), f"see {self.prog} --help")

    def sentence_on(self, message: str) -> str:
        """Return the message on bad usage for a person."""
        return f"{self.format_usage()}{self.prog}: error: {message}\n"

    def _print_message(self, message: str, file: TextIO | None = None) -> None:  # type: ignore[override]
        if message:
            (complain if file is sys.stderr else show_text)(printable_lines(message))


def run_command(command: Callable[[], int], teller: str = "") -> int:
    """Run a command and return its exit code, even if its output is closed, full or a broken pipe.

    If standard output or error is closed, do not run the command: its messages would be lost, and the next file opened
    would get the output's descriptor. `teller` is the prefix of the message that reports this.
    """
    if sys.stdout is None or sys.stderr is None:
        return _refuse_without_output(teller)
    _replace_unknown_characters()
    _DONE.clear()
    try:
        code = _code_of(command)
        _flush()
    except BrokenPipeError:
        return _without_output(teller, "the output cannot be written: no process reads it", Exit.UNREAD)
    except OutputLost as error:
        return _without_output(teller, str(error), Exit.FAILED)
    return code


def has_done(what: str) -> None:
    """Record what a command has done, such as "job 3 is launched", before printing it.

    If the output is lost, the exit code is `Exit.UNTOLD`, so that a script does not repeat the command.
    """
    _DONE.append(what)


def show_text(text: str) -> None:
    """Write to standard output and flush; raise `OutputLost` if that fails, as on a full disk."""
    with _lost_output():
        sys.stdout.write(text)
        sys.stdout.flush()


def complain(text: str) -> None:
    """Write to standard error and flush; ignore a failure."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def can_show(characters: str, stream: TextIO) -> bool:
    """Return whether the stream's encoding supports these characters."""
    try:
        characters.encode(stream.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _code_of(command: Callable[[], int]) -> int:
    try:
        return command()
    except SystemExit as leaving:  # after help, or bad usage
        return leaving.code if isinstance(leaving.code, int) else 0


def _without_output(teller: str, why: str, code: Exit) -> Exit:
    """Print to standard error what was done and why the output is lost; print nothing if only the reader has gone."""
    _drop(sys.stdout)
    if _DONE or code != Exit.UNREAD:
        complain(f"{teller}{printable_lines('; '.join([*_DONE, why]))}\n")
    return Exit.UNTOLD if _DONE else code


def _flush() -> None:
    with _lost_output():
        sys.stdout.flush()


@contextlib.contextmanager
def _lost_output() -> Iterator[None]:
    """Raise `OutputLost` for an `OSError`; let a broken pipe through."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(f"the output cannot be written: {sentence(error)}") from None


def _refuse_without_output(teller: str) -> int:
    name, redirect = ("output", ">/dev/null") if sys.stdout is None else ("error", "2>/dev/null")
    with contextlib.suppress(OSError):
        if (stream := sys.stderr or sys.stdout) is not None:
            stream.write(f"{teller}standard {name} is closed; redirect it, as with {redirect}\n")
            stream.flush()
    return Exit.FAILED


def _drop(stream: TextIO) -> None:
    """Point the stream at /dev/null: the interpreter flushes it again on exit, which would fail again."""
    with contextlib.suppress(OSError):  # the stream has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_unknown_characters() -> None:
    """Print substitutes for characters that the encoding of an output lacks, instead of failing."""
    codecs.register_error("plain", _as_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not can_show("…°", stream):
            stream.reconfigure(errors="plain")


def _as_plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end
