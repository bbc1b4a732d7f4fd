"""File locks that say a GPU is in use for exactly as long as a process of its job lives.

The ranks inherit the descriptors, so that not even `kill -9` of the supervisor frees a card that is
still computing, and nothing has to be cleaned up after a crash. Those of real cards lie in one folder of
the machine, so that users with stores of their own see each other's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.paths import DataDir
from trainer.contract.problems import UserError

ENV_LOCK_DIR = "SAE_TUI_LOCK_DIR"
# The first is emptied at every start of the machine, and has room for everybody on most of them.
_MACHINE_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_NO_CARDS = ("simulated", "none")


class GpuLocks:
    """The locks of one job's GPUs: all of them or none; jobs that share a card hold its lock together."""

    def __init__(self, folder: Path, uuids: Iterable[str], *, shared: bool = False) -> None:
        # Sorted, so that two jobs that want the same cards cannot each hold one and wait for the other.
        self._paths = {uuid: _path(folder, uuid) for uuid in sorted(uuids)}
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self.descriptors: tuple[int, ...] = ()
        self.refused: str | None = None

    def take(self) -> bool:
        """Takes every lock, or none and returns False, without waiting; True where they are held already.

        `refused` is then the UUID of the card that somebody else holds. Raises OSError where one cannot be opened.
        """
        if self.descriptors:
            # A second descriptor of the same file would conflict with our own first one.
            return True
        taken: list[int] = []
        for uuid, path in self._paths.items():
            try:
                taken.append(opened_lock(path))
                fcntl.flock(taken[-1], self._kind | fcntl.LOCK_NB)
            except OSError as error:
                _close(taken)
                if not isinstance(error, BlockingIOError):
                    raise
                self.refused = uuid
                return False
        self.descriptors, self.refused = tuple(taken), None
        return True

    def release(self) -> None:
        """Lets go of this process's share; a rank that lives on still holds its own."""
        _close(self.descriptors)
        self.descriptors = ()


def lock_folder(data: DataDir, gpu_source: str) -> Path:
    """Where the locks of such GPUs are: those of real cards are the machine's, of simulated ones the data folder's."""
    if gpu_source.partition(":")[0] in _NO_CARDS:
        return data.locks
    chosen = os.environ.get(ENV_LOCK_DIR)
    if chosen:
        return _everybodys(Path(chosen))
    # Not where only root may write, even for root: all users have to come to the same place.
    base = next((folder for folder in _MACHINE_FOLDERS if _is_for_all(folder)), data.locks)
    return base if base == data.locks else _everybodys(base / "sae-tui")


def lock_holders(folder: Path, uuids: Iterable[str]) -> dict[str, int]:
    """The pid that took each lock that is held, without touching one; nothing of other pid namespaces."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return {}
    # A line of somebody who waits for a lock has an arrow in front of its kind.
    taken = [fields for fields in map(str.split, lines) if fields[1] == "FLOCK"]
    pids = {int(fields[5].rpartition(":")[2]): int(fields[4]) for fields in taken}
    held = {}
    for uuid in uuids:
        with contextlib.suppress(OSError):
            if pid := pids.get(_path(folder, uuid).stat().st_ino):
                held[uuid] = pid
    return held


def owner(pid: int) -> str:
    """`alice (pid 123)`, or only the pid of a process that has gone."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"pid {pid}"
    try:
        return f"{pwd.getpwuid(uid).pw_name} (pid {pid})"
    except KeyError:
        return f"uid {uid} (pid {pid})"


def _path(folder: Path, uuid: str) -> Path:
    return folder / f"{uuid.replace('/', '_')}.lock"


def _is_for_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _everybodys(folder: Path) -> Path:
    """Made like /tmp: everybody may add a file, and nobody may remove another's."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{folder}, where GPUs are reserved, cannot be made: {reason}; set {ENV_LOCK_DIR}") from None
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder}, where GPUs are reserved, is not a folder; remove it or set {ENV_LOCK_DIR}")
    return folder


def opened_lock(path: Path) -> int:
    """For reading alone, which is enough to lock: the file may be another user's. A link is not followed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    with contextlib.suppress(FileExistsError):
        # Not by `mode`, from which the umask would take what others need.
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(descriptor, 0o644)
        return descriptor
    return os.open(path, flags)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
