"""Writes folders of tensors and JSON atomically, even if the disk is full or the power fails."""

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
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpaceError(UserError):
    """Raised when the disk is full or a quota is exhausted; the same write may succeed later."""


@contextlib.contextmanager
def fill_folder(folder: Path, last: str) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`; after the `with` block, sync it to disk and rename it to `folder`.

    If `folder` exists, the new files replace files with the same names one by one, ending with the file `last`; other
    files are kept. Raise `UserError` if writing fails, or if `folder` is a symbolic link.
    """
    try:
        refuse_link(folder)
        private_folder(folder.parent)
        clear_cut_off_folders(folder.parent, re.escape(folder.name))
        # Other users must not be able to add files while the folder is being written.
        temporary = temporary_name(folder)
        temporary.mkdir(mode=0o700)
    except OSError as error:
        raise _write_error(folder, error) from error
    except UserError as error:
        # If a full disk prevented the creation of a parent folder, the original OSError is this error's context.
        if isinstance(cause := error.__context__, OSError) and cause.errno in _NO_SPACE:
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
    """Return an unpredictable path for a hidden folder next to `folder`."""
    return folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.new")


def clear_cut_off_folders(parent: Path, names: str) -> None:
    """Remove temporary folders left behind by killed processes; `names` is a regex for the final names."""
    temporary = re.compile(rf"\.({names})(\.[0-9a-f]{{16}})?\.new")
    for entry in parent.glob(".*.new"):
        if temporary.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def _place(temporary: Path, folder: Path, last: str) -> None:
    """Rename a temporary folder to `folder`; if `folder` exists, replace its files one by one.

    rename(2) cannot replace a non-empty folder.
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
    # safetensors reports the errno only in its message.
    number = _IN_WORDS.search(str(error))
    return not_written(folder, str(error), int(number[1]) if number else None)


def not_written(folder: Path, reason: str, number: int | None = None) -> UserError:
    """Return an error with a message that suggests a remedy; `number` is the errno."""
    cure, kind = "free some space on its disk", UserError
    if number in _NO_SPACE:
        kind = NoSpaceError
    if number in _FORBIDDEN:
        cure = "make its folder writable"
    elif "quota" in reason:
        cure = "free some of your quota on it"
    return kind(f"{folder} could not be written: {reason}; {cure} and try again")


def free_bytes(folder: Path) -> int:
    """Return how many bytes the user can still write to the file system of `folder`; `folder` need not exist yet.

    Return `sys.maxsize` if the file system does not report its free space.
    """
    try:
        _, free = free_disk(folder)
    except OSError:
        return sys.maxsize
    return sys.maxsize if free is None else free


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file and sync it to disk."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    sync(file)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file and sync it to disk."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
