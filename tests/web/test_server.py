"""Tests for the server's access checks, and for its limits on sessions, connections and traffic."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from support.browser import Served, wait_until

from sae_tui.web.server import LONGEST_MESSAGE, MOST_CONNECTIONS, MOST_LOOKS, Looks, packet_of

STAYS = "os.write(1, packet(b'D', b'here'))\nwhile os.read(0, 65536): pass"
ServeFake = Callable[[str], Served]


def listening(port: int) -> list[str]:
    """Return the addresses on which a process listens at this port, in the kernel's format."""
    tables = [file.read_text().splitlines()[1:] for file in Path("/proc/net").glob("tcp*")]
    sockets = [line.split() for table in tables for line in table]
    return [one[1] for one in sockets if one[3] == "0A" and one[1].endswith(f":{port:04X}")]


def test_requests_with_a_wrong_token_host_or_method_all_get_the_same_404(serve_fake: ServeFake) -> None:
    served = serve_fake(STAYS)
    assert len(served.base) > 256 // 6 + 2
    here, base = f"127.0.0.1:{served.port}", served.base
    status, headers, content = served.ask(base, host=here)
    assert (status, headers["Server"]) == (200, "sae-tui")
    assert f'"ws://{here}{base}look"'.encode() in content
    assert f"connect-src ws://{here};" in headers["Content-Security-Policy"]
    status, said, content = served.ask("/", host=here)
    assert (status, said["Server"], content) == (404, "sae-tui", b"404: Not Found")
    wrong = f"{base[:-2]}{'A' if base[-2] != 'A' else 'B'}/"
    others = [served.ask(path, host=here) for path in (wrong, base[:-1] + "x/", "/favicon.ico", base + "x", "//")]
    others += [
        served.ask(base, host=host)
        for host in ("127.0.0.1", f"localhost:{served.port}", "evil.example", f"evil:{served.port}", "")
    ]
    others += [served.ask(base, host=here, method=method) for method in ("POST", "OPTIONS", "PUT")]
    others += [served.ask(base + "look", host=here)]
    assert [(status, content) for status, _, content in others] == [(404, b"404: Not Found")] * len(others)
    assert [headers.keys() - {"Date"} for _, headers, _ in others] == [said.keys() - {"Date"}] * len(others)
    assert listening(served.port) == [f"0100007F:{served.port:04X}"]


def test_invalid_http_gets_an_answer_that_does_not_name_the_server_software(serve_fake: ServeFake) -> None:
    served = serve_fake(STAYS)
    for garbage in (b"\x16\x03\x01 not http\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nX: " + b"x" * 70000):
        with socket.create_connection(("127.0.0.1", served.port), 20) as other_user:
            other_user.sendall(garbage)
            answer = b"".join(iter(lambda: other_user.recv(65536), b""))
        assert answer.split(b" ", 2)[1] == b"404"
        assert b"aiohttp" not in answer
        assert b"not http" not in answer
    assert served.end() == 143
    assert served.process.stderr.read() == ""


def test_the_page_loads_nothing_from_other_sites(serve_fake: ServeFake) -> None:
    served = serve_fake(STAYS)
    _, headers, content = served.ask(served.base, host=f"127.0.0.1:{served.port}")
    references = re.findall(r'(?:href|src)="([^"]+)"', content.decode())
    assert len(references) == 5
    assert all(one.startswith(served.base) for one in references)
    for one in references:
        status, of_one, _ = served.ask(one, host=f"127.0.0.1:{served.port}")
        assert (status, of_one["Cache-Control"]) == (200, "no-store")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")
    assert "Set-Cookie" not in headers


async def test_a_page_from_another_origin_gets_no_session(serve_fake: ServeFake) -> None:
    served = serve_fake(STAYS)
    here = f"http://127.0.0.1:{served.port}"
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"origin": f"http://localhost:{served.port}"},
                    {"host": "evil.example", "origin": here}):  # fmt: skip
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with served.look(**headers):
                pass
        assert refused.value.status == 404
    async with served.look() as look:
        await look.wait_for("here")


