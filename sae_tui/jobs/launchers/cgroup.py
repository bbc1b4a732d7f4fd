"""A cgroup for a command's processes, used where the user may create one, so that no process can escape."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


class Cgroup:
    """A cgroup below this process's own; processes started in it stay in it, with all their descendants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, name: str, mount: Path = MOUNT) -> Cgroup | None:
        """Create a cgroup with this name; return None without cgroup v2, or if systemd has not delegated its parent."""
        with contextlib.suppress(OSError, StopIteration):
            own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
            folder = mount / own.removeprefix("0::").strip().lstrip("/") / name
            # The file exists only in a cgroup v2 file system.
            if (folder.parent / "cgroup.procs").exists():
                folder.mkdir(exist_ok=True)
                return cls(folder)
        return None

    @classmethod
    def of(cls, pid: int, name: str, mount: Path = MOUNT) -> Cgroup | None:
        """Return a process's cgroup if it has this name, otherwise None."""
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
            own = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
            if own.rpartition("/")[2] == name:
                return cls(mount / own.lstrip("/"))
        return None

    def enter(self) -> None:
        """Move this process into the cgroup, or do nothing if that is refused. This is safe between fork and exec."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"0")
            finally:
                os.close(descriptor)

    def pids(self) -> list[int]:
        with contextlib.suppress(OSError, ValueError):
            return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]
        return []

    def kill(self) -> None:
        """Kill every process in the cgroup; this has no effect before Linux 5.14."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.rmdir()
