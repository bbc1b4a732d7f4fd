"""A process that writes lines, such as ssh, read no faster than a host of good will writes them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from sae_tui.hosts.protocol import LONGEST_LINE
from trainer.contract.printable import printable

# A busy host writes 2 lines and 150 kB a second.
_BYTES_S, _BURST = 256 << 10, 2 << 20
# What a line costs at least, so that short ones cannot come by the ten thousand: 16 lines/s go on for ever.
_LEAST_COST = 16 << 10
_CHUNK = 64 << 10
_LOOK_S = 0.5
_KEPT_ERRORS = 4096
_LEAVE_S = 1.0


class Allowance:
    """How many bytes may be read: so many a second, and a burst of more after a rest."""

    def __init__(self, bytes_s: float = _BYTES_S, burst: float = _BURST) -> None:
        self._bytes_s, self._burst = bytes_s, burst
        self._left, self._at = burst, time.monotonic()

    def take(self, n_bytes: int) -> float:
        """Take so many bytes, and return for how many seconds to wait before the next are taken."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._bytes_s) - n_bytes
        self._at = now
        return max(0.0, -self._left / self._bytes_s)


class Link:
    """The process and what it writes; used by one thread, but `stop` by any.

    Its standard input is a pipe that ends with this process, however that ends.
    """

    def __init__(self, argv: Sequence[str], on_wait: Callable[[], object] = lambda: None) -> None:
        """Start the process; raise `OSError` if it cannot start.

        `on_wait` is called at least twice a second while the link is read.
        """
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        self._allowance = Allowance()
        self._stopped = threading.Event()
        self._errors = b""
        self._on_wait = on_wait
        # When standard output last had bytes, or the process was started: monotonic time and wall-clock time.
        self.heard = (time.monotonic(), time.time())

    @property
    def complaints(self) -> list[str]:
        """The last lines that it wrote to standard error, printable."""
        lines = self._errors.decode(errors="replace").replace("\r", "\n").split("\n")
        return [printable(line.strip()) for line in lines if line.strip()]

    def stop(self) -> None:
        """End the process, and with it `lines`."""
        self._stopped.set()
        signal_all(self._process, signal.SIGTERM)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines it writes, without their ends; raise `ValueError` for one that is too long."""
        partial = b""
        for chunk in self._chunks():
            *whole, partial = (partial + chunk).split(b"\n")
            for line in whole:
                self._pay(max(0, _LEAST_COST - len(line)))
                if self._stopped.is_set():
                    return
                yield line
            if len(partial) > LONGEST_LINE:
                raise ValueError(f"a line is longer than {LONGEST_LINE >> 20} MiB")

    def close(self) -> int:
        """End the process if it has not ended by itself, and return its exit code."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
        return end(self._process, _LEAVE_S)

    def _chunks(self) -> Iterator[bytes]:
        """Yield what comes on standard output until it ends; keep the end of what comes on standard error."""
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        with selectors.DefaultSelector() as ready:
            ready.register(out, selectors.EVENT_READ)
            ready.register(err, selectors.EVENT_READ)
            while ready.get_map() and not self._stopped.is_set():
                self._on_wait()
                for key, _ in ready.select(_LOOK_S):
                    chunk = os.read(key.fd, _CHUNK)
                    self._pay(len(chunk))
                    if not chunk:
                        ready.unregister(key.fileobj)
                    elif key.fileobj is err:
                        self._errors = (self._errors + chunk)[-_KEPT_ERRORS:]
                    else:
                        self.heard = (time.monotonic(), time.time())
                        yield chunk

    def _pay(self, n_bytes: int) -> None:
        if (wait_s := self._allowance.take(n_bytes)) > 0:
            self._stopped.wait(wait_s)


def signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process in a session of its own and to all that it has started there."""
    # Once it is waited for, its number may be another's.
    if process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)


def end(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Return the exit code of a process, which has so long to end by itself, and end what it has left behind."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not _has_ended(process.pid):
        time.sleep(0.01)
    signal_all(process, signal.SIGKILL)
    return process.wait()


def _has_ended(pid: int) -> bool:
    """Tell whether a child has ended, and leave its exit code to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
