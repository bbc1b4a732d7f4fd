"""Tests for keys as people press them, in a real pseudo-terminal: quickly, twice, and in unexpected orders."""

from __future__ import annotations

import signal
import sys
import termios
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support.box import CTRL_L, ESC, Box, wait_for_store
from support.combinations import slow_except
from support.driver import environment
from support.terminal import Terminal

from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

CTRL_Z = "\x1a"


@pytest.mark.parametrize("opened", slow_except([["y", ESC, "n"]], [["n"], ["y"], ["y", ESC, "n"]]))
def test_cloning_right_after_leaving_the_form_opens_the_clone(box: Box, opened: list[str]) -> None:
    box.record_job("first", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("first")
    terminal.press(*opened, ESC, "y", gap_s=0.5)
    terminal.wait_for("clone of job 1")


@pytest.mark.slow
def test_a_screen_can_be_reopened_as_fast_as_keys_are_typed(box: Box) -> None:
    box.record_job("first", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("first")
    terminal.send("d" * 4)
    for _ in range(3):
        terminal.press(ESC, "d", gap_s=0.05)
    terminal.wait_for("Refresh")
    terminal.press(ESC, gap_s=0.3)
    terminal.press("\r", "l", ESC, "l", ESC, "l", gap_s=0.05)
    terminal.wait_for("log of rank 0")
    assert terminal.process.poll() is None


@pytest.mark.parametrize("gap_s", slow_except([0.0], [0.0, 0.3]))
def test_on_an_empty_screen_two_keys_launch_a_first_job(box: Box, gap_s: float) -> None:
    terminal = box.app(80, 24, "--gpu-source", "none", shows="Train    n, then ctrl+l")
    terminal.press("n", CTRL_L, gap_s=gap_s)
    terminal.wait_for(lambda text: ("quick" in text and "1 waiting" in text) or "1 running" in text, 60)
    job = wait_for_first_job(DataDir(box.folder / "data"))
    assert (job.name, job.device, job.world_size) == ("quick", "cpu", 1)


def wait_for_first_job(data: DataDir) -> Job:
    wait_for_store(data, lambda control: bool(control.jobs()))
    with closing(Control(data.control_db, readonly=True)) as control:
        return control.jobs()[0]


def test_keys_in_one_packet_are_handled_in_order(box: Box) -> None:
    box.record_job("quick", JobState.FINISHED)
    box.record_job("other", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("other")
    terminal.send("/quick\r")
    terminal.wait_for("/quick")
    terminal.wait_for("1 of 2")
    terminal.send("Rrenamed\x15slow\r")
    terminal.wait_for("slow")
    terminal.press(ESC)
    terminal.wait_for("other")


CTRL_E, CTRL_R, F1, DOWN = "\x05", "\x12", "\x1bOP", "\x1b[B"


def editor(box: Box, *lines: str) -> str:
    """Write a shell script with these lines to use as an editor; return its path."""
    path = box.folder / "editor"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("command", slow_except(["false"], ["false", "no-such-editor"]))
def test_the_app_takes_back_the_terminal_if_the_editor_fails(box: Box, command: str) -> None:
    terminal = box.app(80, 24, EDITOR=command, VISUAL="")
    terminal.press("n")
    terminal.wait_for("3 GPUs, ")
    before = terminal.mode
    terminal.press(CTRL_E)
    terminal.wait_for(lambda text: command in text and "Launch" in text)
    assert terminal.mode == before
    terminal.press(ESC, gap_s=0.5)
    terminal.send("q")
    assert terminal.wait_for_exit() == 0


def test_keys_still_work_after_a_paste_whose_end_is_split(box: Box) -> None:
    terminal = box.app(80, 24)
    terminal.send("\x1b[200~some text\x1b[20")
    terminal.read(0.4)  # longer than Textual waits for the rest of a sequence
    terminal.send("1~")
    terminal.press("?")
    terminal.wait_for("GPUs above")


def test_ctrl_s_typed_while_the_editor_opens_does_not_block_the_app(box: Box) -> None:
    terminal = box.app(80, 24, EDITOR=editor(box, "sleep 0.5"), VISUAL="")
    terminal.press("n")
    terminal.wait_for("3 GPUs, ")
    terminal.send(CTRL_E)
    deadline = time.monotonic() + 30
    while not terminal.mode[3] & termios.ECHO:
        assert time.monotonic() < deadline
        terminal.read(0)
    terminal.send("\x13")
    shown = len(terminal.raw)
    terminal.wait_for(lambda _: b"Launch" in terminal.raw[shown:])


def test_ctrl_z_in_an_editor_does_not_stop_an_app_without_a_shell(box: Box) -> None:
    opened, done = box.folder / "opened", box.folder / "done"
    script = editor(box, f"touch {opened}", f"until [ -e {done} ]; do sleep 0.05; done")
    terminal = box.app(80, 24, EDITOR=script, VISUAL="", controlling=True)
    terminal.press("n")
    terminal.wait_for("3 GPUs, ")
    terminal.send(CTRL_E)
    while not opened.exists():
        terminal.read(0.05)
    terminal.press("\x1a")
    done.touch()
    shown = len(terminal.raw)
    terminal.wait_for(lambda _: b"Launch" in terminal.raw[shown:])


def test_the_editor_reopens_with_the_errors_until_the_job_is_valid(box: Box) -> None:
    copy = box.folder / "seen.toml"
    script = editor(
        box,
        f'if [ -e {copy} ]; then cp "$1" {copy}; sed -i "s/\\"banana\\"/24/" "$1";',
        f'else touch {copy}; sed -i "s/^k = .*/k = \\"banana\\"/; s/^name = .*/name = \\"by hand\\"/" "$1"; fi',
    )
    terminal = box.app(80, 24, EDITOR=script, VISUAL="")
    terminal.press("n")
    terminal.wait_for("3 GPUs, ")
    terminal.press(CTRL_E)
    terminal.wait_for("by hand")
    terminal.wait_for("2 changed")
    assert copy.read_text().startswith("# ✗ sae.k: must be an integer of at least 1 (latents), not")
    assert "banana" in copy.read_text()


def test_a_draft_is_discarded_only_after_confirmation_and_ctrl_r_resets_it(box: Box) -> None:
    terminal = box.app(80, 24)
    terminal.press("n")
    terminal.wait_for("3 GPUs, ")
    terminal.send("\x1bOR" + "\x7f" * 5 + "other")
    terminal.wait_for("1 changed · ctrl+r resets")
    terminal.wait_for("F1 Help")
    terminal.press("\x1b[A", "\r", "\r")
    terminal.wait_for("Replace your 1 changed setting with preset quick?")
    terminal.send("n")
    terminal.wait_for(lambda text: "Replace your" not in text and "other" in text)
    terminal.send(ESC)
    terminal.wait_for("n, then ctrl+l")
    terminal.send("n")
    terminal.wait_for("Draft kept: 1 setting changed")
    terminal.send(CTRL_R + "y")
    terminal.wait_for(lambda text: "changed · " not in text and "other" not in text)


def test_text_pasted_onto_the_dashboard_does_nothing(box: Box) -> None:
    job = box.record_job("first", JobState.QUEUED)
    terminal = box.app(80, 24)
    terminal.wait_for("first")
    terminal.send("hello world")
    terminal.wait_for("Pasted text is ignored here")
    terminal.press("V", gap_s=0.5)
    assert not box.shell("job", str(job))["held"]
    assert terminal.process.poll() is None


def test_text_typed_in_the_editor_is_kept_and_a_form_with_errors_can_be_edited(box: Box) -> None:
    copy = box.folder / "seen.toml"
    script = editor(box, f'cp "$1" {copy}', 'grep -q mended "$1" && exit 1', 'sed -i "s/many/mended/" "$1"')
    terminal = box.app(120, 40, EDITOR=script, VISUAL="", TMPDIR=str(box.folder))
    terminal.press("n")
    terminal.wait_for("3 GPUs, ")
    terminal.send("\x1bOR" + DOWN * 4 + "\x15many")
    terminal.wait_for('not "many"')
    terminal.send("\x1bOQ" + CTRL_E)
    terminal.wait_for("your text is in")
    assert copy.read_text().startswith('# ✗ sae.k: must be an integer of at least 1 (latents), not "mended"')
    (file,) = box.folder.glob("sae-tui-job-*.toml")
    assert 'k = "mended"' in file.read_text()
    assert "many" in terminal.text


def gives_the_terminal_away(terminal: Terminal) -> bool:
    return bool(terminal.mode[3] & termios.ISIG)


def times_open(box: Box) -> int:
    """Return how many times the only program that uses the fake library has NVML open, or -1 if the file is empty."""
    (file,) = box.folder.glob("open.*")
    return int(file.read_text() or -1)


def test_ctrl_z_closes_the_driver_even_in_an_editor_and_fg_reopens_it(box: Box, drivers: Path) -> None:
    env = environment(drivers, GPUS=2, PIDS="", OPEN=box.folder / "open")
    env |= {"EDITOR": editor(box, "echo an editor", "read line"), "VISUAL": ""}
    shell = Terminal(["bash", "--norc", "-i"], columns=80, rows=24, env=box.env | env, controlling=True)
    box.terminals.append(shell)
    shell.send(f"PS1='$ '; {sys.executable} -m sae_tui --gpu-source nvml\n")
    shell.wait_for("2 GPUs · 0 running", 60)
    for _ in range(2):
        shell.wait_for(lambda _: times_open(box) == 1)
        shell.send(CTRL_Z)
        (file,) = box.folder.glob("open.*")
        app = psutil.Process(int(file.suffix[1:]))
        shell.wait_for(lambda _, app=app: app.status() == psutil.STATUS_STOPPED)
        assert times_open(box) == 0
        shell.send("fg\n")
    shell.wait_for(lambda text: times_open(box) == 1 and "no response yet" not in text and "2 GPUs · 0 running" in text)
    shell.press("n")
    shell.wait_for("[x] any 1")
    shell.send(CTRL_E)
    shell.wait_for("an editor")
    for _ in range(2):
        shell.wait_for(lambda _: times_open(box) == 1)
        shell.send(CTRL_Z)
        shell.wait_for(lambda _: app.status() == psutil.STATUS_STOPPED)
        assert times_open(box) == 0
        shell.send("fg\n")
    shell.wait_for(lambda _: times_open(box) == 1)
    shell.send("\n")
    shell.wait_for("Launch")
    shell.press(ESC, gap_s=0.5)
    shell.send("q")
    app.wait(20)


def test_ctrl_z_is_rejected_if_no_shell_could_continue_the_app(box: Box) -> None:
    terminal = box.app(80, 24, controlling=True)
    terminal.send(CTRL_Z)
    terminal.wait_for("Not suspended: no shell here")


def test_a_stopped_app_releases_the_terminal_and_takes_it_back_later(box: Box) -> None:
    terminal = box.app(80, 24, controlling=True)
    for number in (signal.SIGTSTP, signal.SIGSTOP, signal.SIGTSTP):
        terminal.process.send_signal(number)
        terminal.wait_for(lambda _: psutil.Process(terminal.process.pid).status() == psutil.STATUS_STOPPED)
        assert gives_the_terminal_away(terminal) == (number == signal.SIGTSTP)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for(lambda _: not gives_the_terminal_away(terminal))
        terminal.press("?", gap_s=0.5)
        terminal.wait_for("esc Close")
        terminal.press(ESC, gap_s=0.5)
        terminal.wait_for(lambda text: "esc Close" not in text and "New job" in text)
        terminal.send("/quick")
        terminal.wait_for("/quick")
        terminal.press(ESC, gap_s=0.5)
