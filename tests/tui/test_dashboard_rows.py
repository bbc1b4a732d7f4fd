"""Tests for how many rows each panel of the dashboard gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sae_tui.screens.dashboard_rows import arrange

windows = st.tuples(st.integers(1, 300), st.integers(4, 120))


@given(windows, st.integers(0, 64), st.integers(0, 500), st.sampled_from(["", "is_card_view", "tiles"]), st.booleans())
def test_the_panels_exactly_fill_any_window(window, n_gpus, n_jobs, shape, previews) -> None:
    width, height = window
    shapes = {shape: True} if shape else {}
    rows = arrange(width, height, n_gpus=n_gpus, n_jobs=n_jobs, previews=previews, **shapes)
    assert rows.height == height - 2
    assert min(rows.gpus, rows.jobs) >= 1
    assert min(rows.totals, rows.preview, rows.plot) >= 0
    assert rows.totals in (0, 4) if not rows.plot else rows.totals == 2 * (rows.plot + 1)
    assert not (rows.preview and not previews)


def test_a_normal_window_shows_plots_two_lines_per_gpu_and_the_preview() -> None:
    rows = arrange(120, 40, n_gpus=4, n_jobs=3, previews=True)
    assert (rows.frame, rows.gpus, rows.per_gpu) == ("framed", 8, 2)
    assert rows.plot >= 2
    assert rows.preview >= 6
    beside = arrange(200, 60, n_gpus=8, n_jobs=3, previews=True)
    assert beside.beside
    assert beside.preview == beside.jobs > 12


def test_a_small_window_shows_every_gpu_and_some_jobs() -> None:
    rows = arrange(80, 24, n_gpus=8, n_jobs=30, previews=True)
    assert (rows.frame, rows.totals, rows.gpus, rows.per_gpu, rows.preview) == ("ruled", 4, 8, 1, 0)
    assert rows.jobs >= 6
