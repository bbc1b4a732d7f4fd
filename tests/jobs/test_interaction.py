"""Tests for the process that reads texts and steers, with a stub in place of the trainer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support import model_stub
from support.model_screens import stubs

from sae_tui.jobs.interaction import Interaction
from trainer.contract.answers.interaction import MOST_REQUEST_BYTES, ReadText, TextRead
from trainer.contract.errors import UserError


def started(tmp_path: Path, mode: str = "plain") -> Interaction:
    return Interaction(tmp_path, command=(sys.executable, str(model_stub.__file__), mode, str(tmp_path)))


def test_a_process_that_reads_nothing_is_killed_by_close(tmp_path: Path) -> None:
    interaction = started(tmp_path)
    interaction.start()
    os.kill(stubs()[0].pid, signal.SIGSTOP)
    interaction.close(0.01)
    assert stubs() == []
    assert interaction.has_ended


def test_closing_ends_a_thread_that_waits_for_the_model(tmp_path: Path) -> None:
    interaction = started(tmp_path, "slow")
    seen = []

    def on_progress(reached: object) -> None:
        seen.append(reached)
        interaction.close(0.01)

    with pytest.raises(UserError, match="the model's process"):
        interaction.start(on_progress)
    assert seen
    assert stubs() == []


def test_a_request_that_the_trainer_would_split_is_refused_and_the_next_one_is_answered(tmp_path: Path) -> None:
    with started(tmp_path) as interaction:
        interaction.start()
        with pytest.raises(UserError, match="the text is too long; shorten it"):
            list(interaction.ask(ReadText("x" * MOST_REQUEST_BYTES)))
        (answer,) = interaction.ask(ReadText("the lamb"))
        assert isinstance(answer, TextRead)
        assert [token.text for token in answer.tokens] == ["the", " lamb"]
