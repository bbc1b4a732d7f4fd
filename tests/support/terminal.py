"""A program in a real pseudo-terminal, whose screen pyte emulates."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """Runs a command in a pty of a given size; `wait_for` reads until the screen shows the expected content."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        columns: int = 120,
        rows: int = 40,
        env: Mapping[str, str],
        colours: str = "truecolor",
        term: str = "xterm-256color",
        cwd: Path | None = None,
        emulated: bool = True,
        controlling: bool = False,
    ) -> None:
        """Start the command in a pty.

        `colours` is the value of COLORTERM; "" leaves it unset, as ssh does, so that the terminal has 256 colours.
        `term` is the value of TERM.
        Without `emulated`, only the output `raw` is kept and the screen is not emulated, because emulation takes more
        CPU time than the app itself. With `controlling`, the pty is a controlling terminal: ctrl+c and ctrl+z send
        signals unless the program disables this, and closing the pty sends SIGHUP.
        """
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen) if emulated else None
        self.raw = bytearray()
        self._closed = False
        self.started = time.monotonic()
        self._master, slave = pty.openpty()
        self._set_size(columns, rows)
        # Some test runners set COLUMNS and LINES, which would override the terminal's size.
        own = ("COLUMNS", "LINES", "COLORTERM")
        environment = {name: value for name, value in env.items() if name not in own} | {
            "TERM": term,
            "LANG": "C.UTF-8",
        }
        if colours:
            environment["COLORTERM"] = colours
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            close_fds=True,
            cwd=cwd,
            preexec_fn=_take_terminal if controlling else None,
        )
        os.close(slave)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def bytes_read(self) -> int:
        return len(self.raw)

    @property
    def mode(self) -> list[Any]:
        """The terminal's settings as `stty -a` shows them: echo, canonical mode, special characters."""
        return termios.tcgetattr(self._master)

    def send(self, keys: str | bytes) -> None:
        """Write keys in one packet, like keys typed ahead over a slow connection."""
        os.write(self._master, keys.encode() if isinstance(keys, str) else keys)

    def press(self, *keys: str, gap_s: float = 0.15) -> None:
        """Send keys one at a time, as if a person typed them, and read the output in between."""
        for key in keys:
            self.send(key)
            self.read(gap_s)

    def resize(self, columns: int, rows: int) -> None:
        """Change the terminal size and send SIGWINCH to the program."""
        self._set_size(columns, rows)
        self.screen.resize(rows, columns)
        # The kernel sends SIGWINCH only to processes whose controlling terminal this is.
        self.process.send_signal(signal.SIGWINCH)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds: float) -> None:
        """For `seconds`, feed the program's output to the screen."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._pump(left):
                return

    def read_until_quiet(self, quiet_s: float, seconds: float) -> None:
        """Read until there has been no output for `quiet_s` or the program has ended; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while select.select([self._master], [], [], quiet_s)[0] and self._pump(0):
            if time.monotonic() > deadline:
                raise AssertionError(f"the program still draws after {seconds:g} s")

    def wait_for(self, expected: str | Callable[[str], bool], seconds: float = 30) -> str:
        """Return the screen once it shows `expected`; on a timeout, raise `AssertionError` with the screen."""
        shows = expected if callable(expected) else lambda text: expected in text
        deadline = time.monotonic() + seconds
        while not shows(self.text):
            left = deadline - time.monotonic()
            if left <= 0 or (not self._pump(min(left, 0.5)) and self.process.poll() is not None):
                raise AssertionError(f"{expected!r} did not appear; the screen:\n{self.text}")
        return self.text

    def wait_for_exit(self, seconds: float = 20) -> int:
        """Wait until the program exits, and return its exit code.

        Keep reading, because unread output can block the program.
        """
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the program does not exit; the screen:\n{self.text}"
            self._pump(0.05)
        # The program may have written its last output after the last read.
        self.read_until_quiet(0, 5)
        return self.process.returncode

    def detach(self) -> int:
        """Return the file descriptor of the test's end of the pty. The caller must close the descriptor."""
        self._closed = True
        return self._master

    def close(self) -> None:
        """Close the pty, as closing the window would; a second call does nothing."""
        if self._closed:
            return
        os.close(self.detach())
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def usage(self) -> tuple[float, int]:
        """Return the CPU seconds that the program has used, and its peak memory in bytes."""
        with open(f"/proc/{self.process.pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        with open(f"/proc/{self.process.pid}/status") as stream:
            peak = next(int(line.split()[1]) for line in stream if line.startswith("VmHWM"))
        return ticks / os.sysconf("SC_CLK_TCK"), peak * 1024

    def _pump(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.raw += data
        if self._stream:
            self._stream.feed(data)
        return bool(data)
