"""Tests for the rows of the jobs table and for the columns that fit into the window."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.jobs.view.find import orders
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.shape import d_sae_words, dead_after_words, k_words
from sae_tui.panels.job_columns import COLUMNS, HELP, SHOWN, columns_of, mean_with_digit
from sae_tui.panels.jobs import job_row
from sae_tui.settings import JobColumnName
from sae_tui.widgets.table import fit_columns
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.states import JobState


def job(state: JobState = JobState.RUNNING, **fields: object) -> JobView:
    usual = {"id": 1, "name": "run", "config": "", "user": "me", "host": "here", "device": "cpu", "gpu_source": "none"}
    return JobView(state=state, **(usual | fields))


def cells(view: JobView) -> dict[str, tuple[str, str]]:
    return {column.title: cell for column, cell in zip(columns_of(SHOWN), job_row(view).cells, strict=True)}


def config(**sae: object) -> str:
    return dump_job(parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": sae})[0])


def test_a_row_shows_held_out_values_or_marked_batch_values_until_they_exist() -> None:
    fresh = cells(job(fvu=0.0801, l0=32.0))
    assert (fresh["FVU"], fresh["L0"]) == (("~0.0801", "dim"), ("~32", "dim"))
    measured = cells(job(fvu=0.0801, heldout_fvu=0.1341, l0=32.0, heldout_l0=36.4, dead_fraction=0.004))
    assert (measured["FVU"], measured["L0"]) == (("0.1341", "text"), ("36.4", "text"))
    assert measured["DEAD"] == ("0.4%", "text")
    assert cells(job())["FVU"] == ("–", "text")


@given(st.floats(0, 98.9), st.floats(0, 98.9))
def test_a_mean_over_seeds_with_its_deviation_fits_into_the_column(mean: float, sd: float) -> None:
    text = mean_with_digit(mean, sd)
    assert len(text) <= COLUMNS["fvu"].column.width
    shown_mean, digits = text.removesuffix(")").split("(")
    unit = 10.0 ** -len(shown_mean.partition(".")[2])
    assert float(shown_mean) == pytest.approx(mean, abs=0.501 * unit)
    assert int(digits) * unit == pytest.approx(sd, abs=0.501 * unit) or (digits == "1" and sd < unit)


def test_a_deviation_is_never_shown_as_zero() -> None:
    assert mean_with_digit(0.2091, 0.0003) == "0.2091(3)"
    assert mean_with_digit(0.2337, 0.0016) == "0.234(2)"
    assert mean_with_digit(0.20112, 0.00049) == "0.2011(5)"
    assert mean_with_digit(0.141858, 0.000018) == "0.1419(1)"
    assert mean_with_digit(12.3456, 0.03) == "12.35(3)"


def test_a_finished_job_shows_its_duration_instead_of_a_full_bar() -> None:
    took = {"started": 100.0, "ended": 129.0, "attempt": 1, "progress": 1.0}
    assert cells(job(JobState.FINISHED, **took))["PROGRESS"] == ("29 s", "dim")
    assert "━" in cells(job(JobState.STOPPED, **took))["PROGRESS"][0]
    # With several attempts, `started` is when the latest attempt started, so no duration is shown.
    assert "━" in cells(job(JobState.FINISHED, **(took | {"attempt": 2})))["PROGRESS"][0]


_WIDE = {"TOKENS", "ARCH", "MEMORY", "STARTED", "NOTE"}


@pytest.mark.parametrize(
    ("width", "dropped", "name"),
    [
        (80, _WIDE | {"STEP", "LOSS", "DEAD", "D_SAE", "TOK/S", "GPUS", "L0"}, range(18, 24)),
        (118, _WIDE | {"STEP", "LOSS"}, range(18, 26)),
        (196, set(), range(18, 31)),
    ],
)
def test_columns_are_dropped_by_width_and_the_name_is_no_wider_than_needed(width, dropped, name) -> None:
    widths = {column.title: size for column, size in fit_columns(columns_of(SHOWN), width).items()}
    assert {column.title for column in columns_of(SHOWN)} - widths.keys() == dropped
    assert widths["NAME"] in name
    assert sum(size + 1 for size in widths.values()) <= width


def test_a_sweep_shows_the_range_of_its_settings() -> None:
    assert (k_words(config(k=32)), d_sae_words(config(d_sae=1536), None)) == ("32", "1,536")
    assert (k_words(config(k=[32, 8, 16])), d_sae_words(config(d_sae=[768, 24576]), None)) == ("8…32", "768…24.6k")
    assert [d_sae_words(config(expansion_factor=8.0), d_in) for d_in in (576, None)] == ["4,608", ""]
    assert [d_sae_words(f"[sae]\nexpansion_factor = {odd}\n", 8) for odd in ("inf", "nan")] == ["", ""]
    assert k_words("not [ toml") == k_words("[sae]\nk = \n") == d_sae_words("", 8) == ""


def test_the_fraction_of_dead_latents_is_explained_once_the_token_count_is_known() -> None:
    steps = {"step": 100, "total_steps": 400, "tokens": 51_200}
    assert dead_after_words(job(config=config(dead_after_tokens=20_000))) == "20.0k tokens"
    assert dead_after_words(job(config=config(), **steps)) == "20.5k tokens"
    assert dead_after_words(job(config=config())) == ""


def test_every_column_in_the_setting_exists_and_sorts_by_a_known_order() -> None:
    assert list(COLUMNS) == list(get_args(JobColumnName))
    assert {one.order for one in COLUMNS.values()} - {""} <= orders().keys()
    assert COLUMNS.keys() == HELP.keys()


def test_a_sweep_shows_its_values_in_its_name() -> None:
    assert job_row(job(name="quick", config=config(k=[8, 16, 32]))).cells[1][0] == "quick · k=8,16,32"
    both = config(k=[8, 16], d_sae=[512, 1024])
    assert job_row(job(config=both, tags=("good",))).cells[1][0] == "run · k=8,16 d_sae=512,1024 #good"
    assert job_row(job(config=config(k=8))).cells[1][0] == "run"


def test_a_sentence_takes_the_place_of_the_values_in_any_column_order() -> None:
    names = ("gpus", "fvu", "k", "state", "eta")
    row = job_row(job(JobState.QUEUED, waits_for="GPU 0 is in use", config=config(k=8)), names)
    assert [text for text, _ in row.cells[2:]] == ["cpu", "GPU 0 is in use", "", "◌ queued", ""]
    assert row.spill == (3,)


@pytest.mark.parametrize("names", [(), ("k", "state"), ("state", "step"), ("loss", "gpus", "state")])
def test_a_sentence_follows_the_name_if_no_column_of_values_is_always_shown(names: tuple[str, ...]) -> None:
    row = job_row(job(JobState.QUEUED, waits_for="GPU 0 is in use", config=config(k=8)), names)
    assert row.cells[1][0] == "run · GPU 0 is in use"
    assert row.spill == (1,)
    shown = dict(zip(names, row.cells[2:], strict=True))
    assert shown.get("state", ("◌ queued", ""))[0] == "◌ queued"
