"""Reads untrusted JSON that may be truncated or corrupt; any input yields a value or a one-line error."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.files import open_plain, write_whole

# The maximum file size in bytes. The project's own files are far smaller, and reading a huge file could exhaust memory.
LARGEST = 64 * 2**20
# The maximum number of characters in an error message, which may quote a long value.
_LONGEST_REASON = 300

# The beginnings of the lines that git adds around both versions of lines that it cannot merge.
CONFLICT_MARKS = (b"<<<<<<<", b"|||||||", b"=======", b">>>>>>>")

T = TypeVar("T")

# Types whose msgspec decoders have been built.
_prepared: set[Any] = set()
_preparing = threading.RLock()


def prepare(kind: Any) -> None:
    """Build the msgspec decoder for a type, one thread at a time; raise `TypeError` for an unsupported type.

    By default, msgspec builds the decoder when the type is first used, and crashes if two threads do this at once (seen
    with msgspec 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)


def convert_as(value: Any, kind: type[T]) -> T:
    """Convert a value to a type; a thread-safe version of `msgspec.convert`."""
    prepare(kind)
    return msgspec.convert(value, kind)


def decode_as(text: bytes | str, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Decode JSON as a value of the given type; raise `ValueError` with the reason if it is not valid."""
    try:
        prepare(kind)
        return msgspec.json.decode(_without_mark(text), type=kind, dec_hook=dec_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(f"{error}"[:_LONGEST_REASON]) from None


def _without_mark(text: bytes | str) -> bytes | str:
    """Remove the byte order mark that Windows editors write at the start of a file."""
    return text.removeprefix("\ufeff") if isinstance(text, str) else text.removeprefix(codecs.BOM_UTF8)


def load_json(
    file: Path,
    kind: type[T],
    dec_hook: Callable[[type, Any], Any] | None = None,
    open_file: Callable[[Path], io.BufferedReader] = open_plain,
) -> T:
    """Decode a JSON file as the given type; raise `ValueError` if it is not valid, `OSError` if it cannot be read."""
    with open_file(file) as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    return decode_as(content, kind, dec_hook)


def read_json(file: str | os.PathLike[str], kind: type[T]) -> T | None:
    """Decode a JSON file as the given type; return None if it is missing, unreadable or not valid."""
    try:
        return load_json(Path(file), kind)
    except (OSError, ValueError):
        return None


def write_json(file: Path, value: object) -> None:
    """Write a value atomically as indented JSON; raise `OSError` if writing fails."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json_lines(file: Path, kind: type[T]) -> list[T]:
    """Decode the lines of a JSON Lines file as the given type; leave out lines that are not valid; [] without a file.

    Raise `UserError` if the file cannot be read or is too large.
    """
    values = []
    for line in raw_lines(file):
        with contextlib.suppress(ValueError):
            values.append(decode_as(line, kind))
    return values


def raw_lines(file: Path) -> list[bytes]:
    """Return the lines of a file that are not blank, without their ends; [] if it does not exist.

    Raise `UserError` if the file cannot be read or is too large.
    """
    try:
        with open_plain(file) as stream:
            content = stream.read(LARGEST + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    if len(content) > LARGEST:
        raise UserError(f"{file} is larger than {LARGEST >> 20} MiB; move it away")
    return [line for line in content.split(b"\n") if line.strip()]


def write_lines(file: Path, lines: Iterable[bytes]) -> None:
    """Write lines atomically; raise `UserError` if writing fails, or if the file would be too large to be read."""
    content = b"".join(line + b"\n" for line in lines)
    if len(content) > LARGEST:
        raise UserError(f"{file} would be larger than {LARGEST >> 20} MiB; move it away")
    try:
        write_whole(file, content)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from None
