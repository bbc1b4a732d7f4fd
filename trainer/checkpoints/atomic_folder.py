"""Folders of tensors and JSON that appear whole or not at all, even when the disk fills or the power fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.paths import file_mode, free_disk, is_shared, private_folder, refuse_link

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_WORDS = re.compile(r"\(os error (\d+)\)")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoomError(UserError):
    """The disk is full, or a quota is used up: the same write may succeed later."""


@contextlib.contextmanager
def fill_folder(folder: Path, last: str) -> Iterator[Path]:
    """Give the context a temporary folder beside `folder` that becomes it once it is complete and on the disk.

    Where `folder` is there already, the new files take the place of those of the same name one by one, `last` as the
    last of them, and whatever else is in it stays. Raise `UserError` where the disk does not take it, and for a link.
    """
    try:
        refuse_link(folder)
        private_folder(folder.parent)
        clear_cut_off_folders(folder.parent, re.escape(folder.name))
        # While it is written nobody else may put anything into it.
        temporary = temporary_name(folder)
        temporary.mkdir(mode=0o700)
    except OSError as error:
        raise _write_error(folder, error) from error
    except UserError as error:
        # A missing parent that a full disk refuses: the cause is in the context.
        if isinstance(cause := error.__context__, OSError) and cause.errno in _NO_ROOM:
            raise _write_error(folder, cause) from error
        raise
    try:
        yield temporary
        _place(temporary, folder, last)
    except (OSError, SafetensorError) as error:
        raise _write_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_name(folder: Path) -> Path:
    """Return the path of a hidden folder beside `folder` that nobody can guess."""
    return folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.new")


def clear_cut_off_folders(parent: Path, names: str) -> None:
    """Remove temporary folders of killed processes; `names` is a regular expression of the names they were to get."""
    temporary = re.compile(rf"\.({names})(\.[0-9a-f]{{16}})?\.new")
    for entry in parent.glob(".*.new"):
        if temporary.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def _place(temporary: Path, folder: Path, last: str) -> None:
    """Rename a temporary folder to `folder`, or replace the files of that one by one if it exists.

    rename(2) cannot replace a folder that holds something.
    """
    mode = file_mode(folder.parent)
    files = sorted(temporary.iterdir(), key=lambda file: file.name == last)
    for file in files:
        file.chmod(mode)
    if is_shared(folder.parent):
        temporary.chmod(0o2770)
    sync(temporary)
    if not folder.exists():
        temporary.rename(folder)
    else:
        for file in files:
            file.replace(folder / file.name)
        sync(folder)
    sync(folder.parent)


def _write_error(folder: Path, error: Exception) -> UserError:
    if isinstance(error, OSError):
        return not_written(folder, error.strerror or str(error), error.errno)
    # safetensors gives the number in the message only.
    number = _IN_WORDS.search(str(error))
    return not_written(folder, str(error), int(number[1]) if number else None)


def not_written(folder: Path, reason: str, number: int | None = None) -> UserError:
    """Return an error that says what to do; `number` is the errno."""
    cure, kind = "free some space on its disk", UserError
    if number in _NO_ROOM:
        kind = NoRoomError
    if number in _FORBIDDEN:
        cure = "make its folder writable"
    elif "quota" in reason:
        cure = "free some of your quota there"
    return kind(f"{folder} could not be written: {reason}; {cure} and try again")


def free_bytes(folder: Path) -> int:
    """Return the bytes that a user may still write there, as the file system says; `folder` need not exist yet."""
    try:
        _, free = free_disk(folder)
    except OSError:
        return sys.maxsize
    return sys.maxsize if free is None else free


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, which is on the disk on return."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    sync(file)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file, which is on the disk on return."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
