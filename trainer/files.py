"""Folders of tensors and JSON that appear whole or not at all, even when the disk fills or the power fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainer.contract.paths import file_mode, is_shared, open_private, private_folder
from trainer.contract.problems import UserError

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place once it is complete and on the disk.

    Raises `UserError` where the disk does not take it; what was at `folder` before is then still there.
    """
    temporary = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        private_folder(folder.parent)
        temporary.mkdir(mode=0o700)
        if is_shared(folder.parent):
            temporary.chmod(0o2770)
        yield temporary
        sync(temporary)
        _swap(temporary, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise not_written(folder, reason, getattr(error, "errno", None)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def not_written(folder: Path, reason: str, number: int | None = None) -> UserError:
    """The sentence that says what to do; `number` is the errno."""
    cure = "free some space on its disk"
    if number in _FORBIDDEN:
        cure = "make its folder writable"
    elif "quota" in reason:
        cure = "free some of your quota there"
    return UserError(f"{folder} could not be written: {reason}; {cure} and try again")


def free_bytes(folder: Path) -> int:
    """What a user may still write there, as far as the file system says; `folder` need not exist yet."""
    try:
        disk = os.statvfs(next(found for found in (folder, *folder.parents) if found.exists()))
    except OSError:
        return sys.maxsize
    # Some network file systems count nothing.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else sys.maxsize


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file that is on the disk on return."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(file_mode(file.parent))
    sync(file)


def write_json(file: Path, content: Any) -> None:
    """A JSON file that is on the disk on return."""
    with open(open_private(file, os.O_TRUNC), "w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
    sync(file)


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(temporary: Path, folder: Path) -> None:
    """rename(2) cannot replace a folder that holds something, so an older one steps aside first."""
    older = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(older, ignore_errors=True)
