"""Tests for `sae-tui export-metrics` over a real socket."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from sae_tui.cli_commands.exporting import MOST_AT_ONCE
from sae_tui.gpu.simulated import uuid_of

LAST = "sae_tui_jobs_readable"


@pytest.fixture
def server(shell) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = shell.start("export-metrics", "--port", "0")
    address = process.stdout.readline()
    match = re.match(r"http://127\.0\.0\.1:(\d+)/metrics ", address)
    assert match, address
    yield process, int(match[1])
    process.kill()


def ask(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={name.capitalize(): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers["Content-Type"]


def listening(port: int) -> list[str]:
    """Return the addresses on which a process listens at this port, in the kernel's format."""
    tables = [file.read_text().splitlines()[1:] for file in Path("/proc/net").glob("tcp*")]
    sockets = [line.split() for table in tables for line in table]
    return [one[1] for one in sockets if one[3] == "0A" and one[1].endswith(f":{port:04X}")]


def test_metrics_are_served_only_on_loopback_and_only_for_local_host_names(server, shell):
    process, port = server
    for host in ("127.0.0.1", "localhost", f"localhost:{port}", f"127.0.0.1:{port}"):
        status, text, kind = ask(port, host=host)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert f"\n{LAST} 1.0\n" in text
    assert [ask(port, host=host)[0] for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil:80", "")] == [
        403, 403, 403, 403
    ]  # fmt: skip
    assert [ask(port, path)[0] for path in ("/", "/metrics/", "/metrics?a=1", "/../metrics")] == [404] * 4
    assert ask(port, method="POST")[0] == 501
    with socket.socket() as mute:
        # A silent client does not delay others.
        mute.connect(("127.0.0.1", port))
        assert ask(port)[0] == 200
    assert listening(port) == [f"0100007F:{port:04X}"]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert "Traceback" not in process.stderr.read()


def test_excess_clients_are_disconnected_and_an_aborted_request_logs_no_error(server):
    process, port = server
    with ExitStack() as stack:
        mutes = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(MOST_AT_ONCE + 9)
        ]
        assert mutes[-1].recv(1) == b""
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), 20) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    deadline = time.monotonic() + 20
    while True:
        with suppress(OSError, http.client.HTTPException):
            assert ask(port)[0] == 200
            break
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    process.wait(20)
    assert "Traceback" not in process.stderr.read()


def test_the_once_option_prints_the_metrics(shell):
    text = shell.run("export-metrics", "--once").stdout
    assert f'uuid="{uuid_of(0)}"' in text
    assert text.endswith(f"{LAST} 1.0\n")


def test_without_prometheus_client_the_error_names_the_install_command(shell, tmp_path):
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError('No module named prometheus_client')")
    env = shell.env | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(shell.argv("export-metrics", "--once"), env=env, capture_output=True, text=True)
    assert done.returncode == 1
    needs = "export-metrics needs the package prometheus-client; run `pip install 'sae-tui[prometheus]'`"
    assert done.stderr.splitlines() == [f"sae-tui: error: {needs}"]


def test_a_port_in_use_is_reported_in_one_line(shell):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = shell.run("export-metrics", "--port", port, code=1).stderr
    assert f"port {port} of 127.0.0.1 is not available: Address already in use; choose another with --port" in said
