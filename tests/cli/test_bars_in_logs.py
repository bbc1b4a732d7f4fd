"""Tests that `sae-tui logs -f` updates a progress bar in place on a terminal, and prints its last state elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.terminal import Terminal

# Redraws a bar until the file `go` exists.
BARS = (
    "import os, sys, time\n"
    "n = 0\n"
    "print('begins \\x1b[2J', flush=True)\n"
    "while not os.path.exists('go'):\n"
    "    n += 1\n"
    "    sys.stdout.write(f'\\rbar {n}|'); sys.stdout.flush(); time.sleep(0.05)\n"
    "sys.stdout.write('\\rbar all|\\nends\\nno line end')\n"
)


@pytest.mark.timeout(120)
def test_a_bar_is_updated_in_place_on_a_terminal_and_printed_once_elsewhere(shell, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    shell.run("run", "--gpus", "0", "--folder", work, "--", sys.executable, "-c", BARS)
    follow = shell.argv("logs", 1, "-f")
    with subprocess.Popen(follow, stdout=subprocess.PIPE, env=shell.env, text=True) as other:
        terminal = Terminal(follow, columns=60, rows=10, env=shell.env)
        try:
            terminal.wait_for("bar ")
            assert sum(line.startswith("bar ") for line in terminal.screen.display) == 1
            (work / "go").touch()
            terminal.wait_for("no line end")
        finally:
            terminal.close()
        shown = [line.rstrip() for line in terminal.screen.display if line.strip()]
        assert shown == ["begins �[2J", "bar all|", "ends", "no line end"]
        assert other.communicate(timeout=60)[0].splitlines() == shown
