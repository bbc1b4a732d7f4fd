"""Serves browser sessions: only on this machine, only to clients with the token, and only a few at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from sae_tui.hosts.link import Allowance
from sae_tui.web.look import AppProcess
from sae_tui.web.page import Asset, page, read_assets
from trainer.contract.errors import UserError, sentence
from trainer.contract.printable import printable

LOOPBACK = "127.0.0.1"
MOST_LOOKS = 8
MOST_CONNECTIONS = 64
# The time limit for requests other than sessions. The limit is long because loading the terminal's files (1 MB) takes a
# while over a slow connection.
PATIENCE_S = 60.0
# Pasted text arrives in a single message.
LONGEST_MESSAGE = 256 << 10
# The minimum cost of a message in bytes; a moving mouse sends a hundred messages per second.
_LEAST_COST = 512
# A busy screen needs 20 kB/s.
_SCREEN_BYTES_S, _SCREEN_BURST = 1 << 20, 8 << 20
# A browser that disappears without closing the connection, for example on a sleeping laptop, is detected after 1.5
# times this interval. The interval must be long because a slow connection may queue the ping behind a lot of output.
_HEARTBEAT_S = 60.0
_MOST_CELLS = 1000  # maximum number of columns, and of lines
_MOST_COMPLAINTS = 8

_HEADERS = {
    "Server": "sae-tui",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "clipboard-read=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The terminal's script would insert its own style into the page.
# The policy blocks that style, like all inline styles; page.css contains it instead.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src {address}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Tell = Callable[[int, str], None]


async def run_server(argv: Sequence[str], port: int, tell: Tell, warn: Callable[[str], None]) -> int:
    """Serve sessions (processes running `argv`) until a signal stops the server; return 128 plus the signal number.

    Call `tell` with the port and the address once the server is reachable, and `warn` with the reason when a session
    fails.
    """
    # Do not log requests from other users, because their bytes must not reach this terminal.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL + 1)
    asyncio.get_running_loop().set_exception_handler(_Complaints(warn))
    looks, listening = Looks(argv, warn), _listen(port)
    connections = _Connections(looks.answer, access_log=None)
    runner = web.ServerRunner(connections, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        port = listening.getsockname()[1]
        looks.be_at(port)
        ended = _end_on_signals()
        await web.SockSite(runner, listening).start()
        tell(port, f"http://{LOOPBACK}:{port}{looks.base}")
        return 128 + await ended
    finally:
        await looks.close()
        await runner.cleanup()


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    # Without this option, the port could not be reused for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen()
        return listening
    except OSError as error:
        reason = f"port {port} of {LOOPBACK} cannot be opened: {error.strerror}"
        raise UserError(f"{reason}; choose another with --port") from None


def _end_on_signals() -> asyncio.Future[int]:
    """Return a future completed by a termination signal; ignored signals, as after `nohup`, remain ignored."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def take(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, take, number)
    return ended


class Looks:
    """Responds to requests with the page, its files, or a session; all other requests get the same 404 response."""

    def __init__(self, argv: Sequence[str], warn: Callable[[str], None]) -> None:
        """Read the page's files; raise `UserError` if they are not installed."""
        self._argv, self._warn = argv, warn
        self._assets: Mapping[str, Asset] = read_assets()
        self._token = secrets.token_urlsafe(32)
        self._host = ""
        self._closed = False
        self._open: set[AppProcess] = set()

    @property
    def base(self) -> str:
        """The path prefix for everything served."""
        return f"/{self._token}/"

    def be_at(self, port: int) -> None:
        """Accept only requests with this port in the Host header, as a guard against DNS rebinding.

        "localhost" is not accepted either, because in a browser it may be ::1, where another user can listen.
        """
        self._host = f"{LOOPBACK}:{port}"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        named = request.headers.getall("Host", [])
        _, token, name = (*request.path.split("/", 2), "", "")[:3]
        is_ours = secrets.compare_digest(token.encode(errors="replace"), self._token.encode())
        if self._closed or not is_ours or request.method != "GET" or named != [self._host]:
            return nothing()
        host = self._host
        if name == "look":
            return await self._answer_look(request, host)
        asset = page(host, self.base) if name == "" else self._assets.get(name)
        if asset is None:
            return nothing()
        kind, content = asset
        response = web.Response(body=content, content_type=kind, charset="utf-8", headers=_headers(host))
        response.enable_compression()
        return response

    async def close(self) -> None:
        """Close all sessions, and refuse all later requests."""
        self._closed = True
        await asyncio.gather(*(look.close() for look in self._open))

    async def _answer_look(self, request: web.BaseRequest, host: str) -> web.StreamResponse:
        browser = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=LONGEST_MESSAGE)
        from_here = request.headers.getall("Origin", []) == [f"http://{host}"]
        if not from_here or not browser.can_prepare(request):
            return nothing()
        browser.headers.update(_headers(host))
        await browser.prepare(request)
        _stay(request)
        if self._closed:
            return await _refuse(browser, "This server is shutting down.")
        if len(self._open) >= MOST_LOOKS:
            return await _refuse(
                browser, f"{MOST_LOOKS} sessions are already open; close one of them and reload this page."
            )
        try:
            look = AppProcess(self._argv, _cells(request, "width", 80), _cells(request, "height", 24))
        except OSError as error:
            return await _refuse(browser, f"The app cannot be started: {sentence(error)}.")
        self._open.add(look)
        try:
            await look.open()
            await _run_until_first([_show(look, browser), _type(look, browser)])
        finally:
            if complaint := await look.close():
                self._warn(f"a session has ended: {complaint}")
            self._open.discard(look)
            await browser.close()
        return browser


