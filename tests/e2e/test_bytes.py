"""Tests that stray input bytes and library output do not corrupt the screen, and that crashes are reported."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from support import spoilt_app
from support.box import Box
from support.terminal import Terminal


@pytest.fixture
def terminal(box: Box) -> Terminal:
    started = Terminal([sys.executable, str(Path(spoilt_app.__file__)), "--demo"], columns=160, rows=40, env=box.env)
    box.terminals.append(started)
    return started


@pytest.mark.timeout(120)
def test_stray_bytes_and_output_do_not_corrupt_the_screen_and_a_crash_exits_with_1(
    box: Box, terminal: Terminal
) -> None:
    before = terminal.mode
    terminal.wait_for("RTX 3080", 60)
    terminal.press("\x1b[M")  # an incomplete mouse report
    for data in (
        b"\xff",
        b"\x1b[M\x20\xc8\x2a",
        b"\x1b[<35;9999;9999M",
        b"\x1b]11;rgb:ffff/qqqq/ffff\x1b\\",
        b"\x1b[?62;4q",
    ):
        terminal.send(data)
        terminal.read(0.2)
    terminal.press("/")
    terminal.press(*["\x1b[200~caf", "\x1b[201~"])
    terminal.send(b"\x1b[200~\xe9\x1b[201~")
    terminal.wait_for("caf\ufffd")

    terminal.process.send_signal(signal.SIGUSR1)
    log = box.data.app_log
    while spoilt_app.COMPLAINT not in log.read_bytes():
        terminal.read(0.05)
    assert "libfake" not in terminal.text
    assert log.stat().st_mode & 0o777 == 0o600

    terminal.press(spoilt_app.FAILING_KEY)
    assert terminal.wait_for_exit() == 1
    terminal.read_until_quiet(0.2, 5)
    assert terminal.mode == before
    after = bytes(terminal.raw).rpartition(b"\x1b[?1049l")[2].decode()
    assert re.search(r"RuntimeError: \S*unforeseen", after)
