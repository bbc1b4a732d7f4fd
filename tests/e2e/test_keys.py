"""Keys as people press them, in a real pseudo-terminal: quickly, twice, and in another order than was thought of."""

from __future__ import annotations

import pytest
from support.box import ESC, Box

from trainer.contract.states import JobState


@pytest.mark.parametrize("opened", [["n"], ["y"], ["y", ESC, "n"]])
def test_escape_from_the_form_and_then_a_clone_opens_the_clone(box: Box, opened: list[str]) -> None:
    box.record_job("first", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("first")
    terminal.press(*opened, ESC, "y", gap_s=0.5)
    terminal.wait_for("clone of job 1")


def test_a_screen_is_opened_again_as_fast_as_keys_come(box: Box) -> None:
    box.record_job("first", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("first")
    terminal.send("d" * 4)
    for _ in range(3):
        terminal.press(ESC, "d", gap_s=0.05)
    terminal.wait_for("Look again")
    terminal.press(ESC, gap_s=0.3)
    terminal.press("\r", "l", ESC, "l", ESC, "l", gap_s=0.05)
    terminal.wait_for("log of rank 0")
    assert terminal.process.poll() is None


def test_keys_that_arrive_in_one_packet_are_taken_in_their_order(box: Box) -> None:
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
