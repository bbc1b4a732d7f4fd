"""Reserves disk space for a run's last checkpoint."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from trainer.checkpoints.checkpoint import BESIDE_TENSORS
from trainer.contract.paths import open_private, private_folder

_libc = ctypes.CDLL(None, use_errno=True)


# The number of extra bytes per folder, for JSON files, the random state and partially filled blocks.
_OF_FOLDER = 2**16


def reserved_bytes(tensor_bytes: int, n_folders: int) -> int:
    """Return how many bytes to reserve for `tensor_bytes` bytes of tensor data in `n_folders` folders."""
    return int(BESIDE_TENSORS * tensor_bytes) + _OF_FOLDER * n_folders


class Reserve:
    """A file that reserves disk space for the last checkpoint and the SAEs; it does nothing if `n_bytes` is 0."""

    def __init__(self, file: Path, n_bytes: int) -> None:
        self._file, self._n_bytes = file, n_bytes

    def hold(self) -> None:
        """Reserve the space if the file system has enough and can reserve it; otherwise do nothing."""
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
        """Free the reserved space."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _allocate(descriptor: int, n_bytes: int) -> None:
    """Reserve space for a file; raise `OSError` if the disk is too full or the file system cannot reserve space.

    `os.posix_fallocate` is not used, because it writes to every block if the file system cannot reserve space. Over a
    network, these writes take minutes per GiB.
    """
    zero, length = ctypes.c_longlong(0), ctypes.c_longlong(n_bytes)
    if _libc.fallocate(descriptor, 0, zero, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
