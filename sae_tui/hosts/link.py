"""A rate-limited line reader for a subprocess such as ssh; a well-behaved host stays below the limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from sae_tui.hosts.causes import Cause
from sae_tui.hosts.protocol import LONGEST_LINE
from trainer.contract.printable import printable

# A busy host writes 2 lines and 150 kB per second.
_BYTES_S, _BURST = 256 << 10, 2 << 20
# The minimum cost per line in bytes, so that short lines are limited too: to 16 lines/s on average.
_LEAST_COST = 16 << 10
_CHUNK = 64 << 10
_LOOK_S = 0.5
_KEPT_ERRORS = 4096
_LEAVE_S = 1.0


class Allowance:
    """A token bucket that limits reads to `bytes_s` bytes per second, plus a burst after a pause."""

    def __init__(self, bytes_s: float = _BYTES_S, burst: float = _BURST) -> None:
        self._bytes_s, self._burst = bytes_s, burst
        self._left, self._at = burst, time.monotonic()

    def take(self, n_bytes: int) -> float:
        """Take `n_bytes`, and return how many seconds to wait before the next call."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._bytes_s) - n_bytes
        self._at = now
        return max(0.0, -self._left / self._bytes_s)


class Link:
    """A subprocess and its output. Only one thread may use the link, but any thread may call `stop`.

    The subprocess's standard input is a pipe that closes when this process exits, even if this process is killed.
    """

    def __init__(
        self, argv: Sequence[str], on_wait: Callable[[], object] = lambda: None, allowance: Allowance | None = None
    ) -> None:
        """Start the process; raise `OSError` if it cannot start.

        `on_wait` is called at least twice per second while the link is read.
        """
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        self._allowance = allowance or Allowance()
        self._stopped = threading.Event()
        self._errors = b""
        self.is_greeted = False  # set by the reader of the messages
        self.cut_for: Cause | None = None
        self._on_wait = on_wait
        # The times (monotonic, wall clock) when bytes last arrived on standard output; initially, when the process
        # started.
        self.heard = (time.monotonic(), time.time())

    @property
    def complaints(self) -> list[str]:
        """The last lines from standard error, made printable."""
        lines = self._errors.decode(errors="replace").replace("\r", "\n").split("\n")
        return [printable(line.strip()) for line in lines if line.strip()]

    def stop(self, cause: Cause | None = None) -> None:
        """Stop the process; `lines` then ends too. `cause` says what the other host did wrong, if anything."""
        self.cut_for = cause
        self._stopped.set()
        signal_all(self._process, signal.SIGTERM)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines written by the process, without line endings; raise `ValueError` if a line is too long."""
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
        """Stop the process if it is still running, and return its exit code."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
        return end(self._process, _LEAVE_S)

    def _chunks(self) -> Iterator[bytes]:
        """Yield chunks of standard output until it ends; keep the last lines from standard error."""
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
    """Send a signal to the process group of a process that leads its own session."""
    # Once the exit code has been collected, the pid may belong to another process.
    if process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)


def end(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Wait up to `patience_s` for a process to exit, then kill its process group and return its exit code."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not _has_ended(process.pid):
        time.sleep(0.01)
    signal_all(process, signal.SIGKILL)
    return process.wait()


def _has_ended(pid: int) -> bool:
    """Return whether a child has exited, without collecting its exit code."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
