"""Tests for a command's progress output: JSON for a parent process, lines in a pipe, and a bar in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time

import pytest

from trainer.contract.progress import (
    ENV_DESCRIPTOR,
    Planned,
    Progress,
    Reached,
    _ProgressLines,
    advance,
    read_reached,
    stage,
    track,
)

COMMAND = """
import time
from trainer.contract import progress
progress.LINE_EVERY_S = progress.QUIET_S = 0.2
progress.SHOW_EVERY_S = 0.05
with progress.Progress("evaluating", {"rows": progress.Planned(10.0, 2), "probes": progress.Planned(10.0)}) as shown:
    for _ in progress.track(range(4), "rows"):
        time.sleep(0.15)
    progress.stage("rows", 4)
    progress.advance(4)
    time.sleep(0.3)
print("done")
"""


def test_progress_covers_all_stages_and_the_remaining_time_follows_the_measured_pace() -> None:
    with Progress("x", {"rows": Planned(10.0, 2), "probes": Planned(10.0)}) as shown:
        assert shown.reached == Reached("", 0.0, 20.0)
        assert list(track([1, 2], "rows")) == [1, 2]
        stage("rows", 4)
        advance()
        # One of two passes is complete, and a quarter of the second pass is done.
        assert shown.reached.share == pytest.approx((5 + 1.25) / 20)
        shown._stage.began = time.monotonic() - 5
        # A quarter of a pass took 5 s, although it was estimated to take 1.25 s.
        # Therefore, the remainder of the pass takes 15 s, and the probes take 40 s.
        assert shown.reached.left_s == pytest.approx(15 + 40, rel=0.01)
        stage("something else")
        assert shown.reached.share == pytest.approx(10 / 20)


class ChangingTotal(float):
    """A number of units that starts the next stage when it is tested for truth."""

    def __bool__(self) -> bool:
        stage("writing")
        return True


def test_the_stage_may_change_while_another_thread_reads_the_progress() -> None:
    with Progress("x") as shown:
        stage("rows", ChangingTotal(4))
        assert shown.reached.share == 0
        assert shown.reached == Reached("writing")


def test_a_resumed_process_writes_one_line_for_everything_it_missed_while_suspended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = _ProgressLines("evaluating")
    for elapsed_s in (3600.0, 3600.5, 3609.9, 3610.0):
        show(Reached("rows"), elapsed_s)
    assert capsys.readouterr().err == 2 * "evaluating: rows\n"


def test_reporting_progress_is_optional_and_needs_no_plan() -> None:
    stage("rows", 4)
    advance()
    assert list(track(iter([1]), "rows")) == [1]
    with Progress("x") as shown:
        stage("rows", 4)
        advance(2)
        assert (shown.reached.stage, shown.reached.share) == ("rows", 0.5)
        stage("writing")
        assert shown.reached == Reached("writing")
    assert Reached("rows", 0.41, 180).words == "rows, 41 %, 3 min left"


def test_progress_in_a_pipe_is_printed_as_lines_on_standard_error_only() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    lines = done.stderr.splitlines()
    assert all(line.startswith("evaluating: rows, ") and line.endswith(" left") for line in lines)
    assert len(lines) >= 2


def test_a_parent_process_gets_progress_as_json_and_standard_error_stays_empty() -> None:
    reading, writing = os.pipe()
    env = os.environ | {ENV_DESCRIPTOR: str(writing)}
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, env=env, pass_fds=[writing], check=True)
    os.close(writing)
    with open(reading, "rb") as lines:
        last = [read_reached(line) for line in lines][-1]
    assert done.stderr == b""
    assert last
    assert (last.stage, last.share, last.left_s) == ("rows", 1.0, 0.0)


def test_the_share_reaches_100_percent_only_when_the_command_has_succeeded() -> None:
    planned = {"rows": Planned(10.0)}
    with Progress("x", planned) as shown:
        for _ in range(2):
            # The second run of the stage was not planned.
            assert list(track([1, 2], "rows")) == [1, 2]
            assert shown.reached.share == 0.99
        stage("writing")
        assert shown.reached.share == 0.99
    assert (shown.reached.share, shown.reached.left_s) == (1.0, 0.0)
    failed = Progress("x", planned)
    with contextlib.suppress(ValueError), failed:
        raise ValueError
    assert failed.reached.share == 0


def test_a_terminal_shows_a_progress_bar_and_removes_it_at_the_end() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    while process.poll() is None or not shown.endswith(b"\r"):
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    assert process.communicate()[0] == b"done\n"
    text = shown.decode()
    assert "evaluating |" in text
    assert "rows · 50 %" in text
    # At the end, the terminal line is blank.
    assert text.rstrip("\r").split("\r")[-1].strip() == ""


@pytest.mark.parametrize("line", [b"", b"[]", b'{"share": 2}', b'{"left_s": -1}', b'{"stage": 1}', b"\xff"])
def test_a_line_without_progress_is_ignored(line: bytes) -> None:
    assert read_reached(line) is None


def test_control_characters_in_a_stage_are_removed() -> None:
    reached = read_reached(b'{"stage": "\\u001b[31mred' + b"x" * 500 + b'"}')
    assert reached
    assert "\x1b" not in reached.stage
    assert len(reached.stage) <= 200
