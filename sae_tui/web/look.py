"""A browser session: a separate app process that writes to one browser and reads that browser's keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence

from sae_tui.hosts.link import end, signal_all
from sae_tui.web import BROWSER_DRIVER
from trainer.contract.printable import printable

# Textual's driver writes this marker before its first packet.
_READY = b"__GANGLION__\n"
_HEAD = 5  # bytes: the kind of a packet, and the size of its payload
# An entire screen of 300x100 cells with a different style in each cell takes 2 MB.
_LARGEST_PACKET = 8 << 20
_CHUNK = 64 << 10
_KEPT_ERRORS = 4096
# How many seconds the process has to exit after SIGTERM before being killed.
_LEAVE_S = 2.0
# Environment variables describing the server's terminal; they do not apply to a browser.
_OF_A_TERMINAL = ("LINES", "STY", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TMUX")


class AppProcess:
    """The app's process and its pipes. The process exits when the server does, even if the server crashes."""

    def __init__(self, argv: Sequence[str], columns: int, rows: int) -> None:
        """Start the process; raise `OSError` if that fails."""
        pipe, env = subprocess.PIPE, _environment(columns, rows)
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, env=env
        )
        self._output = asyncio.StreamReader(limit=_LARGEST_PACKET)
        self._transports: list[asyncio.BaseTransport] = []
        self._input: asyncio.StreamWriter | None = None
        self._reading_errors: asyncio.Task[None] | None = None
        self._errors = b""
        self._closing = False

    async def open(self) -> None:
        """Connect the pipes; call this once, before any other method."""
        loop, process = asyncio.get_running_loop(), self._process
        errors, answers = asyncio.StreamReader(), asyncio.StreamReader()
        for reader, pipe in ((self._output, process.stdout), (errors, process.stderr)):
            transport, _ = await loop.connect_read_pipe(lambda it=reader: asyncio.StreamReaderProtocol(it), pipe)  # type: ignore[misc]
            self._transports.append(transport)
        writing, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(answers), process.stdin)
        self._input = asyncio.StreamWriter(writing, protocol, None, loop)
        self._reading_errors = asyncio.create_task(self._read_errors(errors))

    async def screens(self) -> AsyncIterator[bytes]:
        """Yield the app's output until it ends; each item combines all packets available at that time."""
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await self._output.readuntil(_READY)
            left = b""
            while chunk := await self._output.read(_CHUNK):
                drawn, left, is_over = _unpack(left + chunk)
                if drawn:
                    yield drawn
                if is_over:
                    return

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a packet: "D" for typed input, "M" for anything else, as JSON; do nothing after the app has exited."""
        assert self._input is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._input.write(kind + len(payload).to_bytes(4, "big") + payload)
            await self._input.drain()

    async def close(self) -> str:
        """Stop the process and its children, except jobs; return the last line of its standard error, or ""."""
        if self._closing:
            return ""
        self._closing = True
        has_ended = self._output.at_eof()
        signal_all(self._process, signal.SIGTERM)
        # An app blocked while writing its screen would never exit, so read its output.
        draining = asyncio.create_task(self._drain())
        code = await asyncio.to_thread(end, self._process, _LEAVE_S)
        draining.cancel()
        if self._reading_errors:
            # A child process may still have the pipe open.
            await asyncio.wait([self._reading_errors], timeout=0.2)
            self._reading_errors.cancel()
        for transport in self._transports:
            transport.close()
        if self._input:
            self._input.close()
        return self._complaint if has_ended and code else ""

    @property
    def _complaint(self) -> str:
        lines = self._errors.decode(errors="replace").split("\n")
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "it exited at once")

    async def _drain(self) -> None:
        # A second reader raises RuntimeError; in that case, the pipe is already being drained.
        with contextlib.suppress(RuntimeError):
            while await self._output.read(_CHUNK):
                pass

    async def _read_errors(self, errors: asyncio.StreamReader) -> None:
        while chunk := await errors.read(_KEPT_ERRORS):
            self._errors = (self._errors + chunk)[-_KEPT_ERRORS:]


def _unpack(data: bytes) -> tuple[bytes, bytes, bool]:
    """Return the output from all complete packets, the leftover bytes, and whether the output ends here.

    The output ends if the app has announced its exit or sent an oversized packet.
    """
    drawn: list[bytes] = []
    at = 0
    while len(data) - at >= _HEAD:
        kind, size = data[at : at + 1], int.from_bytes(data[at + 1 : at + _HEAD], "big")
        stop = at + _HEAD + size
        if size > _LARGEST_PACKET or (kind == b"M" and stop <= len(data) and _is_farewell(data[at + _HEAD : stop])):
            return b"".join(drawn), b"", True
        if stop > len(data):
            break
        # Ignore other packets, such as requests to open a link, because another user may share the browser.
        if kind == b"D":
            drawn.append(data[at + _HEAD : stop])
        at = stop
    return b"".join(drawn), data[at:], False


def _is_farewell(payload: bytes) -> bool:
    try:
        said = json.loads(payload)
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("type") == "exit"


def _environment(columns: int, rows: int) -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_TERMINAL}
    return inherited | {
        "TEXTUAL_DRIVER": BROWSER_DRIVER,
        "COLUMNS": str(columns),
        "ROWS": str(rows),
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
    }
