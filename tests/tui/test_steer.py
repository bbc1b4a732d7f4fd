"""Tests for the screen that continues a prompt with and without steering."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.features import OF_PARTS, features_file
from support.model_screens import open_model, record_sae, requests, stubs, use_stub
from support.tui import wait_until
from textual.pilot import Pilot
from textual.widgets import Input, Label

from sae_tui.app import SaeApp
from sae_tui.panels.steered import SteeredText, answer_lines
from sae_tui.screens.steer import FieldError, SteerScreen, steered_in
from sae_tui.screens.text import TextScreen
from sae_tui.widgets.text_field import TextField
from sae_tui.widgets.tick import Tick
from trainer.contract.answers.interaction import Continued, Generated, MovedToken, Steered, TokenKl
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import FEATURES

MakeApp = Callable[..., SaeApp]
SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40)])


@pytest.fixture(autouse=True)
def _job(data: DataDir) -> None:
    record_sae(data)


def shown(screen: SteerScreen) -> str:
    return " ".join(screen.query_one(SteeredText).plain.split())


def about(screen: SteerScreen) -> str:
    return str(screen.query_one("#steer-about", Label).content)


async def opened(pilot: Pilot[Any], app: SaeApp, mode: str, signs: Path, prompt: str = "The king") -> SteerScreen:
    """Open the screen for latent 0, with a prompt."""
    screen = await open_model(pilot, app, "S", mode, signs)
    assert isinstance(screen, SteerScreen)
    screen.query_one(TextField).text = prompt
    return screen


@SIZES
async def test_both_continuations_and_the_effect_on_predictions_are_shown(
    make_app: MakeApp, tmp_path: Path, size: tuple[int, int]
) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app, "plain", tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "KL DIVERGENCE" in shown(screen))
        text = screen.query_one(SteeredText).plain
        lines = text.splitlines()
        if size[0] >= 100:
            assert any("was a ▸wise ruler" in line and "was a ▸sheep and" in line for line in lines)
        else:
            assert lines.index("WITHOUT STEERING") < lines.index("WITH STEERING")
        assert ["sheep", "+3.50", "0.2%", "→", "25.0%"] in [line.replace('"', "").split() for line in lines]
        assert "mean 0.938, largest 2.250 nats" in text
        assert "10 of 30 tokens in" in text
        assert requests(tmp_path) == [
            {
                "request": "generate", "prompt": "The king", "latents": [{"latent": 0, "strength": 2.0}],
                "is_chat": False, "adds": False, "only_generated": False, "n_tokens": 30, "temperature": 0.0, "seed": 0,
                "part": None,
            }
        ]  # fmt: skip


async def test_every_field_and_switch_is_sent(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "plain", tmp_path)
        await wait_until(pilot, lambda: screen.query_one("#chat").display)
        for name, value in {
            "latents": "1, 0=-0.5",
            "strength": "3",
            "tokens": "4",
            "temperature": "0.7",
            "seed": "9",
        }.items():
            screen.query_one(f"#{name}", Input).value = value
        await wait_until(pilot, lambda: "1 → 9.00: the · 0 → -2.00: Lämb" in about(screen))
        for name in ("adds", "only-generated", "chat"):
            screen.query_one(f"#{name}", Tick).focus()
            await pilot.press("space")
        await wait_until(pilot, lambda: "1 + 9.00: the · 0 + -2.00: Lämb" in about(screen))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "4 of 4 tokens" in shown(screen))
        assert requests(tmp_path) == [
            {
                "request": "generate", "prompt": "The king",
                "latents": [{"latent": 1, "strength": 3.0}, {"latent": 0, "strength": -0.5}],
                "is_chat": True, "adds": True, "only_generated": True, "n_tokens": 4, "temperature": 0.7, "seed": 9,
                "part": None,
            }
        ]  # fmt: skip
        # A changed field and Enter run it again.
        for name in ("adds", "ablate"):
            screen.query_one(f"#{name}", Tick).toggle()
        screen.query_one("#latents", Input).value = "1"
        screen.query_one("#latents").focus()
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(requests(tmp_path)) == 2 and not screen.is_waiting)
        assert requests(tmp_path)[1]["latents"] == [{"latent": 1, "strength": 0.0}]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", " ", "Prompt: enter at least one word"),
        ("latents", "5", "Latents: there is no latent 5; the indices range from 0 to 1"),
        ("latents", "0=x", "Latents: the strength of latent 0 is not a number: x"),
        ("latents", "", "Latents: enter at least one number, like 7 or 7, 12=0.5"),
        ("strength", "nan", "Strength: enter a number"),
        ("tokens", "0", "Tokens: enter a whole number from 1 to 4,096"),
        ("temperature", "-1", "Temperature: enter a number from 0 to 100"),
        ("seed", "1.5", "Seed: enter a whole number"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_is_sent(
    make_app: MakeApp, tmp_path: Path, field: str, value: str, message: str
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "plain", tmp_path)
        widget = screen.query_one(f"#{field}")
        setattr(widget, "text" if field == "prompt" else "value", value)
        await pilot.press("enter")
        await wait_until(pilot, lambda: message in about(screen))
        assert app.focused is widget
        assert not requests(tmp_path)


async def test_escape_stops_a_generation_and_keeps_it_and_then_goes_back(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "endless", tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "generating" in shown(screen))
        await pilot.press("escape")
        await wait_until(pilot, lambda: "tokens in" in shown(screen) and "stopped" in shown(screen))
        assert app.screen is screen
        assert "KL DIVERGENCE" in shown(screen)
        assert requests(tmp_path)[0]["request"] == "generate"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is not screen)
        assert len(stubs()) == 1


async def test_leaving_the_screen_ends_its_generation(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "endless", tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "generating" in shown(screen))
        await pilot.press("escape", "escape")
        await wait_until(pilot, lambda: app.screen is not screen)
        await wait_until(pilot, lambda: app.session.model._now is None)
        assert len(stubs()) == 1


@pytest.mark.parametrize("mode", ["endless", "falls"])
async def test_a_process_that_dies_while_generating_is_started_again_by_enter(
    make_app: MakeApp, tmp_path: Path, mode: str
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, mode, tmp_path)
        await pilot.press("enter")
        if mode == "endless":
            await wait_until(pilot, lambda: "generating" in shown(screen))
            os.kill(stubs()[0].pid, signal.SIGKILL)
            words = (
                "The model's process was killed by signal 9; it may have run out of memory. Press Enter to start again"
            )
        else:
            words = "The model's process ended with code 7. Press Enter to start again"
        await wait_until(pilot, lambda: words in shown(screen))
        use_stub(app, "plain", tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "KL DIVERGENCE" in shown(screen))


async def test_a_model_that_does_not_predict_next_tokens_cannot_be_steered(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "masked", tmp_path)
        await wait_until(pilot, lambda: "tiny-lm does not predict next tokens" in shown(screen))
        assert not screen.query_one("#chat").display
        await pilot.press("enter")
        await pilot.pause()
        assert not requests(tmp_path)


async def test_the_text_screen_passes_its_text_and_latent_on(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        screen.query_one(TextField).text = "two woolly lambs"
        await pilot.press("enter")
        await wait_until(pilot, lambda: screen._read)
        await pilot.press("enter", "end", "S")
        await wait_until(pilot, lambda: isinstance(app.screen, SteerScreen) and app.screen.query(TextField))
        assert app.screen.query_one(TextField).text == "two woolly lambs"
        assert app.screen.query_one("#latents", Input).value == "1"
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, TextScreen))


def test_latents_are_read_with_their_own_strengths() -> None:
    assert steered_in("7, 12=0.5 3=-1e1", 2.0, 20) == (Steered(7, 2.0), Steered(12, 0.5), Steered(3, -10.0))
    for wrong in ("-1", "x", "7=", "7=inf", "20", "٣"):
        with pytest.raises(FieldError):
            steered_in(wrong, 2.0, 20)


def drawn(lines: object) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]  # type: ignore[attr-defined]


def test_the_first_difference_is_marked_at_the_start_of_a_word() -> None:
    both = answer_lines(Continued(" was kind and good", " was king of all", 4), 40)
    assert drawn(both) == ["WITHOUT STEERING", " was ▸kind and good", "WITH STEERING", " was ▸king of all"]
    # While a text is generated, the other one may only be behind; at the end, it has ended.
    assert "▸" not in str(answer_lines(Continued(" was", " was king", 2), 40))
    ended = answer_lines(Generated(" was", " was king", 2, (), ()), 40)
    assert drawn(ended)[:4] == ["WITHOUT STEERING", " was▸", "WITH STEERING", " was▸ king"]
    assert "WITH STEERING, the same" in drawn(answer_lines(Continued(" a", " a", 1), 40))


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40)])
async def test_the_part_of_a_crosscoder_can_be_chosen(
    make_app: MakeApp, data: DataDir, tmp_path: Path, size: tuple[int, int]
) -> None:
    for folder in data.root.glob("saes/*"):
        (folder / FEATURES).write_bytes(features_file(**OF_PARTS))
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app, "plain", tmp_path)
        part = screen.query_one("#part", Input)
        await pilot.pause()
        assert screen.region.contains_region(part.region)
        assert screen.query_one("#latents").size.width >= 4
        part.value = "c"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Part: enter A, B or all" in about(screen))
        assert app.focused is part
        part.value = "b"
        await wait_until(pilot, lambda: "only in chat · 0 → 8.00" in about(screen))
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(requests(tmp_path)) == 1 and not screen.is_waiting)
        part.value = "all"
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(requests(tmp_path)) == 2)
        assert [request["part"] for request in requests(tmp_path)] == [1, None]


async def test_a_late_event_about_an_earlier_change_keeps_the_sentence_about_a_wrong_field(
    make_app: MakeApp, tmp_path: Path
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "plain", tmp_path)
        seed = screen.query_one("#seed", Input)
        seed.value = "1.5"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Seed: enter a whole number" in about(screen))
        screen.post_message(Input.Changed(seed, "1.5"))
        await pilot.pause()
        assert "Seed: enter a whole number" in about(screen)
        seed.value = "15"
        await wait_until(pilot, lambda: "Seed" not in about(screen))


def test_kl_divergences_are_shaded_by_their_share_of_the_largest() -> None:
    kl = tuple(TokenKl(text, value) for text, value in ((" a", 0.0), (" b", 1.0), (" c", 4.0), (" d", 2.5)))
    moved = (MovedToken(" x", 1.0, 0.25, 0.5),)
    lines = answer_lines(Generated(" c d", " c e", 2, moved, kl), 80)
    (tokens,) = [line for line in lines if len(line) > 4]
    assert tokens == ((" a", "text"), (" b", "faint"), ("│", "accent"), (" c", "full"), (" d", "strong"))
    assert any("mean 1.875, largest 4.000 nats, after" in line for line in drawn(lines))


@pytest.mark.parametrize("size", [(60, 20), (75, 24), (76, 24)])
async def test_every_field_and_switch_is_whole_in_a_narrow_window(
    make_app: MakeApp, tmp_path: Path, size: tuple[int, int]
) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app, "plain", tmp_path)
        await wait_until(pilot, lambda: screen.query_one("#chat").display)
        await pilot.pause()
        fields = [screen.query_one(TextField), *screen.query(Input), *screen.query(Tick)]
        for field in fields:
            assert screen.region.contains_region(field.region), field.id
            assert field.size.width >= (len(str(field.label)) if isinstance(field, Tick) else 4), field.id
        # A tick is as wide as its words, and no field covers another one.
        regions = [field.region for field in fields]
        assert not any(one.overlaps(other) for one in regions for other in regions if one is not other)
        assert screen.query_one(SteeredText).size.height >= 5
        ticks = ("ablate", "adds"), ("only-generated", "chat")
        for name in ("latents", "strength", *ticks[0], "tokens", "temperature", "seed", *ticks[1]):
            await pilot.press("tab")
            assert screen.focused
            assert screen.focused.id == name