async def test_only_a_few_sessions_can_be_open_at_a_time_and_any_further_one_gets_a_message(
    serve_fake: ServeFake,
) -> None:
    served = serve_fake(STAYS)
    async with AsyncExitStack() as stack:
        looks = [await stack.enter_async_context(served.look()) for _ in range(MOST_LOOKS)]
        for look in looks:
            await look.wait_for("here")
        async with served.look() as late:
            await late.wait_for(f"{MOST_LOOKS} sessions are already open")
            await late.wait_until_closed()
        assert len(served.below) == MOST_LOOKS
        await looks[0].socket.close()
        await wait_until(lambda: len(served.below) < MOST_LOOKS)
        async with served.look() as later:
            await later.wait_for("here")


def test_excess_connections_are_dropped_silently(serve_fake: ServeFake) -> None:
    served = serve_fake(STAYS)
    requests = (
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 9000,
    )
    for n in range(30):
        with ExitStack() as stack:
            for _ in range(120):
                other_user = stack.enter_context(socket.socket())
                with suppress(OSError):
                    other_user.connect(("127.0.0.1", served.port))
                    other_user.sendall(requests[n % len(requests)])
                    if n % 2:  # close every second connection with a reset
                        other_user.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # The server may still be counting earlier connections, so it may drop any of the new ones.
    with ExitStack() as stack:
        address = ("127.0.0.1", served.port)
        held = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(MOST_CONNECTIONS + 1)]
        dropped, _, _ = select.select(held, [], [], 20)
        assert dropped
        with suppress(ConnectionResetError):
            assert dropped[0].recv(1) == b""
    while True:
        with suppress(ConnectionError):
            assert served.ask("/")[0] == 404
            break
    assert served.end() == 143
    assert served.process.stderr.read() == ""


async def test_a_closed_server_refuses_all_requests() -> None:
    looks = Looks([sys.executable, "-c", "raise SystemExit"], lambda line: None)
    runner = web.ServerRunner(web.Server(looks.answer))
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    try:
        await web.SockSite(runner, listening).start()
        port = listening.getsockname()[1]
        looks.be_at(port)
        async with aiohttp.ClientSession() as session:
            address = f"http://127.0.0.1:{port}{looks.base}"
            assert (await session.get(address)).status == 200
            await looks.close()
            for headers in ({}, {"Host": ""}):
                assert (await session.get(address, headers=headers)).status == 404
    finally:
        await runner.cleanup()


async def test_a_client_that_sends_too_much_or_invalid_messages_is_disconnected(serve_fake: ServeFake) -> None:
    served = serve_fake(STAYS)
    too_long = json.dumps(["stdin", "x" * LONGEST_MESSAGE])
    for words in (too_long, "[", '["stdin", 5]', '["resize", {"width": "x", "height": 2}]', '["open_url", "x"]'):
        async with served.look() as look:
            await look.wait_for("here")
            await look.socket.send_str(words)
            await look.wait_until_closed()
            await wait_until(lambda: not served.below)


def test_window_sizes_are_bounded_and_a_non_ascii_character_is_sent_as_utf_8() -> None:
    assert packet_of('["stdin", "\\u00e9"]') == (b"D", b"\xc3\xa9")
    kind, resize = packet_of('["resize", {"width": 99999999, "height": -4}]') or (b"", b"")
    assert (kind, json.loads(resize)) == (b"M", {"type": "resize", "width": 1000, "height": 1})
    assert packet_of('["ping", "1"]') == ()
    assert packet_of('["stdin", ""]') == ()
    assert packet_of('["deliver_chunk_request", {}]') is None


async def test_the_output_from_a_flooding_app_is_rate_limited(serve_fake: ServeFake) -> None:
    served = serve_fake("while True: os.write(1, packet(b'D', bytes(1 << 20)))")
    async with served.look() as look:
        before = asyncio.get_running_loop().time()
        n_bytes = 0
        while n_bytes < 10 << 20:
            n_bytes += len((await look.socket.receive()).data)
        # The server sends at most 8 MiB in a burst, and then 1 MiB per second.
        assert asyncio.get_running_loop().time() - before > 1


async def test_the_server_reports_why_an_app_could_not_start(serve_fake: ServeFake) -> None:
    served = serve_fake("sys.exit('no \\x1b[31msuch thing')")
    async with served.look() as look:
        await look.wait_until_closed()
    assert served.process.stderr.readline() == "sae-tui: a session has ended: no �[31msuch thing\n"
