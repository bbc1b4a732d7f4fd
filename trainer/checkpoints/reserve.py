"""Space on the disk that is kept for the last checkpoint of a run."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from trainer.checkpoints.checkpoint import BESIDE_TENSORS
from trainer.contract.paths import open_private, private_folder

_libc = ctypes.CDLL(None, use_errno=True)


# What JSON files, the random state and the blocks of a file system take of each folder that is written.
_OF_FOLDER = 2**16


def reserved_bytes(tensor_bytes: int, n_folders: int) -> int:
    """Return the space to keep for so many bytes of tensors in so many folders."""
    return int(BESIDE_TENSORS * tensor_bytes) + _OF_FOLDER * n_folders


class Reserve:
    """A file that takes space until the last checkpoint and the SAEs need it; of no bytes it does nothing."""

    def __init__(self, file: Path, n_bytes: int) -> None:
        self._file, self._n_bytes = file, n_bytes

    def hold(self) -> None:
        """Take the space, where the file system can keep some and has it; a run does not fail without."""
        self.release()
        if not self._n_bytes:
            return
        with contextlib.suppress(OSError):
            private_folder(self._file.parent)
            descriptor = open_private(self._file, os.O_EXCL)
            try:
                _allocate(descriptor, self._n_bytes)
            except OSError:
                self.release()
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Give the space back."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _allocate(descriptor: int, n_bytes: int) -> None:
    """Take space for a file; raise `OSError` where there is none, or where the file system cannot.

    `os.posix_fallocate` writes to every block of a file system that cannot: minutes for some gibibytes over a network.
    """
    zero, length = ctypes.c_longlong(0), ctypes.c_longlong(n_bytes)
    if _libc.fallocate(descriptor, 0, zero, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
