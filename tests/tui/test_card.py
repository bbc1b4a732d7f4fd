"""Tests for the screen that shows a job's report card."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import closing

import msgspec
import pytest
from support.report_cards import CROSSCODER, EFFECTS, FIGURES, card_table, put_card
from support.tui import record_job, record_metrics, wait_until
from textual.pilot import Pilot
from textual.widgets import Input, Label

from sae_tui.app import SaeApp
from sae_tui.jobs.evaluation.outcome import DONE
from sae_tui.panels.card import CardPanel, card_lines
from sae_tui.screens.card import CardScreen
from sae_tui.screens.features import FeaturesScreen
from sae_tui.widgets.find import Find
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.lines import PALETTE
from trainer.contract.paths import DataDir
from trainer.contract.runs.card_versions import archive
from trainer.contract.runs.explanations import ExplainedLatents, MeanScore
from trainer.contract.runs.report_card import Card
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

MakeApp = Callable[..., SaeApp]
# The figures that must be visible without scrolling.
FIGURES_FIRST = (
    "FVU", "median row FVU", "explained variance", "CE score", "KL score", "loss with SAE", "loss without", "L0",
    "never fire", "fire on > 10 %", "nearest decoder", "density", "AUC, k = 1",
)  # fmt: skip


@pytest.fixture
def job_id(data: DataDir) -> int:
    job_id = record_job(data, "a", JobState.FINISHED)
    record_metrics(data, job_id)
    return job_id


async def opened(pilot: Pilot[None], app: SaeApp) -> CardScreen:
    """Open the first job, then press the key that opens its report card."""
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(app.session.jobs[0].id)
    await wait_until(pilot, lambda: app.screen.name == "job")
    await pilot.press("v")
    await wait_until(pilot, lambda: isinstance(app.screen, CardScreen) and app.screen.query_one(CardPanel).plain)
    screen = app.screen
    assert isinstance(screen, CardScreen)
    return screen


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_all_figures_on_a_report_card_fit_on_one_screen(
    make_app: MakeApp, data: DataDir, job_id: int, size: tuple[int, int]
) -> None:
    put_card(data.sae(job_id))
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        panel = screen.query_one(CardPanel)
        shown = panel.plain.splitlines()[: panel.size.height]
        for figure in FIGURES_FIRST:
            assert any(f"  {figure}  " in line for line in shown), figure
        assert all(len(line) < panel.size.width for line in panel.plain.splitlines())
        # The latents are listed below, with their most strongly activating tokens aligned in one column.
        latents = panel.plain.splitlines()[-20:]
        assert latents[2].startswith("      3   3.000%")
        assert {line.index(f" of{number}") for number, line in enumerate(latents, 1)} == {latents[0].index(" of1")}
        await pilot.press("f")
        assert isinstance(app.screen, FeaturesScreen)


@pytest.mark.parametrize(("width", "n_columns"), [(79, 2), (117, 3), (197, 4)])
def test_figures_and_their_errors_are_aligned_in_each_column(width: int, n_columns: int) -> None:
    card = msgspec.convert(card_table(), Card)
    lines = ["".join(text for text, _ in line) for line in card_lines(card, (), width)]
    places = {at for line in lines for at, char in enumerate(line) if char == "±"}
    assert len(places) == n_columns
    assert "  FVU                  0.2500 ± 0.0100" in "".join(lines)


def test_figures_of_different_importance_look_different_without_colours() -> None:
    card = msgspec.convert(card_table(), Card)
    styles = {text.strip(): style for line in card_lines(card, (), 79) for text, style in line}
    assert (styles["0.2500"], styles["0.2400"], styles["7.0000"]) == ("title", "text", "dim")
    assert PALETTE["title"].startswith("bold")


def test_warnings_come_first_with_their_remedies_and_histograms_have_labelled_ends() -> None:
    table = card_table()
    heavy = "dimension 7 holds 60 % of the variance"
    card = msgspec.convert(table | {"data": table["data"] | {"heavy": heavy}}, Card)
    text = "\n".join("".join(text for text, _ in line) for line in card_lines(card, (0, 1, 4), 117))
    assert f" ! {heavy}: leave them out with data.drop_dimensions" in text
    assert text.index(heavy) < text.index("FVU  ")
    assert re.search(r"  density +1e-6 │ {8}▂▄▆█│ 1", text)
    assert re.search(r"  nearest decoder +0 │ ▂█│ 1", text)


def test_a_report_card_with_only_held_out_rows_says_what_was_not_measured() -> None:
    card = msgspec.convert(card_table(spliced=None, probing=None, latents=[]), Card)
    text = "\n".join("".join(text for text, _ in line) for line in card_lines(card, (), 79))
    assert "not measured; press e" in text
    assert "Probes" not in text
    assert "nearest decoder    0 │" not in text


def test_a_report_card_on_synthetic_rows_offers_no_evaluation_in_a_language_model() -> None:
    table = card_table(spliced=None, known={"n_features": 256, "n_rows": 8192})
    text = "\n".join("".join(text for text, _ in line) for line in card_lines(msgspec.convert(table, Card), (), 79))
    assert "none: the rows are synthetic" in text
    assert "press e" not in text


@pytest.mark.parametrize("width", [79, 117])
def test_the_effects_of_latents_have_histograms_the_largest_and_their_agreement(width: int) -> None:
    card = msgspec.convert(card_table(effects=EFFECTS), Card)
    lines = ["".join(text for text, _ in line) for line in card_lines(card, (), width)]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "Effect of each latent (nats/token)" in text
    assert re.search(r"  help 21 +1e-6 │  ▁▂▄█▄▂ {4}│ 1", text)
    assert re.search(r"  hurt 13 +1e-6 │  ▂▄█▄▂ {5}│ 1", text)
    assert re.search(r"  latent 7 +\+0\.0388 ± 0\.0036", text)
    assert re.search(r"  latent 40 +-0\.0154 ± 0\.0014", text)
    assert re.search(r"  Spearman, ablated +0\.800", text)
    agreement = "3 latents on 2,000 tokens: Spearman 0.800, Pearson 0.900; the estimates are 0.50 times as large"
    assert agreement in " ".join(text.split())
    assert "Effect of each latent" not in str(card_lines(msgspec.convert(card_table(), Card), (), width))


@pytest.mark.parametrize("width", [79, 117])
def test_the_parts_of_a_crosscoder_have_their_figures_and_a_histogram_of_norms(width: int) -> None:
    card = msgspec.convert(card_table(figures=FIGURES | {"crosscoder": CROSSCODER}, spliced=None), Card)
    lines = ["".join(text for text, _ in line) for line in card_lines(card, (), width)]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert re.search(r"  A resid_post\.8 +scale 1\b", text)
    assert re.search(r"  FVU, B +0\.3000 ± 0\.0300", text)
    assert re.search(r"  only in A +5 ", text)
    assert re.search(r"  norm in B 0 │▂ {8}█▆ {8}▂│ 1", text)
    assert "did not fire" in text
    # It reads several places in the model, so it cannot be patched into one of them.
    assert "not measured; press e" not in text


async def test_a_key_shows_the_differences_from_another_jobs_report_card(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    put_card(data.sae(job_id), figures=FIGURES | {"fvu": 0.2})
    other = record_job(data, "b", JobState.FINISHED)
    put_card(data.sae(other), name="b", spliced=None)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        app.session.go.open_job(job_id)
        await wait_until(pilot, lambda: app.screen.name == "job")
        await pilot.press("v")
        await wait_until(pilot, lambda: isinstance(app.screen, CardScreen) and app.screen.query_one(CardPanel).plain)
        panel = app.screen.query_one(CardPanel)
        await pilot.press("c")
        await wait_until(pilot, lambda: isinstance(app.screen, Find) and app.screen.query(Input))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Against job 2" in panel.plain)
        assert re.search(r"FVU +0\.2000 ± 0\.0100 +0\.2500 ± 0\.0100 +-0\.0500 better\n", panel.plain)
        assert re.search(r"cosine +0\.9000 +0\.9000 +=\*", panel.plain)
        assert re.search(r"CE score +0\.9500 ± 0\.0040 +– +only here", panel.plain)
        assert "against job 2" in str(panel.border_title)
        # The first press only ends the comparison.
        await pilot.press("escape")
        assert "Against" not in panel.plain
        assert isinstance(app.screen, CardScreen)
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen.name == "job")


async def test_earlier_report_cards_of_the_same_job_are_offered_first(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    put_card(data.sae(job_id))
    archive(data.sae(job_id))
    put_card(data.sae(job_id), figures=FIGURES | {"fvu": 0.2})
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: "0.2000" in screen.query_one(CardPanel).plain)
        await pilot.press("c")
        await wait_until(pilot, lambda: isinstance(app.screen, Find) and app.screen.query(Input))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Against card 1: " in screen.query_one(CardPanel).plain)


async def test_the_report_card_for_each_sae_in_a_sweep_is_shown(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    for label, fvu in (("k=16", 0.5), ("k=8", 0.75)):
        table = {"n_tokens": 9, "d_in": 2, "d_sae": 4, "fvu": fvu, "l0_quantiles": [1.0] * 5, "dead": 0.0,
                 "dense_1": 0.0, "dense_10": 0.0, "density_histogram": [1]}  # fmt: skip
        put_card(data.sae(job_id) / label, label=label, figures=table, spliced=None, probing=None, latents=[])
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: "0.5000" in screen.query_one(CardPanel).plain)
        assert "k=16" in str(screen.query_one("#card-title", Label).content)
        assert "SAE" in screen.query_one(Footer).plain
        await pilot.press("c")
        await wait_until(pilot, lambda: isinstance(app.screen, Find) and app.screen.query(Input))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Against" in screen.query_one(CardPanel).plain)
        # The other report card was chosen only for the first SAE.
        await pilot.press("m")
        assert "0.7500" in screen.query_one(CardPanel).plain
        assert "Against" not in screen.query_one(CardPanel).plain
        await pilot.press("escape")
        assert app.screen.name == "job"


async def test_the_report_card_of_one_of_several_seeds_shows_their_means(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    for seed, fvu in enumerate((0.2, 0.3)):
        put_card(data.sae(job_id) / f"seed={seed}", label=f"seed={seed}", figures=FIGURES | {"fvu": fvu})
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        lines = screen.query_one(CardPanel).plain.splitlines()
        (at,) = [number for number, line in enumerate(lines) if "Mean ± s.d. over 2 seeds" in line]
        assert re.search(r"FVU +0\.250 ± 0\.071", lines[at + 1])


async def test_a_report_card_shows_its_figures_next_to_those_of_a_random_twin(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    twin = {"label": "freeze=decoder", "frozen": "decoder", "figures": {"fvu": 0.6}, "errors": {"fvu": 0.01}}
    put_card(data.sae(job_id) / "freeze=off", label="freeze=off", figures=FIGURES | {"fvu": 0.2}, twins=[twin])
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        lines = screen.query_one(CardPanel).plain.splitlines()
        (at,) = [number for number, line in enumerate(lines) if "Next to a random decoder" in line]
        assert re.search(r"FVU +0\.2000 +0\.6000", lines[at + 1])


async def test_a_job_without_a_report_card_explains_how_to_get_one_and_then_shows_it(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        panel = screen.query_one(CardPanel)
        await wait_until(pilot, lambda: "has no report card yet" in panel.plain)
        put_card(data.sae(job_id))
        with closing(Control(data.control_db)) as control:
            control.add_event(job_id, DONE, "was evaluated")
        await wait_until(pilot, lambda: "0.2500 ± 0.0100" in panel.plain)


def test_an_sae_for_several_k_shows_the_fvu_of_each_k_with_a_bar() -> None:
    at = [{"k": 8, "fvu": 0.4, "fvu_error": 0.002}, {"k": 16, "fvu": 0.3}, {"k": 32, "fvu": math.nan}]
    card = msgspec.convert(card_table(figures=FIGURES | {"by_k": at}), Card)
    lines = ["".join(text for text, _ in line) for line in card_lines(card, (), 80)]
    first = next(number for number, line in enumerate(lines) if "FVU by number of latents per row" in line)
    rows = [line[:39] for line in lines[first + 1 : first + 4]]
    assert [row.split()[0] for row in rows] == ["8", "16", "32"]
    assert [row[20:].strip() for row in rows] == ["0.4000 ± 0.0020", "0.3000", "–"]
    lengths = [row.count("━") for row in rows]
    assert (lengths, lengths[0]) == (sorted(lengths, reverse=True), 12), rows
    nothing = msgspec.convert(card_table(figures=FIGURES | {"by_k": [{"k": 2, "fvu": 0.0}]}), Card)
    assert card_lines(nothing, (), 80)


async def test_keys_for_latents_are_offered_only_if_there_are_features(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    put_card(data.sae(job_id))
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: "c Compare" in screen.query_one(Footer).plain)
        assert "f Features" not in screen.query_one(Footer).plain
        await pilot.press("f")
        await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen) and app.screen.query(Footer))
        await pilot.pause()
        assert not {"/ Search", "o Order", ": Go to", "= Nearest"} & {*app.screen.query_one(Footer).plain.split("  ")}


@pytest.mark.parametrize("width", [79, 117])
def test_explanations_have_mean_scores_with_errors_and_histograms(width: int) -> None:
    score = MeanScore(0.8544, 0.012, 40, (0, 0, 0, 0, 0, 4, 0, 0, 0, 8))
    summary = ExplainedLatents(n_latents=41, models=("Qwen3-8B",), prompts=("v1",), detection=score)
    card = msgspec.structs.replace(msgspec.convert(card_table(), Card), explained=summary)
    lines = ["".join(text for text, _ in line) for line in card_lines(card, (), width)]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert re.search(r"  latents described +41 ", text)
    assert re.search(r"  detection +0\.854 ± 0\.012", text)
    assert re.search(r"  detection +0 │ {5}▄ {3}█│ 1", text)
    assert "41 of 64 latents described by Qwen3-8B; mean detection 0.854 ± 0.012" in " ".join(text.split())
