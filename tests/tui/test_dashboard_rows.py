"""Tests for how many rows each dashboard panel gets."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.screens.dashboard_rows import SIDE_BY_SIDE_FROM, Contents, Lower, arrange

windows = st.tuples(st.integers(1, 300), st.integers(4, 120))
contents = st.builds(
    Contents,
    n_gpus=st.integers(0, 64),
    n_jobs=st.integers(0, 500),
    n_active=st.integers(0, 20),
    is_running=st.booleans(),
    n_processes=st.integers(0, 100),
    previews=st.booleans(),
    is_card_view=st.booleans(),
    tiles=st.booleans(),
)


@given(windows, contents, st.sampled_from(get_args(Lower)))
def test_the_panels_exactly_fill_any_window(window, of, lower) -> None:
    rows = arrange(*window, of, lower)
    assert rows.height == window[1] - 2
    assert rows.gpus >= 1
    assert max(rows.jobs, rows.processes) >= 1 or lower == "gpus"
    assert min(rows.totals, rows.preview, rows.plot, rows.processes) >= 0
    assert rows.totals in (0, 4) if not rows.plot else rows.totals == 2 * (rows.plot + 1)
    assert not (rows.preview and not of.previews)


def test_an_idle_window_gives_its_last_rows_to_jobs_that_do_not_fit() -> None:
    idle = Contents(4, 10, n_processes=1, previews=True)
    rows = arrange(80, 24, idle)
    assert rows.processes - 1 >= idle.n_processes
    assert rows.jobs > arrange(80, 24, replace(idle, n_jobs=3)).jobs


def test_a_normal_window_shows_running_jobs_a_preview_and_some_processes() -> None:
    for n_gpus in (4, 8):
        rows = arrange(120, 40, Contents(n_gpus, 6, n_active=2, is_running=True, n_processes=5, previews=True))
        assert (rows.frame, rows.gpus // rows.per_gpu) == ("framed", n_gpus)
        assert rows.jobs >= 3
        assert rows.preview >= 5
        assert rows.processes >= 3
        assert rows.plot >= 2


def test_jobs_that_have_ended_leave_their_space_to_the_processes() -> None:
    for n_gpus in (4, 8):
        rows = arrange(120, 40, Contents(n_gpus, 30, n_processes=20, previews=True))
        assert rows.jobs == 4  # three jobs and the heading
        assert rows.processes >= 9
        assert rows.preview == 0


def test_few_processes_leave_space_for_the_preview_of_a_finished_job() -> None:
    assert arrange(120, 40, Contents(4, 30, n_processes=1, previews=True)).preview >= 5


def test_a_single_running_job_leaves_the_other_rows_to_its_preview() -> None:
    rows = arrange(120, 40, Contents(4, 1, n_active=1, is_running=True, n_processes=1, previews=True))
    assert rows.jobs == 2
    assert rows.preview == 7


def test_the_preview_is_next_to_the_jobs_only_if_the_default_columns_fit_beside_it() -> None:
    of = Contents(8, 12, n_active=2, is_running=True, n_processes=10, previews=True)
    rows = arrange(200, 60, of)
    assert not rows.is_side_by_side
    assert (rows.jobs, rows.preview) == (9, 12)


def test_a_large_window_shows_all_processes_and_most_jobs_before_taller_plots() -> None:
    of = Contents(8, 12, n_active=2, is_running=True, n_processes=10, previews=True)
    rows = arrange(SIDE_BY_SIDE_FROM, 60, of)
    assert rows.is_side_by_side
    assert rows.preview == rows.jobs >= 13
    assert rows.processes >= 11
    assert rows.plot <= 6


def test_a_small_window_shows_every_gpu_and_the_processes_or_the_running_jobs() -> None:
    idle = arrange(80, 24, Contents(8, 30, n_processes=8, previews=True))
    assert (idle.frame, idle.totals, idle.gpus, idle.per_gpu, idle.preview) == ("ruled", 4, 8, 1, 0)
    assert min(idle.processes, idle.jobs) >= 3
    busy = arrange(80, 24, Contents(8, 30, n_active=4, is_running=True, n_processes=8, previews=True))
    assert busy.jobs >= 5
    assert busy.processes == 0


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_one_panel_can_have_the_lower_part_to_itself(size) -> None:
    of = Contents(8, 30, n_active=2, is_running=True, n_processes=8, previews=True)
    only = {lower: arrange(*size, of, lower) for lower in get_args(Lower)}
    assert only["processes"].jobs == only["processes"].preview == 0
    assert only["jobs"].processes == 0
    assert only["gpus"].jobs == only["gpus"].processes == 0
    assert only["processes"].processes > only[""].processes
    assert only["gpus"].gpus > only[""].gpus


def test_a_machine_without_gpus_shows_no_processes() -> None:
    rows = arrange(120, 40, Contents(0, 5, previews=True, words=2))
    assert rows.processes == 0
    assert rows.preview
