"""File locks that mark a GPU as in use for exactly as long as any process of its job is alive.

The ranks inherit the lock descriptors. Therefore, a GPU stays locked while its rank is running, even if the
supervisor is killed, and no locks have to be cleaned up after a crash. All locks for a machine's real GPUs are in one
folder so that users with different data folders see each other's locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.contract.locks import try_lock
from trainer.contract.mounts import mount_of
from trainer.contract.paths import DataDir, private_folder
from trainer.contract.trust import user_of

ENV_LOCK_DIR = "SAE_TUI_LOCK_DIR"
# /run/lock is emptied at every boot, and on most machines all users can write to it.
# The locks are not in a subfolder: its creator would own it and could lock out other users.
_MACHINE_FOLDERS = (Path("/run/lock"), Path("/tmp"))
# The time limit for reading the GPU locks. Reading takes 0.1 ms unless the disk hangs.
LIMIT_S = 0.1
_ALONE = f"other users cannot see GPU reservations: set {ENV_LOCK_DIR} to a folder with mode 1777"


class GpuLocks:
    """The locks for one job's GPUs; either all locks are acquired, or none. Jobs that share a GPU share its lock."""

    def __init__(self, folder: Path, uuids: Iterable[str], *, shared: bool = False) -> None:
        # Sort the GPUs so that two jobs that need the same GPUs cannot each hold one and wait for the other.
        self._paths = {uuid: _path(folder, uuid) for uuid in sorted(uuids)}
        self._shared = shared
        self.descriptors: tuple[int, ...] = ()
        self.refused: str | None = None
        self.why = ""

    def take(self) -> bool:
        """Acquire all locks without waiting, and return True; if one cannot be acquired, acquire none and return False.

        If the locks are already held, return True. After a failure, `refused` is the UUID of the GPU whose lock could
        not be acquired, and `why` is the error, or "" if another process holds the lock.
        """
        if self.descriptors:
            # Do not lock again: a second descriptor for the same file would conflict with the first.
            return True
        taken: list[int] = []
        for uuid, path in self._paths.items():
            try:
                if not path.parent.exists():
                    private_folder(path.parent)
                taken.append(open_lock(path))
                # If the file was replaced in the meantime, another process may hold the lock on the new file.
                is_free = try_lock(taken[-1], shared=self._shared) and _is_there_still(path, taken[-1])
                why = ""
            except OSError as error:
                is_free, why = False, _why(path, error)
            if not is_free:
                _close(taken)
                self.refused, self.why = uuid, why
                return False
        self.descriptors, self.refused, self.why = tuple(taken), None, ""
        return True

    def release(self) -> None:
        """Release the locks in this process; a rank that is still alive keeps holding them."""
        _close(self.descriptors)
        self.descriptors = ()