async def _refuse(browser: web.WebSocketResponse, why: str) -> web.WebSocketResponse:
    await browser.send_bytes(f"{why}\r\n".encode())
    await browser.close()
    return browser


async def _show(look: AppProcess, browser: web.WebSocketResponse) -> None:
    """Relay the app's output, no faster than the browser accepts it."""
    allowance = Allowance(_SCREEN_BYTES_S, _SCREEN_BURST)
    async for drawn in look.screens():
        await asyncio.sleep(allowance.take(len(drawn)))
        await browser.send_bytes(drawn)


async def _type(look: AppProcess, browser: web.WebSocketResponse) -> None:
    """Relay the user's input until the browser disconnects or sends an invalid message."""
    allowance = Allowance()
    async for message in browser:
        if message.type is not WSMsgType.TEXT:
            return
        await asyncio.sleep(allowance.take(max(_LEAST_COST, len(message.data))))
        packet = packet_of(message.data)
        if packet is None:
            return
        if packet:
            await look.send(*packet)


def packet_of(message: str) -> tuple[bytes, bytes] | tuple[()] | None:
    """Return the packet for a message from the page's script, () if none is needed, or None for an unknown message."""
    try:
        said = msgspec.json.decode(message.encode(errors="replace"))
    except msgspec.DecodeError:
        return None
    match said:
        case ["stdin", ""]:
            return ()  # the app would interpret it as the end of its input
        case ["stdin", str(text)]:
            return b"D", text.encode(errors="replace")
        case ["resize", {"width": int(columns), "height": int(rows)}]:
            size = {"width": min(max(1, columns), _MOST_CELLS), "height": min(max(1, rows), _MOST_CELLS)}
            return b"M", json.dumps({"type": "resize", **size}).encode()
        case ["focus" | "blur" as kind]:
            return b"M", json.dumps({"type": kind}).encode()
        case ["ping", str()]:
            return ()
    return None


def _cells(request: web.BaseRequest, name: str, usual: int) -> int:
    text = request.query.get(name, "")
    return min(max(1, int(text)), _MOST_CELLS) if text.isdecimal() and len(text) < 5 else usual


async def _run_until_first(jobs: Sequence[Any]) -> None:
    """Run the coroutines until one of them returns. It is not an error if the browser or the app disconnects."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, (ConnectionError, RuntimeError)):
            raise result


def _headers(host: str) -> dict[str, str]:
    return _HEADERS | {"Content-Security-Policy": _POLICY.format(address=f"ws://{host}")}


def nothing() -> web.Response:
    """Return the 404 response, for unknown paths and for clients without access."""
    policy = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"}
    response = web.Response(status=404, text="404: Not Found", headers=_HEADERS | policy)
    response.force_close()
    return response


# The following classes limit connections in aiohttp.


class _Connections(web.Server):
    """Limits the number of connections, and closes all connections except sessions after a time limit."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)


class _Connection(web.RequestHandler):
    """Closes the connection after a time limit, and responds to invalid HTTP with the same 404 response."""

    __slots__ = ("_hanging_up",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._hanging_up: asyncio.TimerHandle | None = None
        assert self._manager is not None  # it is None only once the connection is lost
        if len(self._manager.connections) >= MOST_CONNECTIONS:
            # Refuse the connection before aiohttp starts a task for it, which would fail as soon as the connection is
            # closed.
            transport.abort()  # type: ignore[attr-defined]
            return
        super().connection_made(transport)
        self._hanging_up = asyncio.get_running_loop().call_later(PATIENCE_S, self._hang_up)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._hanging_up is None:
            return
        self._hanging_up.cancel()
        super().connection_lost(exc)

    def stay(self) -> None:
        """Remove the time limit for this connection."""
        if self._hanging_up:
            self._hanging_up.cancel()

    def handle_error(self, *_: object, **__: object) -> web.StreamResponse:
        return nothing()

    def _hang_up(self) -> None:
        self.force_close()


class _Complaints:
    """Reports each of asyncio's error messages once, except connection errors.

    Repeated messages would let another user fill the server's terminal or log.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._passed_on: set[str] = set()

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        of_connection = context.keys() & {"socket", "transport", "protocol"} or isinstance(error, OSError)
        said = sentence(error) if isinstance(error, Exception) else str(context.get("message"))
        if not of_connection and said not in self._passed_on and len(self._passed_on) < _MOST_COMPLAINTS:
            self._passed_on.add(said)
            self._warn(f"an error in the server: {printable(said)}")


def _stay(request: web.BaseRequest) -> None:
    assert isinstance(request.protocol, _Connection)
    request.protocol.stay()
