"""A client of a real `sae-tui serve`: HTTP requests, and sessions whose screens pyte emulates."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import psutil
import pyte


class ShownLook:
    """The browser's side of one session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, columns: int, rows: int) -> None:
        self.socket = socket
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    async def say(self, *words: object) -> None:
        await self.socket.send_str(json.dumps(words))

    async def press(self, keys: str) -> None:
        await self.say("stdin", keys)

    async def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        await self.say("resize", {"width": columns, "height": rows})

    async def wait_for(self, expected: str | Callable[[str], bool], seconds: float = 90) -> str:
        """Return the screen once it shows `expected`; on a timeout, raise `AssertionError` with the screen."""
        shows = expected if callable(expected) else lambda text: expected in text
        try:
            async with asyncio.timeout(seconds):
                while not shows(self.text):
                    await self._read()
        except TimeoutError:
            raise AssertionError(f"{expected!r} did not appear; the screen:\n{self.text}") from None
        return self.text

    async def wait_until_closed(self, seconds: float = 30) -> None:
        async with asyncio.timeout(seconds):
            while not self.socket.closed:
                await self._read()

    async def _read(self) -> None:
        message = await self.socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            self._stream.feed(message.data)
        else:
            assert self.socket.closed, (message, self.text)


class Served:
    """The server as a separate process."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=_obey_ctrl_c
        )
        self._processes: set[psutil.Process] = set()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                break
        assert lines, self.process.stderr.read()
        self.told = json.loads("".join(lines))
        self.url: str = self.told["url"]
        self.port: int = self.told["port"]
        self.base = urlsplit(self.url).path

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={name.capitalize(): value for name, value in headers.items()})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), content

    @asynccontextmanager
    async def look(self, columns: int = 100, rows: int = 30, **headers: str) -> AsyncIterator[ShownLook]:
        host = headers.get("host", f"127.0.0.1:{self.port}")
        sent = {"Host": host, "Origin": headers.get("origin", f"http://{host}")}
        url = f"http://127.0.0.1:{self.port}{self.base}look?width={columns}&height={rows}"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, headers=sent, max_msg_size=0) as socket,
        ):
            yield ShownLook(socket, columns, rows)

    @property
    def below(self) -> list[psutil.Process]:
        """Each session's root process, without its descendants."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        self._processes.update(found)
        return found

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            _ = self.below
        self.process.kill()
        self.process.communicate()
        for process in self._processes:
            if process.is_running():
                process.kill()


def _obey_ctrl_c() -> None:
    # A child inherits an ignored SIGINT, for example under nohup.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def wait_until(holds: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)
