"""Tests that a run asked to finish early cools down over its next steps, and then counts as finished."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from trainer.contract.runs.checkpoint_manifest import newest_whole, read_state
from trainer.contract.runs.how_far import from_metadata
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.schedule import COOL_DOWN_SHARE, FEWEST_COOL_DOWN_STEPS, CoolDown, Schedule
from trainer.reporting.progress import RunProgress

PLANNED, ASKED, END = 2000, 200, 230
MakeJob = Callable[..., JobConfig]
MakeTrainer = Callable[..., Any]


class AtStep(RunProgress):
    """A `RunProgress` that sets each of its events after a given step."""

    def __init__(self, **events: tuple[int, threading.Event]) -> None:
        super().__init__()
        self._events, self.phases, self.total_steps = events, list[str](), 0

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        super().heartbeat(phase, step, tokens)
        self.phases.append(phase)
        for at, event in self._events.values():
            if step >= at:
                event.set()

    def shorten(self, total_steps: int) -> None:
        self.total_steps = total_steps


@given(
    planned=st.integers(2, 10**7),
    asked=st.floats(0, 1),
    warmup=st.sampled_from([0.0, 0.05, 0.5]),
    decay=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
)
def test_a_cool_down_continues_the_schedules_and_ends_at_their_final_values(
    planned: int, asked: float, warmup: float, decay: float
) -> None:
    begin = int(asked * (planned - 1))
    cool_down = CoolDown.after(begin, planned)
    if cool_down is None:
        assert planned - begin <= max(FEWEST_COOL_DOWN_STEPS, COOL_DOWN_SHARE * begin + 1)
        return
    before = Schedule(planned, warmup, decay)
    after = Schedule(planned, warmup, decay, cool_down)
    length = cool_down.end - begin
    assert length >= FEWEST_COOL_DOWN_STEPS
    assert length <= FEWEST_COOL_DOWN_STEPS or length <= 0.2 * begin
    assert after.total_steps == cool_down.end < planned
    for step in (0, begin // 2, begin):
        assert after.lr_factor(step) == pytest.approx(before.lr_factor(step))
        assert after.progress(step) == pytest.approx(before.progress(step))
    # From the request on, the learning rate decays linearly, reaching 0 after the last step.
    full = before.lr_factor(begin)
    steps = sorted({begin, begin + 1, begin + length // 2, cool_down.end - 1})
    assert [after.lr_factor(step) for step in steps] == pytest.approx(
        [full * (cool_down.end - step) / length for step in steps]
    )
    assert after.progress(cool_down.end) == 1
    assert all(0 <= after.progress(a) < after.progress(b) for a, b in itertools.pairwise(steps))


@pytest.fixture
def asked_to_finish(make_job: MakeJob, make_trainer: MakeTrainer) -> Callable[..., tuple[Any, AtStep]]:
    """Return a function that trains a run, and asks it to finish or stop after the given steps."""

    def train(finish: int = 10**9, stop: int = 10**9, **options: Any) -> tuple[Any, AtStep]:
        job = make_job(train={"n_steps": PLANNED, "lr": 0.1, "eval_every": 0})
        events = {"finish": threading.Event(), "stop": threading.Event()}
        progress = AtStep(finish=(finish, events["finish"]), stop=(stop, events["stop"]))
        trainer = make_trainer(job, progress, **events, **options)
        trainer.is_finished = trainer.run()
        return trainer, progress

    return train


def metadata(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "cfg.json").read_text())["metadata"]
    return found


def held_out_fvu(trainer: Any) -> float:
    return float(trainer.report.values[""]["heldout_fvu"])


@pytest.mark.slow
def test_a_cooled_down_run_is_better_than_one_stopped_after_the_same_number_of_steps(
    asked_to_finish: Callable[..., tuple[Any, AtStep]], tmp_path: Path
) -> None:
    cooled, progress = asked_to_finish(finish=ASKED - 1, checkpoints=tmp_path / "a", output=tmp_path / "cooled")
    assert cooled.is_finished
    assert cooled.position.step == progress.total_steps == END
    assert progress.phases.count("cooling down") >= END - ASKED
    stopped, _ = asked_to_finish(stop=END - 1, checkpoints=tmp_path / "b", output=tmp_path / "stopped")
    assert not stopped.is_finished
    assert stopped.position.step == END
    assert held_out_fvu(cooled) < 0.95 * held_out_fvu(stopped)
    was_cooled, was_stopped = (from_metadata(metadata(tmp_path / name)) for name in ("cooled", "stopped"))
    assert was_cooled
    assert was_cooled.is_finished
    assert was_cooled.unfinished == ""
    assert was_stopped
    assert was_stopped.unfinished.startswith(
        f"stopped at step {END} of 2,000 with the learning rate at 100%; a finished"
    )


@pytest.mark.slow
def test_a_run_stopped_during_its_cool_down_resumes_to_bit_identical_weights(
    asked_to_finish: Callable[..., tuple[Any, AtStep]], tmp_path: Path
) -> None:
    whole, _ = asked_to_finish(finish=ASKED - 1, checkpoints=tmp_path / "whole", output=tmp_path / "one")
    cut, _ = asked_to_finish(finish=ASKED - 1, stop=ASKED + 9, checkpoints=tmp_path / "cut", output=tmp_path / "two")
    # A stop request during the cool-down stops the run immediately.
    assert not cut.is_finished
    assert cut.position.step == ASKED + 10
    resumed, _ = asked_to_finish(
        checkpoints=tmp_path / "cut", output=tmp_path / "two", resume_from=newest_whole(tmp_path / "cut")
    )
    assert resumed.is_finished
    assert resumed.position == whole.position
    one, two = (load_file(tmp_path / name / "sae_weights.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_killed_during_its_cool_down_has_saved_its_new_length(
    asked_to_finish: Callable[..., tuple[Any, AtStep]], tmp_path: Path
) -> None:
    asked_to_finish(finish=ASKED - 1, stop=ASKED)
    states = [read_state(folder) for folder in (tmp_path / "checkpoints").iterdir()]
    assert [state.cool_down_of(PLANNED) for state in states] == [CoolDown(ASKED, END, PLANNED)] * len(states)
    assert ASKED in {state.position.step for state in states}
    # A run ignores its cool-down if its length is changed.
    assert states[0].cool_down_of(PLANNED + 1) is None


def test_settings_that_depend_on_the_run_length_use_the_new_length(
    make_job: MakeJob, make_trainer: MakeTrainer
) -> None:
    job = make_job(sae={"dead_after_tokens": "auto", "k_anneal_fraction": 1.0}, train={"n_steps": PLANNED})
    (learner,) = make_trainer(job).learners.values()
    assert learner.sae.dead_after_tokens == PLANNED * 128 // 10
    learner.begin_step(ASKED)
    k = learner.sae.k_now
    learner.cool_down(CoolDown(ASKED, END, PLANNED))
    learner.begin_step(ASKED)
    assert learner.sae.k_now == pytest.approx(k)
    assert k > 14
    learner.begin_step(END)
    assert learner.sae.k_now == 4
    assert learner.sae.dead_after_tokens == END * 128 // 10


@pytest.mark.parametrize(("mode", "k"), [("ddp", 4), ("tensor", 4), ("sweep", [2, 4])])
def test_ranks_asked_to_finish_agree_on_the_last_step_and_finish(
    mode: str, k: int | list[int], make_job: MakeJob, start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    job = make_job(sae={"k": k}, train={"n_steps": 200_000, "batch_size": 16}, parallel={"mode": mode})
    ranks = start_ranks(job, 2)
    (tmp_path / "run" / "attempt1" / "finish").touch()
    assert ranks.wait() == [EXIT_FINISHED, EXIT_FINISHED]
    state = read_state(newest_whole(tmp_path / "run" / "checkpoints"))
    cool_down = state.cool_down_of(200_000)
    assert cool_down is not None
    assert state.position.step == cool_down.end
