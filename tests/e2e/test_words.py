"""Tests for what the app says about jobs: their states, the reasons why they wait, and the app's questions."""

from __future__ import annotations

import re

import pytest
from support.box import ENTER, ESC, Box

from trainer.contract.process import ProcessRef
from trainer.contract.store.states import JobState


def in_line(box: Box, name: str, **fields: object) -> int:
    """Record a queued job whose supervisor appears to be alive."""
    me = ProcessRef.current()
    alive = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    return box.record_job(name, JobState.QUEUED, **alive, **fields)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_holds_dependencies_and_names_can_be_changed_and_are_shown_correctly(box: Box) -> None:
    first, second = in_line(box, "first", held=True), in_line(box, "second")
    terminal = box.app(120, 40)
    terminal.wait_for("◌ queued")

    # The cursor is on the most recent job.
    terminal.press("A")
    terminal.wait_for("Job 2 waits until these have finished")
    terminal.press("1", ENTER)
    terminal.wait_for("Job 2 comes after job 1.")
    terminal.press("h")
    terminal.wait_for("‖ held     until released; comes after job 1")
    assert box.shell("job", str(second))["after"] == [first]
    terminal.press("h")
    terminal.wait_for("Job 2 is released; it comes after job 1, which")
    job = box.shell("job", str(second))
    assert (job["held"], job["after"]) == (False, [first])

    terminal.press("s")
    terminal.wait_for("Cancel job 2 (second)? It has not started, so nothing is")
    terminal.press("n", "\x1b[B", "A")
    terminal.wait_for("Job 1 waits until these have finished")
    terminal.press("2", ENTER)
    terminal.wait_for("Job 1 cannot come after job 2: job 2 comes")

    terminal.press("R")
    terminal.wait_for("Name of job 1")
    terminal.press("\x15", *"renamed", ENTER)
    terminal.wait_for('Job 1 is now called "renamed".')
    terminal.press("y")
    text = terminal.wait_for("clone of job 1 (renamed)")
    assert "clone of job 1 (first)" not in text
    terminal.press(ESC)
    terminal.wait_for("Resume")
    terminal.press("\x03")
    terminal.wait_for("Press q to quit; jobs keep running.")
    terminal.send("q")
    assert terminal.wait_for_exit() == 0
    left = terminal.wait_for("`sae-tui --demo` shows them again")
    assert "1 job is queued and 1 is held or paused; " in left


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_paused_job_is_shown_as_paused_everywhere_and_resumes_from_its_step(box: Box) -> None:
    terminal = box.app(120, 40)
    box.launch_by_keys(terminal, steps=100_000)
    terminal.wait_for('Job 1 "e2e" started on GPU 0,1. It keeps running', 60)
    # The log in the preview shows the step.
    terminal.wait_for(re.compile(r"step [1-9]\d+/100000").search, 90)
    terminal.press("p")
    terminal.wait_for(re.compile(r"‖ paused +at step \d+, until resumed").search, 60)
    saved = box.shell("job", "1")["step"]
    terminal.press(ENTER)
    terminal.wait_for(
        lambda text: "JOB NAME" not in text and "‖ paused" in text and f"at step {saved}, until resumed" in text
    )
    assert "stopped" not in terminal.text.splitlines()[2]
    terminal.press(ESC)
    terminal.wait_for("JOB NAME")

    seen: list[int] = []

    def runs_again(text: str) -> bool:
        seen.extend(map(int, re.findall(r"step (\d+)/100000", text)))
        return "▶ running" in text and max(seen, default=0) > saved

    terminal.press("g")
    terminal.wait_for(f"Job 1 resumes from step {saved} as soon as it")
    terminal.wait_for(runs_again, 90)
    assert 0 not in seen
    terminal.send("q")
    assert terminal.wait_for_exit() == 0
    # The emulator does not support the alternate screen, so the line may wrap.
    terminal.wait_for(lambda text: "1jobkeepsrunning;`sae-tui--demo`showsitagain" in "".join(text.split()))
