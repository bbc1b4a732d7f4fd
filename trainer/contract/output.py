"""Writes to standard output and error in any locale, and handles closed pipes and full disks."""

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

# Replacements for characters that terminals without UTF-8 cannot show.
_PLAIN = {"…": "...", "·": "-", "–": "-", "°": "", "×": "x", "µ": "u", "→": "->", "✓": "+", "✗": "x", "•": "*"}


# Actions completed by this command that must not be repeated; see `has_done`.
_DONE: list[str] = []

# Matches the start of an argparse message about an argument, such as `argument -n/--count: `.
_ARGUMENT = re.compile(r"argument ([^\s:]+): ")


class OutputLost(UserError):
    """An error while writing to standard output, for example on a full disk."""


class SafeParser(argparse.ArgumentParser):
    """A parser that replaces control characters in its messages, which may quote other users' file names."""

    def __init__(self, *arguments: Any, is_of_command: bool = False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._is_of_command = is_of_command
        # Python 3.14 colours the messages, and `printable_lines` would turn the colour codes into visible characters.
        self.color = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse a command's unknown flags here, because argparse would leave them to the top-level parser."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self._is_of_command:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Raise `BadUsage`; the caller decides whether to report the error as text or as JSON."""
        known = _ARGUMENT.match(message)
        name = f"{known[1].split('/')[-1]}: " if known else ""
        said = message[known.end() :] if known else message
        raise BadUsage(name + said, printable_lines(self.sentence_on(message)), f"see {self.prog} --help")

    def sentence_on(self, message: str) -> str:
        """Return the text of a usage error as it is shown to a person."""
        return f"{self.format_usage()}{self.prog}: error: {message}\n"

    def _print_message(self, message: str, file: TextIO | None = None) -> None:  # type: ignore[override]
        if message:
            (complain if file is sys.stderr else show_text)(printable_lines(message))


def run_command(command: Callable[[], int], teller: str = "") -> int:
    """Run a command and return its exit code, even if the command's output cannot be written.

    If standard output or error is closed, the command is not run: its messages would be lost, and the next file to be
    opened would get the closed stream's file descriptor. `teller` is the prefix of the error message.
    """
    if sys.stdout is None or sys.stderr is None:
        return _refuse_without_output(teller)
    _replace_unknown_characters()
    _DONE.clear()
    try:
        code = _code_of(command)
        _flush()
    except BrokenPipeError:
        return _without_output(teller, "the output cannot be written: no process is reading it", Exit.UNREAD)
    except OutputLost as error:
        return _without_output(teller, str(error), Exit.FAILED)
    return code


def has_done(what: str) -> None:
    """Record a completed action, such as "job 3 is launched", before the command prints its result.

    If the output is lost, the exit code is `Exit.UNTOLD`, so that scripts do not repeat the command.
    """
    _DONE.append(what)


def show_text(text: str) -> None:
    """Write to standard output and flush; raise `OutputLost` if that fails, for example on a full disk."""
    with _lost_output():
        sys.stdout.write(text)
        sys.stdout.flush()


def complain(text: str) -> None:
    """Write to standard error and flush; ignore failures."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def can_show(characters: str, stream: TextIO) -> bool:
    """Return whether a stream's encoding supports the given characters."""
    try:
        characters.encode(stream.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _code_of(command: Callable[[], int]) -> int:
    try:
        return command()
    except SystemExit as leaving:  # argparse raises this after help and bad usage
        return leaving.code if isinstance(leaving.code, int) else 0


def _without_output(teller: str, why: str, code: Exit) -> Exit:
    """Report on standard error which actions were completed and that the output was lost.

    If the reader closed the pipe and no action was completed, print nothing.
    """
    _drop(sys.stdout)
    if _DONE or code != Exit.UNREAD:
        complain(f"{teller}{printable_lines('; '.join([*_DONE, why]))}\n")
    return Exit.UNTOLD if _DONE else code


def _flush() -> None:
    with _lost_output():
        sys.stdout.flush()


@contextlib.contextmanager
def _lost_output() -> Iterator[None]:
    """Convert an `OSError` to `OutputLost`, but do not catch a broken pipe."""
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
    """Redirect a stream to /dev/null; otherwise, the interpreter would flush the stream on exit and fail again."""
    with contextlib.suppress(OSError):  # for streams without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_unknown_characters() -> None:
    """Make standard output and error print substitutes for characters that their encodings lack, instead of failing."""
    codecs.register_error("plain", _as_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not can_show("…°", stream):
            stream.reconfigure(errors="plain")


def _as_plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end
