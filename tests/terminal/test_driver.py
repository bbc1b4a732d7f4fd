"""Tests who handles ctrl+z: the app while it has the terminal, the kernel before and after."""

from __future__ import annotations

import subprocess
import sys

APP_WITHOUT_TERMINAL = """
import asyncio, os, signal
from textual.app import App
from sae_tui.terminal.driver import TerminalDriver

async def main():
    TerminalDriver(App())
    for number in (signal.SIGTSTP, signal.SIGCONT):
        os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL
    print("goes on")

asyncio.run(main())
"""


def test_an_app_that_has_released_its_terminal_ignores_ctrl_z() -> None:
    command = [sys.executable, "-c", APP_WITHOUT_TERMINAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
