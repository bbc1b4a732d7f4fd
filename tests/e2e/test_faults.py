"""Tests that the app starts and quits despite failures of drivers, disks, stores and terminals."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.hangs import Hangs
from support.combinations import slow_except
from support.terminal import Terminal

from trainer.contract.exits import Exit
from trainer.contract.process import state_of


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def run(*arguments: str, controlling: bool = False, **environment: str) -> Terminal:
        argv = [sys.executable, "-m", "sae_tui", "--data-dir", str(tmp_path / "data"), *arguments]
        terminals.append(Terminal(argv, env=dict(os.environ) | environment, controlling=controlling))
        return terminals[-1]

    yield run
    for terminal in terminals:
        terminal.close()


def seconds_to_quit(terminal: Terminal) -> float:
    started = time.monotonic()
    terminal.send("q")
    terminal.wait_for_exit()
    return time.monotonic() - started


def test_a_missing_driver_is_reported_with_its_consequence(start) -> None:
    terminal = start("--gpu-source", "nvml")
    text = terminal.wait_for("so jobs run on the CPU", 60)
    assert "driver" in text
    terminal.send("n")
    terminal.wait_for("1 CPU process, single")


def test_a_hanging_gpu_blocks_neither_other_gpus_nor_keys_nor_quitting(start) -> None:
    terminal = start("--gpu-source", "simulated", SAE_TUI_SIMULATED_FAULTS="1:hang")
    terminal.wait_for("mallory", 60)
    terminal.send("V")
    terminal.wait_for("GPU 3 RTX 3090")
    assert seconds_to_quit(terminal) < 2  # the guarantee is 1 s, but the machine may be busy


def test_a_hanging_data_folder_is_reported_and_blocks_neither_keys_nor_quitting(start, tmp_path) -> None:
    hangs = Hangs(tmp_path, [tmp_path / "data"])
    terminal = start("--gpu-source", "simulated", **hangs.variables)
    terminal.wait_for("mallory", 60)
    with hangs:
        terminal.wait_for("has not been stored for", 60)
        terminal.send("?")
        terminal.wait_for("GPUs above")
        terminal.send("\x1b")
        terminal.wait_for("has not been stored for")
        seconds_to_quit(terminal)


def test_the_app_exits_when_its_terminal_is_closed(start) -> None:
    terminal = start("--gpu-source", "simulated")
    terminal.wait_for("mallory", 60)
    os.close(terminal.detach())
    assert terminal.process.wait(10) == 128 + signal.SIGHUP


LEAVES = (b"\x1b[?1000l", b"\x1b[?1003l", b"\x1b[?1006l", b"\x1b[?2004l", b"\x1b[<u", b"\x1b[?1049l", b"\x1b[?25h")


def left(terminal: Terminal) -> bool:
    """Return whether the app has left the alternate screen, mouse mode and bracketed paste mode."""
    written = bytes(terminal.raw)
    after = written[written.rindex(b"\x1b[?1049h") :]
    return all(sequence in after for sequence in LEAVES)


def test_a_signal_restores_the_terminal_in_a_dialog_or_while_the_app_is_suspended(start) -> None:
    with_dialog = start("--demo")
    # The app changes the mode soon, so read the mode before anything else is started.
    before = with_dialog.mode
    stopped = start("--demo", controlling=True)
    with_dialog.wait_for("RTX 3080", 60)
    with_dialog.press("?", ",")
    with_dialog.process.send_signal(signal.SIGTERM)
    assert with_dialog.wait_for_exit() == Exit.TERMINATED
    assert left(with_dialog)
    assert with_dialog.mode == before

    stopped.wait_for("RTX 3080", 60)
    stopped.process.send_signal(signal.SIGTSTP)
    while state_of(stopped.process.pid) != "T":
        stopped.read(0.05)
    stopped.read(0.2)
    n_read = stopped.bytes_read
    for number in (signal.SIGHUP, signal.SIGCONT):
        stopped.process.send_signal(number)
    assert stopped.wait_for_exit() == Exit.HUNG_UP
    # The shell has control of the terminal again.
    assert b"\x1b[?1049h" not in bytes(stopped.raw)[n_read:]
    assert stopped.mode == before


def test_a_signal_during_the_first_screen_prints_no_traceback(start) -> None:
    terminal = start("--demo")
    before = terminal.mode
    while b"\x1b[?1049h" not in terminal.raw:
        terminal.read(0.01)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait_for_exit() == Exit.TERMINATED
    assert left(terminal)
    assert terminal.mode == before
    assert b"Traceback" not in terminal.raw


@pytest.mark.parametrize("n_keys", slow_except([10], [7, 10, 20]))
def test_a_second_signal_ends_an_app_whose_terminal_accepts_no_output(start, n_keys) -> None:
    terminal = start("--demo")
    before = terminal.mode
    terminal.wait_for("RTX 3080", 60)
    # From here on, the test does not read the output, so the terminal's buffer fills up. With few keys, the first
    # signal still reaches the app, which blocks only later, while it exits.
    for _ in range(n_keys):
        terminal.send("V?\x1b")
    for number in (signal.SIGTERM, signal.SIGINT):
        time.sleep(0.5)
        terminal.process.send_signal(number)
    assert terminal.process.wait(20) in (Exit.TERMINATED, Exit.INTERRUPTED)
    assert terminal.mode == before
    terminal.read(0.2)
    assert left(terminal)


@pytest.mark.parametrize("view", ["aggregated", "per_gpu"])
def test_a_lost_gpu_stays_in_the_list(start, view) -> None:
    terminal = start("--gpu-source", "simulated", SAE_TUI_SIMULATED_FAULTS="1:lost,2:no_power")
    terminal.wait_for("mallory", 60)
    if view == "per_gpu":
        terminal.send("V")
    terminal.wait_for("fallen off the bus")


def test_a_corrupt_store_is_reported_and_the_gpus_are_still_shown(start, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "control.db").write_bytes(b"this is no database" * 500)
    terminal = start("--gpu-source", "simulated")
    terminal.wait_for(lambda text: "corrupt" in " ".join(text.split()), 60)
    terminal.wait_for("mallory")


def test_a_store_from_a_newer_version_is_reported(start, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with sqlite3.connect(folder / "control.db") as db:
        db.execute("PRAGMA user_version = 99")
    terminal = start("--gpu-source", "simulated")
    terminal.wait_for(lambda text: "newer version" in " ".join(text.split()), 60)
    terminal.wait_for("mallory")


def test_an_invalid_setting_is_reported_by_name(start, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "settings.toml").write_text('monitor_view_default = "both"\n')
    terminal = start("--gpu-source", "simulated")
    terminal.wait_for("monitor_view_default", 60)


def test_a_data_folder_that_cannot_be_created_is_reported_without_a_traceback(start, tmp_path) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    terminal = start("--gpu-source", "simulated")
    text = terminal.wait_for("--data-dir", 60)
    assert "Traceback" not in text
    assert terminal.wait_for_exit() == 1
