"""Standard output and error of a command: in any locale, and where nobody takes them any more."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from trainer.contract.errors import UserError, sentence
from trainer.contract.printable import printable_lines

EXIT_OUTPUT_LOST, EXIT_BROKEN_PIPE = 1, 141
# What a terminal gets that is not of UTF-8, for what it cannot show.
_PLAIN = {"…": "...", "·": "-", "–": "-", "°": "", "×": "x", "µ": "u", "→": "->", "✓": "+", "✗": "x", "•": "*"}


class OutputLost(UserError):
    """Standard output takes nothing any more."""


class Parser(argparse.ArgumentParser):
    """Prints help and bad usage as all else is printed: words of the command line may be names of strangers' files."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Of what Python 3.14 colours, the filter would leave the marks.
        self.color = False

    def _print_message(self, message: str, file: TextIO | None = None) -> None:  # type: ignore[override]
        if message:
            (complain if file is sys.stderr else show_text)(printable_lines(message))


def answered(command: Callable[[], int], teller: str = "") -> int:
    """Run a command and returns its exit code, also where its output is closed, full or a broken pipe.

    Where an output is closed it begins nothing: nobody would learn of it, and what is opened next would stand in the
    output's place. `teller` begins the one sentence that tells it.
    """
    if sys.stdout is None or sys.stderr is None:
        return _refuse_without_output(teller)
    _show_plainly()
    try:
        code = _code_of(command)
        _flush()
    except BrokenPipeError:
        _drop(sys.stdout)
        return EXIT_BROKEN_PIPE
    except OutputLost as error:
        _drop(sys.stdout)
        complain(f"{teller}{error}\n")
        return EXIT_OUTPUT_LOST
    return code


def show_text(text: str) -> None:
    """Write to standard output at once; raises `OutputLost` where it cannot be, as on a full disk."""
    with _told():
        sys.stdout.write(text)
        sys.stdout.flush()


def complain(text: str) -> None:
    """Write to standard error; what cannot be told there stops nothing."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def can_show(characters: str, stream: TextIO) -> bool:
    """Whether the locale of this stream knows these characters."""
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


def _flush() -> None:
    with _told():
        sys.stdout.flush()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(f"the output cannot be written: {sentence(error)}") from None


def _refuse_without_output(teller: str) -> int:
    name, redirect = ("output", ">/dev/null") if sys.stdout is None else ("error", "2>/dev/null")
    with contextlib.suppress(OSError):
        if (left := sys.stderr or sys.stdout) is not None:
            left.write(f"{teller}standard {name} is closed; send it elsewhere, as with {redirect}\n")
            left.flush()
    return EXIT_OUTPUT_LOST


def _drop(stream: TextIO) -> None:
    """The interpreter flushes it once more as it ends."""
    with contextlib.suppress(OSError):  # no file is behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_plainly() -> None:
    """Have characters that the locale does not know printed as others, rather than end a command."""
    codecs.register_error("plain", _as_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not can_show("…°", stream):
            stream.reconfigure(errors="plain")


def _as_plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end
