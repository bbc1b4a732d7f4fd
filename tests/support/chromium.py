"""A real headless Chromium, controlled through its debugging protocol: opens pages, presses keys, takes screenshots."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
    "--remote-debugging-port=0", "--window-size=1200,800",
)  # fmt: skip


class Chromium:
    """One page in a browser with its own profile."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self._folder = folder / "profile"
        self.said: list[str] = []  # page errors, and requests blocked by the content security policy
        self._ids = itertools.count(1)
        argv = [PROGRAM, *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    async def __aenter__(self) -> Chromium:
        port_file = self._folder / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (port_file.exists() and port_file.read_text().count("\n")):
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            (at,) = [one["webSocketDebuggerUrl"] for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(at, max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self.do(f"{domain}.enable")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self._session.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a debugging protocol command and return its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(60):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.said.append(str(message["params"]))

    async def open(self, url: str) -> None:
        await self.do("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Evaluate a JavaScript expression on the page and return its value."""
        result = await self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return result["result"].get("value")

    async def wait_for(self, script: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression on the page is true."""
        async with asyncio.timeout(seconds):
            while not await self.value(script):
                await asyncio.sleep(0.1)

    async def press(self, key: str) -> None:
        """Type a character."""
        await self.do("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.do("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self) -> bytes:
        return base64.b64decode((await self.do("Page.captureScreenshot", format="png"))["data"])
