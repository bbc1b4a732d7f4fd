"""Tests for the recent readings of processes, and for their columns in a graph."""

from __future__ import annotations

from sae_tui.gpu.process_history import MOST_READINGS, ProcessHistory, in_columns
from sae_tui.gpu.processes import ProcessDetails
from trainer.contract.process import ProcessRef


def process(sm: int | None, start: int = 1) -> ProcessDetails:
    return ProcessDetails(7, "ann", "python", (0,), 1 << 30, sm, identity=ProcessRef(7, start, "boot"))


def test_the_number_of_readings_is_bounded() -> None:
    history = ProcessHistory()
    for second in range(2 * MOST_READINGS):
        history.add([process(second)], float(second))
    readings = history.of(process(0))
    assert len(readings) == MOST_READINGS
    assert readings[-1].sm_percent == 2 * MOST_READINGS - 1


def test_a_process_that_is_no_longer_listed_and_a_reused_pid_have_no_readings() -> None:
    history = ProcessHistory()
    history.add([process(10)], 1.0)
    assert history.of(process(0, start=2)) == ()
    history.add([process(20, start=2)], 2.0)
    assert history.of(process(0)) == ()
    assert [reading.sm_percent for reading in history.of(process(0, start=2))] == [20]


def test_a_column_is_the_mean_of_its_readings_and_is_held_until_the_next_one_is_late() -> None:
    history = ProcessHistory()
    for second, sm in ((1.0, 10), (1.5, 20), (4.2, 50), (15.5, None), (16.2, 80)):
        history.add([process(sm)], second)
    # Each column covers two seconds, and the last one begins at 16.
    columns = in_columns(history.of(process(0)), "sm_percent", 10, 20.0, 17.0)
    assert columns == [None, 15, 20, 50, 50, 50, None, None, None, 80]
