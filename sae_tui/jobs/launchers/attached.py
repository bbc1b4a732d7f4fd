"""A program that is not its supervisor's child, because the supervisor was replaced or the program was adopted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from sae_tui.jobs.launchers.process_tree import MARK, environ_of, own_pids
from sae_tui.jobs.launchers.ranks import OneRank
from sae_tui.jobs.supervisor_log import tolerate_disk
from trainer.contract.files import open_plain, write_whole
from trainer.contract.json_file import read_json
from trainer.contract.paths import open_private
from trainer.contract.process import ProcessRef
from trainer.contract.runs.log_tail import last_line
from trainer.contract.runs.rank_exit import signal_name

# The mode of a job whose program was running before it became a job.
ADOPTED = "adopted"
# The ioctl PIDFD_GET_INFO (since Linux 6.13) with the first version of its struct (64 bytes), and the flag for the exit
# status (since Linux 6.15). See include/uapi/linux/pidfd.h.
_GET_INFO, _WITH_EXIT, _SIZE, _EXIT_AT = 0xC040FF0B, 1 << 3, 64, 60
# How long to wait for a program's parent to reap the program, after which the kernel reports the exit status.
_REAPED_S = 1.0
# How many bytes of an adopted process's earlier output are copied, and how many bytes are copied at a time.
COPIED_BEFORE, _MOST_COPIED = 2**20, 2**22


class AttachedProgram(OneRank):
    """A program that another process reaps; the kernel may not report how it ended."""

    name = "its program"

    def __init__(self, process: ProcessRef, exit_file: Path, log: Path) -> None:
        super().__init__(0, exit_file)
        self._ref, self._log = process, log
        self._status: int | None = None
        self._pidfd = os.pidfd_open(process.pid) if process.is_alive() else -1

    @property
    def ref(self) -> ProcessRef:
        return self._ref

    @property
    def code(self) -> int | None:
        """The exit code: negative for a signal, None while the program runs, and 0 if the kernel does not report it."""
        if self.ended is None:
            return None
        return os.waitstatus_to_exitcode(self._status) if self._status is not None else 0

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the program to end; return whether it has ended."""
        poller = select.poll()
        if self._pidfd >= 0:
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(timeout_s * 1000):
                return False
            self._status = self._read_status()
            os.close(self._pidfd)
        self.ended = time.time()
        return True

    def _read_status(self) -> int | None:
        """Return the wait status, read from the zombie or, once it is reaped, from the kernel; None if unknown."""
        deadline = time.monotonic() + _REAPED_S
        while time.monotonic() < deadline:
            if (status := _status_of_reaped(self._pidfd)) is not None:
                return status
            if (status := _status_of_zombie(self._ref.pid)) is not None:
                return status
            time.sleep(0.01)
        return None

    def kill(self) -> None:
        self.ended_by_us |= self.ended is None
        self._ref.send(signal.SIGKILL)

    def failed_at(self) -> float:
        return self.ended or time.time()

    def last_line(self) -> str:
        return last_line(self._log)

    def how(self) -> str:
        if self._status is None:
            return "ended, and the kernel does not report its exit code to a process that is not its parent"
        code = self.code or 0
        return f"was killed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"


class OutputCopy:
    """Copies a process's output from its file into the job's log; if the output goes elsewhere, nothing is copied."""

    def __init__(self, pid: int, log: Path, offset_file: Path) -> None:
        self._source = _output_file(pid)
        self._log, self._offset_file = log, offset_file
        self._offset = self._first_offset()

    def _first_offset(self) -> int:
        """Return where an earlier supervisor stopped copying or, if there was none, a position near the end."""
        if (offset := read_json(self._offset_file, int)) is not None:
            return max(0, offset)
        size = self._source.stat().st_size if self._source else 0
        return max(0, size - COPIED_BEFORE)

    def poll(self) -> None:
        """Copy up to 4 MiB of new output."""
        if self._source is None:
            return
        with tolerate_disk(f"copying {self._source}"), open_plain(self._source) as stream:
            if stream.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0
            stream.seek(self._offset)
            if chunk := stream.read(_MOST_COPIED):
                descriptor = open_private(self._log, os.O_APPEND)
                try:
                    os.write(descriptor, chunk)
                finally:
                    os.close(descriptor)
                self._offset += len(chunk)
                write_whole(self._offset_file, str(self._offset), durable=False)


def _output_file(pid: int) -> Path | None:
    """Return the regular file that receives a process's standard output or, if there is none, its standard error."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            link = Path(f"/proc/{pid}/fd/{number}")
            target = Path(os.readlink(link))
            if stat.S_ISREG(link.stat().st_mode) and target.is_file():
                return target
    return None


def _status_of_reaped(pidfd: int) -> int | None:
    answer = bytearray(_SIZE)
    struct.pack_into("Q", answer, 0, _WITH_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, answer)
        (mask,) = struct.unpack_from("Q", answer)
        if mask & _WITH_EXIT:
            return int(struct.unpack_from("i", answer, _EXIT_AT)[0])
    return None


def _status_of_zombie(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # The kernel reports 0 to a process that may not trace this one, but the user of such a process cannot run this
        # program's supervisor either.
        return int(fields[-1]) if state == b"Z" else None
    return None


def find_program(run_dir: Path, attempt: int) -> ProcessRef | None:
    """Find an attempt's program by the marks in its environment; return None if it is not running.

    This finds a program whose supervisor was killed before it could record the program.
    """
    wanted = {os.fsencode(f"{MARK}={run_dir}"), f"SAE_TUI_ATTEMPT={attempt}".encode()}
    return next((ref for pid in _leaders() if wanted <= environ_of(pid) and (ref := ProcessRef.of(pid))), None)


def _leaders() -> Iterator[int]:
    for pid in own_pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == pid:
                yield pid
