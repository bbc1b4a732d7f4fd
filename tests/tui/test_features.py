"""Tests for the screen that shows an SAE's latents and their max-activating examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from support.features import ACTS, EFFECTS, IDS, MOVED, OF_PARTS, SCALING, SPREAD, features_file, flat
from support.tui import record_job, record_metrics, wait_until
from textual.pilot import Pilot
from textual.widgets import Input, Label, TextArea

from sae_tui.app import SaeApp
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.evaluation.outcome import DONE
from sae_tui.panels.latents import LatentDetail, LatentList, _last_cells, feature_lines
from sae_tui.screens.evaluate import EvaluateDialog
from sae_tui.screens.features import FeaturesScreen
from sae_tui.widgets.ask import Ask, AskText
from sae_tui.widgets.footer import Footer
from trainer.contract.paths import DataDir
from trainer.contract.runs.explanations import Explanation, record
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.latent_notes import NOTES, change_note, read_notes
from trainer.contract.runs.report_card import ROWS
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

MakeApp = Callable[..., SaeApp]
N = 65_536


@pytest.fixture
def job_id(data: DataDir) -> int:
    job_id = record_job(data, "a", JobState.FINISHED)
    record_metrics(data, job_id)
    put(data.sae(job_id))
    return job_id


def put(folder: Path, content: bytes | None = None) -> None:
    folder.mkdir(parents=True)
    (folder / FEATURES).write_bytes(content or features_file())


async def opened(pilot: Pilot[None], app: SaeApp) -> FeaturesScreen:
    """Open the first job, then its features."""
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(app.session.jobs[0].id)
    await wait_until(pilot, lambda: app.screen.name == "job")
    await pilot.press("f")
    await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen))
    screen = app.screen
    assert isinstance(screen, FeaturesScreen)
    await wait_until(pilot, lambda: "Reading" not in screen.query_one(LatentDetail).plain)
    return screen


def listed(screen: FeaturesScreen) -> list[list[str]]:
    return [line.split() for line in screen.query_one(LatentList).plain.splitlines()]


def title(screen: FeaturesScreen) -> str:
    return str(screen.query_one("#features-title", Label).content).strip()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_latents_are_listed_and_the_selected_one_is_shown_with_its_contexts(
    make_app: MakeApp, job_id: int, size: tuple[int, int]
) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        largest = ["LARGEST"] * (size[0] > 100), ["3.00"] * (size[0] > 100), ["4.00"] * (size[0] > 100)
        assert listed(screen) == [
            ["LATENT", "DENSITY", *largest[0], "FIRES", "ON"],
            ["0", "3.000%", *largest[2], "Lämb"],
            ["1", "8.000%", *largest[1], "the"],
        ]
        assert title(screen) == "Job 1 · 2 latents · 0 dense (> 10%), 0 never fire · 0.01 to 1 % first"
        detail = screen.query_one(LatentDetail)
        await wait_until(pilot, lambda: "Latent 0" in detail.plain)
        assert "fires on 3.000% of 100 rows, at most 4.00" in " ".join(detail.plain.split())
        # The most strongly activating token of every context is in the same column.
        first, second = [line for line in detail.plain.splitlines() if "Lämb" in line]
        assert first.index(" Lämb") == second.index(" Lämb")
        assert " the Lämbs" in first


async def test_keys_search_sort_and_go_to_latents(make_app: MakeApp, job_id: int) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        view = screen.query_one(LatentList)
        await pilot.press("down", "o", "o")
        await wait_until(pilot, lambda: "strongest first" in title(screen))
        # The cursor stays on the same latent.
        assert (list(view.latents), view.latent) == ([0, 1], 1)
        await ask(pilot, app, "slash", "the")
        await wait_until(pilot, lambda: "── only in their texts: 1 ─" in view.plain)
        assert (list(view.latents), view.latent) == ([1, 0], 1)
        assert title(screen) == "Job 1 · 'the': 1 fires on it, 1 has it only in its texts"
        await pilot.press("down")
        assert (view.latent, view.plain.splitlines()[3].split()[0]) == (0, "0")
        await ask(pilot, app, "slash", "läMB")
        await wait_until(pilot, lambda: title(screen) == "Job 1 · 'läMB': 1 fires on it")
        assert view.latents == [0]
        await ask(pilot, app, "slash", "cow")
        await wait_until(pilot, lambda: "No max-activating example contains" in last_notice(app))
        assert view.latents == [0]
        await pilot.press("escape")
        await wait_until(pilot, lambda: (list(view.latents), view.latent) == ([0, 1], 0))
        await pilot.press("equals_sign")
        await wait_until(pilot, lambda: view.latent == 1)
        await ask(pilot, app, "colon", "0")
        await wait_until(pilot, lambda: view.latent == 0)
        for wrong in ("2", "x", "9" * 40):
            await ask(pilot, app, "colon", wrong)
            await wait_until(
                pilot, lambda wrong=wrong: f"no latent {wrong}; the indices range from 0 to 1." in last_notice(app)
            )
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen.name == "job")


async def test_explanations_replace_the_tokens_and_are_found(make_app: MakeApp, job_id: int, data: DataDir) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        long = "lambs in several languages, " * 4
        record(
            data.sae(job_id), Explanation(latent=0, text=f"{long}end", detection=0.9, detection_error=0.06, model="m")
        )
        view, detail = screen.query_one(LatentList), screen.query_one(LatentDetail)
        # The screen shows an explanation that was written while it was open.
        await pilot.press("down", "up")
        await wait_until(pilot, lambda: "Explanation" in detail.plain)
        words = " ".join(detail.plain.split())
        assert f"Explanation {long}end Scores detection 0.90 ± 0.06 (chance 0.5), by m" in words
        assert "0   3.000%     4.00  lambs in several" in view.plain
        assert "1   8.000%     3.00  the" in view.plain
        record(data.sae(job_id), Explanation(latent=0, text=f"{long}end", problem="not scored"))
        await pilot.press("down", "up")
        await wait_until(pilot, lambda: "0   3.000%     4.00  Lämb" in view.plain)
        await ask(pilot, app, "slash", "languages")
        await wait_until(
            pilot,
            lambda: title(screen) == "Job 1 · 'languages': 0 fire on it, 1 has it only in its texts or explanations",
        )
        assert view.latents == [0]


def last_notice(app: SaeApp) -> str:
    return app.notices[-1].message if app.notices else ""


async def ask(pilot: Pilot[None], app: SaeApp, key: str, text: str) -> None:
    await pilot.press(key)
    await wait_until(pilot, lambda: isinstance(app.screen, Ask) and app.screen.query(Input))
    app.screen.query_one(Input).value = text
    await pilot.press("enter")
    await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen))


async def test_a_key_shows_the_next_sae_in_a_sweep(make_app: MakeApp, data: DataDir) -> None:
    job_id = record_job(data, "a", JobState.FINISHED)
    put(data.sae(job_id) / "k=16")
    put(data.sae(job_id) / "k=8", features_file({5: "other", 7: "words", 9: "s"}))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: "k=16" in title(screen))
        await pilot.press("m")
        await wait_until(pilot, lambda: "k=8" in title(screen) and listed(screen)[2][-1] == "other")


async def test_without_an_sae_the_screen_shows_the_reason(make_app: MakeApp, data: DataDir) -> None:
    record_job(data, "a", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        assert "Job 1 has no SAE to evaluate" in " ".join(screen.query_one(LatentDetail).plain.split())
        for key in ("down", "o", "equals_sign", "slash", "escape", "colon", "escape", "m"):
            await pilot.press(key)


async def test_a_missing_evaluation_is_offered_and_its_result_fills_the_screen(
    make_app: MakeApp, data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = record_job(data, "a", JobState.FINISHED)
    data.run(job_id).create()
    data.sae(job_id).mkdir(parents=True)
    (data.sae(job_id) / "cfg.json").touch()
    asked: list[request.EvaluationRequest] = []
    monkeypatch.setattr(request, "evaluate", lambda _, one: (asked.append(one), "job 1 is being evaluated")[1])
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.session.go.open_job(job_id)
        await wait_until(pilot, lambda: app.screen.name == "job")
        await pilot.press("f")
        await wait_until(pilot, lambda: isinstance(app.screen, EvaluateDialog))
        await pilot.press("enter")
        await wait_until(pilot, lambda: asked)
        screen = app.screen
        assert [(one.job_id, one.parts) for one in asked] == [(job_id, (ROWS,))]
        (data.sae(job_id) / FEATURES).write_bytes(features_file())
        with closing(Control(data.control_db)) as control:
            control.add_event(job_id, DONE, "is evaluated: FVU 0.2")
        await wait_until(pilot, lambda: last_notice(app) == "Job 1 is evaluated: FVU 0.2")
        await wait_until(pilot, lambda: "Latent 0" in screen.query_one(LatentDetail).plain)


async def test_a_key_on_the_job_screen_evaluates_an_ended_job(
    make_app: MakeApp, job_id: int, data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(request, "evaluate", lambda _, one: (asked.append(one.job_id), "")[1])
    data.run(job_id).create()
    (data.sae(job_id) / "cfg.json").touch()
    running = record_job(data, "b", JobState.RUNNING)
    record_metrics(data, running)
    app = make_app(4)
    async with app.run_test(size=(160, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        for one, is_offered in ((running, False), (job_id, True)):
            app.session.go.open_job(one)
            await wait_until(pilot, lambda one=one: app.session.detail and app.session.detail.view.id == one)
            await wait_until(pilot, lambda: "l Log" in app.screen.query_one(Footer).plain)
            assert ("e Evaluate" in app.screen.query_one(Footer).plain) == is_offered
        for key in ("escape", "enter"):
            await pilot.press("e")
            await wait_until(pilot, lambda: isinstance(app.screen, EvaluateDialog))
            assert asked == []
            await pilot.press(key)
        await wait_until(pilot, lambda: asked == [job_id])


async def test_only_visible_latents_are_read_from_a_large_file(
    make_app: MakeApp, data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = record_job(data, "a", JobState.FINISHED)
    many = {
        name: (dtype, code, [N, *shape], values * N)
        for name, dtype, code, shape, values in (
            ("n_fired", "I32", "i", [], [3]),
            ("largest", "F32", "f", [], [4.0]),
            ("mean", "F32", "f", [], [2.0]),
            ("histogram", "I32", "i", [2], [1, 2]),
            ("nearest", "I32", "i", [1], [1]),
            ("cosines", "F32", "f", [1], [0.25]),
            ("token_ids", "I32", "i", [2, 3], flat(IDS[0])),
            ("acts", "F32", "f", [2, 3], flat(ACTS[0])),
        )
    }
    put(data.sae(job_id), features_file(**many))
    read: list[int] = []
    feature = Features.feature
    monkeypatch.setattr(Features, "feature", lambda self, latent: (read.append(latent), feature(self, latent))[1])
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        assert len(screen.query_one(LatentList).latents) == N
        await pilot.press("end")
        await wait_until(pilot, lambda: f"Latent {N - 1}" in screen.query_one(LatentDetail).plain)
        assert max(read) == N - 1
        assert len(set(read)) < 200


def test_the_tokens_promoted_by_a_latent_are_shown_above_its_contexts(tmp_path: Path) -> None:
    put(tmp_path / "sae", features_file(**MOVED))
    features = Features(tmp_path / "sae" / FEATURES)
    for width in (20, 40, 80):
        lines = ["".join(text for text, _ in line) for line in feature_lines(features.feature(0), features, width)]
        promotes, suppresses = (line for line in lines if line.startswith(("Promotes", "Suppresses")))
        assert len(promotes) == len(suppresses) == width
        assert width < 40 or promotes.split() == ["Promotes", "Lämb", "+1.50"]


def test_a_context_fits_any_width_and_includes_its_strongest_token(tmp_path: Path) -> None:
    put(tmp_path / "sae")
    features = Features(tmp_path / "sae" / FEATURES)
    for width in range(10, 120):
        for latent in range(2):
            lines = feature_lines(features.feature(latent), features, width)
            assert max(sum(len(text) for text, _ in line) for line in lines[-2:]) <= width
    assert [text for text, style in lines[-1] if style == "full"] == [" the"]


def test_a_truncated_wide_character_hides_the_text_after_it(tmp_path: Path) -> None:
    put(tmp_path / "sae", features_file({5: "x", 7: "天气天", 9: "y"}))
    features = Features(tmp_path / "sae" / FEATURES)
    for width in range(12, 40):
        first = feature_lines(features.feature(0), features, width)[-2]
        text = "".join(text for text, _ in first)
        assert cell_len(text) <= width
        assert "天气天" in text or "y" not in text
    spans = [("z", "text"), ("天", "text"), ("气", "text")]
    assert ["".join(text for text, _ in _last_cells(spans, width)) for width in (5, 4, 3, 2)] == [
        "z天气", "天气", " 气", "气"
    ]  # fmt: skip


def test_a_character_split_across_tokens_has_the_shade_of_the_strongest_token(tmp_path: Path) -> None:
    put(tmp_path / "sae", features_file(SPREAD))
    features = Features(tmp_path / "sae" / FEATURES)
    lines = feature_lines(features.feature(0), features, 80)
    assert lines[-2][-2:] == ((" 天", "full"), ("气", "faint"))


def test_a_latents_stability_and_firing_correlation_are_wrapped_not_cut(tmp_path: Path) -> None:
    of_two = {
        "stability": ("F32", "f", [2], [0.25, 0.9375]),
        "firing_correlation": ("F32", "f", [2], [math.nan, 0.875]),
    }
    (file := tmp_path / "features.safetensors").write_bytes(features_file(**of_two))
    features = Features(file)
    words = "Stability 0.94, mean cosine with the nearest latent of each other seed; firing correlation 0.88"
    for width in (40, 120):
        lines = feature_lines(features.feature(1), features, width)
        text = " ".join("".join(part for part, _ in line) for line in lines)
        assert words in " ".join(text.split())
    assert not [line for line in feature_lines(features.feature(0), features, 120) if "firing" in str(line)]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_latents_are_sorted_and_filtered_by_their_effects(
    make_app: MakeApp, data: DataDir, size: tuple[int, int]
) -> None:
    job_id = record_job(data, "a", JobState.FINISHED)
    record_metrics(data, job_id)
    put(data.sae(job_id), features_file(**EFFECTS))
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        while screen.order != "effect":
            await pilot.press("o")
        await wait_until(pilot, lambda: "EFFECT" in screen.query_one(LatentList).plain)
        largest = ["LARGEST"] * (size[0] > 100)
        rows = [["1", "+7.8e-03"], ["0", "-2.5e-01"]]
        assert listed(screen)[0] == ["LATENT", "EFFECT", *largest, "FIRES", "ON"]
        assert [row[:2] for row in listed(screen)[1:]] == rows
        assert title(screen).endswith("most helpful first")
        words = "Effect -0.25 nats per token if ablated, -2.5 per row on which it fires"
        assert words in " ".join(screen.query_one(LatentDetail).plain.split())
        await pilot.press("o")
        assert screen.order == "latent", "the SAE is not a crosscoder, so it has no norms"
        await pilot.press("slash", *"effect:>0.001", "enter")
        await wait_until(pilot, lambda: title(screen).endswith("'effect:>0.001': 1 latent"))
        assert [row[:2] for row in listed(screen)[1:]] == rows[:1]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_crosscoder_has_a_column_for_each_part(make_app: MakeApp, data: DataDir, size: tuple[int, int]) -> None:
    job_id = record_job(data, "a", JobState.FINISHED)
    record_metrics(data, job_id)
    put(data.sae(job_id), features_file(**OF_PARTS, **SCALING))
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        density = ["DENSITY"] * (size[0] > 100), ["8.000%"] * (size[0] > 100)
        assert listed(screen)[0] == ["LATENT", *density[0], "A", "B", "FIRES", "ON"]
        assert listed(screen)[2] == ["1", *density[1], "0.06", "0.94", "the"]
        await pilot.press("o", "o", "o")
        assert title(screen).endswith("by relative norm") or size[0] < 100
        assert [line[0] for line in listed(screen)[1:]] == ["1", "0"]
        await pilot.press("up")
        detail = screen.query_one(LatentDetail)
        await wait_until(pilot, lambda: "Latent 1" in detail.plain)
        lines = [" ".join(line.split()) for line in detail.plain.splitlines()]
        assert "Parts A base, B chat" in lines
        assert "β error A 0.12 B 1.00 ν 0.12" in lines
        assert "Scaling confirmed as only in B" in lines


def notes_of(data: DataDir, job_id: int) -> dict[int, tuple[bool, str, str]]:
    return {latent: note.content for latent, note in read_notes(data.sae(job_id)).by_latent.items()}


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_keys_star_name_and_annotate_a_latent_and_undo_the_changes(
    make_app: MakeApp, data: DataDir, job_id: int, size: tuple[int, int]
) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        view, detail = screen.query_one(LatentList), screen.query_one(LatentDetail)
        await pilot.press("down", "asterisk")
        await wait_until(pilot, lambda: view.plain.splitlines()[2].startswith("★     1 "))
        await wait_until(pilot, lambda: "Latent 1 ★" in detail.plain)
        await ask(pilot, app, "R", "articles")
        await wait_until(pilot, lambda: "articles · the"[: size[0] // 8] in view.plain)
        await pilot.press("N")
        await wait_until(pilot, lambda: isinstance(app.screen, AskText) and app.screen.query(TextArea))
        await pilot.press("a", "enter", "b", "ctrl+s")
        await wait_until(pilot, lambda: notes_of(data, job_id) == {1: (True, "articles", "a\nb")})
        await wait_until(pilot, lambda: "Name        articles\nNote        a\n            b\n" in detail.plain)
        # The cursor stays on the latent, and the list keeps its order until another is chosen.
        assert (view.latents, view.latent) == ([0, 1], 1)
        await pilot.press("o")
        await wait_until(pilot, lambda: (view.latents, view.latent) == ([1, 0], 1))
        await ask(pilot, app, "slash", "ARTIC")
        await wait_until(pilot, lambda: "'ARTIC': 1 by your notes, 0 fire on it" in title(screen))
        assert view.latents == [1]
        await pilot.press("escape")
        for left in ((True, "articles", ""), (True, "", "")):
            await pilot.press("u")
            await wait_until(pilot, lambda left=left: notes_of(data, job_id) == {1: left})
        await pilot.press("u")
        await wait_until(pilot, lambda: not (data.sae(job_id) / NOTES).exists())
        await wait_until(pilot, lambda: "★" not in view.plain + detail.plain)
        await pilot.press("u")
        await wait_until(pilot, lambda: "No star, name or note has been changed" in last_notice(app))


async def test_stars_set_in_quick_succession_alternate(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        view = screen.query_one(LatentList)
        await pilot.press(*["asterisk"] * 7)
        await wait_until(pilot, lambda: len(screen._changes) == 7)
        assert notes_of(data, job_id) == {0: (True, "", "")}
        assert view.plain.count("★") == 1


async def test_a_change_keeps_what_another_process_has_written(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        change_note(data.sae(job_id), 0, lambda note: replace(note, name="theirs"))
        change_note(data.sae(job_id), 1, lambda note: replace(note, starred=True))
        await pilot.press("asterisk")
        await wait_until(pilot, lambda: notes_of(data, job_id)[0] == (True, "theirs", ""))
        await wait_until(pilot, lambda: "theirs · Lämb" in screen.query_one(LatentList).plain)
        assert notes_of(data, job_id)[1] == (True, "", "")


async def test_a_read_only_app_shows_notes_and_writes_none(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    change_note(data.sae(job_id), 0, lambda note: replace(note, name="sheep"))
    before = (data.sae(job_id) / NOTES).read_bytes()
    app = make_app(4, readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        assert "sheep · Lämb" in screen.query_one(LatentList).plain
        assert "Star" not in app.screen.query_one(Footer).plain
        for key in ("asterisk", "R", "N", "u"):
            n = len(app.notices)
            await pilot.press(key)
            await wait_until(pilot, lambda n=n: len(app.notices) > n)
            assert "read-only" in last_notice(app)
            assert app.screen is screen
    assert (data.sae(job_id) / NOTES).read_bytes() == before


async def test_notes_that_cannot_be_read_or_written_are_reported(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    (data.sae(job_id) / NOTES).write_text('{"latent": 0, "name": "\\u001b[2Jred"}\n<<<<<<< HEAD\n')
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: "line 2 is a mark of a merge conflict" in last_notice(app))
        assert "\x1b" not in screen.query_one(LatentList).plain + screen.query_one(LatentDetail).plain
        n = len(app.notices)
        await pilot.press("asterisk")
        await wait_until(pilot, lambda: len(app.notices) > n)
        assert "line 2 is a mark of a merge conflict" in last_notice(app)
        assert "<<<<<<<" in (data.sae(job_id) / NOTES).read_text()
