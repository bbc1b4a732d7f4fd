"""Tests for the output of `sae-tui serve`; its pages are tested in tests/web."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path


def test_serve_prints_its_address_the_ssh_command_and_that_it_is_read_only(shell) -> None:
    process = shell.start("serve")
    lines = [process.stdout.readline().rstrip() for _ in range(5)]
    address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/[\w-]{43}/", lines[0])
    assert address, lines
    assert "cannot change anything (--write allows it)" in lines[1]
    assert re.fullmatch(rf"  ssh -L {address[1]}:127\.0\.0\.1:{address[1]} \S+@{socket.gethostname()}", lines[3])
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert process.stderr.read() == ""


def test_a_port_in_use_is_reported_in_one_line(shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = shell.errors("serve", "--port", port, code=1)
    assert line == (
        f"sae-tui: error: port {port} of 127.0.0.1 cannot be opened: Address already in use; choose another with --port"
    )


def test_without_the_web_extra_serve_names_the_command_that_installs_it(shell, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "aiohttp.py").write_text("raise ModuleNotFoundError('no aiohttp')")
    (line,) = shell.errors("serve", code=1, PYTHONPATH=str(tmp_path / "without"))
    assert line == "sae-tui: error: serve needs a terminal for browsers: pip install 'sae-tui[web]'"


def test_a_host_option_and_an_invalid_port_are_rejected(shell) -> None:
    assert "--host" in shell.errors("serve", "--host", "0.0.0.0", code=2)[0]
    assert shell.errors("serve", "--port", "http", code=2)[0].startswith(
        "sae-tui: error: --port: must be a port from 0"
    )
