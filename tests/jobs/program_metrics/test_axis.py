"""Tests for the step at which a program's values are stored."""

from __future__ import annotations

from sae_tui.jobs.program_metrics.axis import StepAxis
from sae_tui.jobs.program_metrics.lines import read_line


def placed(axis: StepAxis, *lines: str) -> list[int]:
    readings = [(number, read_line(line)) for number, line in enumerate(lines)]
    return [axis.place(reading, number) for number, reading in readings if reading]


def bar(n: int, total: int, name: str = "train") -> str:
    return f"{name}: {100 * n // total}%|### | {n}/{total} [00:01<00:09, 1.0it/s]"


def test_without_steps_the_line_number_serves_as_the_step() -> None:
    axis = StepAxis()
    assert placed(axis, "loss: 0.1", "nothing", "loss: 0.2") == [0, 2]
    assert axis.progress == (2, None)


def test_a_value_without_a_step_belongs_to_the_latest_step() -> None:
    axis = StepAxis()
    assert placed(axis, "step 10/50 loss: 1", "val_loss: 2", "epoch 1 acc: 3", "step 20/50") == [10, 10, 10, 20]
    assert axis.progress == (20, 50)


def test_a_bar_supplies_the_step_and_the_total_for_values_that_have_none() -> None:
    axis = StepAxis()
    assert placed(axis, bar(3, 90), "{'loss': 0.5, 'epoch': 0.02}", bar(4, 90)) == [3, 3, 4]
    assert axis.progress == (4, 90)


def test_a_bar_supplies_the_total_for_steps_that_are_printed_only_now_and_then() -> None:
    axis = StepAxis()
    placed(axis, bar(1, 500), "step=100 loss=1", bar(120, 500))
    assert axis.progress == (120, 500)


def test_an_evaluations_shorter_bar_does_not_move_the_position() -> None:
    axis = StepAxis()
    placed(axis, bar(3, 3, "load"), bar(500, 1000), bar(7, 50, "eval"), bar(8, 50, "eval"))
    assert axis.progress == (500, 1000)
    assert placed(axis, bar(501, 1000)) == [501]


def test_steps_of_the_next_epoch_continue_from_the_end_of_the_previous_one() -> None:
    axis = StepAxis()
    epoch = [bar(n, 4) for n in range(5)]
    assert placed(axis, *epoch, *epoch) == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert axis.progress == (8, 8)
    steps = [f"step {n} loss: 1" for n in range(6)]
    assert placed(StepAxis(), *steps, *steps) == list(range(12))


def test_slightly_different_steps_from_two_processes_do_not_begin_a_new_pass() -> None:
    lines = [f"step={n} loss=1" for n in (0, 0, 1, 0, 1, 2, 1, 3, 2)]
    assert placed(StepAxis(), *lines) == [0, 0, 1, 0, 1, 2, 1, 3, 2]


def test_a_restarted_program_goes_back_to_the_step_it_resumes_from() -> None:
    axis = StepAxis()
    placed(axis, *(f"step={n} loss=1" for n in range(0, 100, 10)))
    axis.restart()
    assert placed(axis, "resumed, val_loss: 3") == [90]
    assert axis.rewind_to is None
    assert placed(axis, "step=50 loss=1", "step=60 loss=1") == [50, 60]
    assert axis.rewind_to == 49


def test_line_numbers_continue_after_a_program_restarts() -> None:
    axis = StepAxis()
    axis.place(read_line("loss: 1"), 5)
    axis.restart()
    assert axis.place(read_line("loss: 1"), 6) == 6
    assert axis.rewind_to is None


def test_after_a_restart_a_short_bar_for_preparatory_work_discards_nothing() -> None:
    axis = StepAxis()
    placed(axis, bar(600, 1000))
    axis.restart()
    assert placed(axis, bar(0, 3, "load"), bar(3, 3, "load")) == [600, 600]
    assert axis.rewind_to is None
    assert placed(axis, bar(500, 1000)) == [500]
    assert axis.rewind_to == 499


def test_after_a_restart_a_bar_that_counts_the_remaining_steps_continues_the_curve() -> None:
    axis = StepAxis()
    placed(axis, bar(600, 1000))
    axis.restart()
    assert placed(axis, bar(0, 400), bar(1, 400)) == [600, 601]
    assert (axis.rewind_to, axis.progress) == (None, (601, 1000))