def _is_there_still(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def lock_folder(data: DataDir, gpu_source: str) -> Path:
    """Return the GPU lock folder: the machine's folder for real GPUs, the data folder for simulated ones."""
    return _place(data, gpu_source)[0]


def lock_problem(data: DataDir, gpu_source: str) -> str:
    """Return why the GPU locks are not visible to all users of the machine, or "" if they are."""
    return _place(data, gpu_source)[1]


def _place(data: DataDir, gpu_source: str) -> tuple[Path, str]:
    if gpu_source == "none":
        return data.locks, ""
    if gpu_source.partition(":")[0] == "simulated":
        # Simulated GPUs have the same UUIDs on all hosts that share the data folder, so each host has its own locks.
        return data.locks / data.host_word, ""
    if chosen := os.environ.get(ENV_LOCK_DIR):
        wrong = _make_shared_folder(Path(chosen))
        return (data.locks, f"{wrong}; {_ALONE}") if wrong else (Path(chosen), "")
    for folder in _MACHINE_FOLDERS:
        if _is_open_to_all(folder) and folder.stat().st_uid == 0:
            return folder, ""
    return data.locks, f"neither {' nor '.join(map(str, _MACHINE_FOLDERS))} is owned by root with mode 1777; {_ALONE}"


def lock_holders(folder: Path, uuids: Iterable[str]) -> dict[str, int]:
    """Return a dict mapping the UUID of each locked GPU to the pid that acquired the lock.

    Locks acquired in another PID namespace are omitted. This function does not acquire any lock.
    """
    return _holders({uuid: _path(folder, uuid) for uuid in uuids})


def lock_holder(path: Path) -> int | None:
    """Return the pid of the process that holds a file's lock, or None if no process in this PID namespace holds it."""
    return _holders({"": path}).get("")


def _holders(paths: Mapping[str, Path]) -> dict[str, int]:
    """Return a dict mapping the name of each locked file to the pid that holds its lock.

    `paths` maps names to files, which must all be in one folder.
    """
    try:
        pids = pids_by_lock(Path("/proc/locks").read_bytes())
    except OSError:
        return {}
    held = {}
    with contextlib.suppress(OSError):
        # Inode numbers are unique only within one device.
        device = mount_of(next(iter(paths.values())).parent).device if paths and pids else ""
        for name, path in paths.items() if device else ():
            with contextlib.suppress(OSError):
                if pid := pids.get(f"{device}:{path.stat().st_ino}"):
                    held[name] = pid
    return held


class HolderReader:
    """Reads the lock holders on a separate thread so that a hung disk does not block the caller."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holders: dict[str, int] = {}
        self._thread = threading.Thread()
        self._starting = threading.Lock()

    def read(self, uuids: Iterable[str]) -> dict[str, int]:
        """Return the result of `lock_holders`; if reading takes longer than `LIMIT_S`, return the last known result."""
        with self._starting:
            if self._thread.is_alive():
                return self._holders
            thread = threading.Thread(target=self._read, args=(tuple(uuids),), name="locks", daemon=True)
            thread.start()
            self._thread = thread
        thread.join(LIMIT_S)
        return self._holders

    def _read(self, uuids: Iterable[str]) -> None:
        self._holders = lock_holders(self._folder, uuids)


def pids_by_lock(lines: bytes) -> dict[str, int]:
    """Return a dict mapping the device and inode of each whole-file lock in /proc/locks to the holder's pid."""
    # Lines for processes waiting for a lock have an arrow before the lock type, so the pattern does not match.
    matches = re.findall(rb"^\d+: FLOCK +\w+ +\w+ +(\d{1,10}) +([\da-f]+:[\da-f]+:\d+) ", lines, re.MULTILINE)
    return {place.decode(): int(pid) for pid, place in matches}


def owner(pid: int) -> str:
    """Describe a process's owner, like `alice (pid 123)`, or return only the pid if the process has exited."""
    user = user_of_process(pid)
    return f"{user} (pid {pid})" if user else f"pid {pid}"


def user_of_process(pid: int) -> str:
    """Return the login name of a process's user, or "" if the process has exited."""
    try:
        return user_of(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


def _path(folder: Path, uuid: str) -> Path:
    return folder / f"sae-tui-{uuid.replace('/', '_')}.lock"


def _is_open_to_all(folder: Path) -> bool:
    """Return whether all users can add files to a folder, but cannot remove other users' files, as in /tmp."""
    try:
        return folder.stat().st_mode & 0o1777 == 0o1777
    except OSError:
        return False


def _make_shared_folder(folder: Path) -> str:
    """Create a folder with the permissions of /tmp; return why this failed, or "" on success."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
    except OSError as error:
        return f"{ENV_LOCK_DIR}: {folder} cannot be created ({error.strerror})"
    if not folder.is_dir():
        return f"{ENV_LOCK_DIR}: {folder} is not a folder"
    return "" if _is_open_to_all(folder) else f"{ENV_LOCK_DIR}: {folder} must have mode 1777"


def open_lock(path: Path) -> int:
    """Open a lock file, creating it if missing, and return its descriptor.

    The file is opened read-only, which is sufficient for locking and also works if the file belongs to another user.
    Symbolic links are not followed, and a FIFO does not block the call. Raise `OSError` if the path is not a regular
    file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = _open_or_create(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return descriptor


def _open_or_create(path: Path, flags: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    with contextlib.suppress(FileExistsError):
        # Set the mode after creating the file; the umask would remove permissions that other users need.
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(descriptor, 0o644)
        return descriptor
    return os.open(path, flags)


def _why(path: Path, error: OSError) -> str:
    try:
        whose = user_of(path.lstat().st_uid)
    except OSError:
        return f"{path} cannot be created ({error.strerror})"
    reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
    return f"{path}, owned by {whose}, cannot be used ({reason}); ask {whose} or root to remove it"


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
