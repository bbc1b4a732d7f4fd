"""Tests for the screen that reads a text with an SAE."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support import model_stub
from support.model_screens import open_browser, open_model, record_sae, requests, stubs
from support.model_stub import WORD, act
from support.tui import record_job, wait_until
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from sae_tui.app import SaeApp
from sae_tui.jobs.evaluation.request import ReservedGpu
from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.jobs.loaded_model import ChosenSae, Failed, LoadedModel, ModelLoaded
from sae_tui.panels.latents import LatentList, shade
from sae_tui.panels.tokens import TokenText, wrapped
from sae_tui.screens.features import FeaturesScreen
from sae_tui.screens.model_screen import ModelNews
from sae_tui.screens.steer import SteerScreen
from sae_tui.screens.text import TextScreen
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.table import KeyedTable
from sae_tui.widgets.text_field import TextField
from sae_tui.widgets.tick import Tick
from trainer.contract.answers.interaction import FiringLatent, ReadText, TextRead, TextToken
from trainer.contract.paths import DataDir
from trainer.contract.store.states import JobState

MakeApp = Callable[..., SaeApp]
LARGEST = 4.0  # of latent 0
SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40)])


@pytest.fixture(autouse=True)
def _job(data: DataDir) -> None:
    record_sae(data)


def shown(screen: TextScreen) -> str:
    """Return the text of the panel with the tokens or a message, in one line."""
    return " ".join(screen.query_one(TokenText).plain.split())


def styles(screen: TextScreen) -> list[tuple[str, str]]:
    """Return the drawn pieces of tokens with their styles, without the title."""
    view = screen.query_one(TokenText)
    return [span for line in view._lines[view.fixed_lines :] for span in line]


async def type_text(pilot: Pilot[Any], screen: TextScreen, text: str) -> None:
    screen.query_one(TextField).focus()
    screen.query_one(TextField).text = text
    await pilot.press("enter")


async def has_read(pilot: Pilot[Any], screen: TextScreen) -> None:
    await wait_until(pilot, lambda: screen.query_one(TokenText)._texts)


@SIZES
async def test_tokens_are_shaded_by_the_activations_that_were_sent(
    make_app: MakeApp, tmp_path: Path, size: tuple[int, int]
) -> None:
    app = make_app(4)
    text = "a lamb and the wooly lambs ran"
    async with app.run_test(size=size) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        await type_text(pilot, screen, text)
        await has_read(pilot, screen)
        words = WORD.findall(text)
        expected = ["dim", *(shade(act(word), LARGEST) for word in words[1:])]
        assert [(word, style.split()[0]) for word, style in styles(screen)] == list(zip(words, expected, strict=True))
        assert {"faint", "weak", "full", "text"} & set(expected)
        assert "not trained on" in str(screen.query_one(TokenText)._titles)
        # The cursor starts on the token on which the latent is strongest.
        strongest = max(range(1, len(words)), key=lambda at: act(words[at]))
        assert screen.query_one(TokenText).cursor == strongest
        table = screen.query_one(KeyedTable)
        assert [row.key for row in table.rows] == ["0", "1"]
        assert [text for text, _ in table.rows[0].cells][1:] == ["4.00", "100%", "Lämb"]
        await pilot.press("home")
        await wait_until(pilot, lambda: screen.query_one(TokenText).cursor == 0)
        assert app.focused is screen.query_one(TokenText)


async def test_another_latent_shades_the_text_and_opens_in_the_browser(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        await type_text(pilot, screen, "the woolly lambs")
        await has_read(pilot, screen)
        await pilot.press("enter", "end", "enter")
        await wait_until(pilot, lambda: screen.latent == 1)
        assert {style.split()[0] for _, style in styles(screen)[1:]} == {shade(1.5, 3.0)}
        await pilot.press("f")
        await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen))
        assert app.screen.query_one(LatentList).latent == 1


async def test_a_text_is_read_again_as_a_chat_message(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        await type_text(pilot, screen, "the woolly lambs")
        await has_read(pilot, screen)
        await pilot.press("f12")
        await wait_until(pilot, lambda: len(requests(tmp_path)) == 2 and screen.query_one(TokenText)._texts)
        assert [(one["text"], one["is_chat"]) for one in requests(tmp_path)] == [
            ("the woolly lambs", False), ("the woolly lambs", True),
        ]  # fmt: skip
        # The template's tokens are shaded, but not the first one.
        answer = [TextToken(word, (FiringLatent(0, 4.0),), is_counted=False) for word in ("<bos>", "<user>")]
        screen.post_message(ModelNews(screen._n_requests, TextRead(tuple(answer))))
        await wait_until(pilot, lambda: "<user>" in shown(screen))
        assert [(word, style.split()[0]) for word, style in styles(screen)] == [("<bos>", "dim"), ("<user>", "full")]
        assert "special tokens: not trained on" in str(screen.query_one(TokenText)._titles)
        await pilot.press("S")
        await wait_until(pilot, lambda: isinstance(app.screen, SteerScreen) and app.screen.loaded)
        assert app.screen.query_one("#chat", Tick).value


async def test_a_model_without_a_chat_template_reads_texts_as_they_are(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "masked", tmp_path)
        await type_text(pilot, screen, "the woolly lambs")
        await has_read(pilot, screen)
        await pilot.press("f12")
        await wait_until(pilot, lambda: any("no chat template" in str(one.message) for one in app._notifications))
        assert len(requests(tmp_path)) == 1


async def test_text_typed_while_the_model_loads_is_read_as_soon_as_it_is_loaded(
    make_app: MakeApp, tmp_path: Path
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "slow", tmp_path)
        await wait_until(
            pilot, lambda: "Loading the SAE" in shown(screen) and "loading the model, 50 %" in shown(screen)
        )
        await pilot.press("o", "n", "e")
        assert screen.query_one(TextField).text == "one"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "loading the model" in shown(screen))
        (tmp_path / "loaded").touch()
        (tmp_path / "answers").touch()
        await has_read(pilot, screen)
        assert requests(tmp_path) == [{"request": "read", "text": "one", "is_chat": False, "latents": [0]}]


async def test_the_answer_to_an_older_request_never_replaces_a_newer_one(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "slow", tmp_path)
        (tmp_path / "loaded").touch()
        await type_text(pilot, screen, "first words")
        await wait_until(pilot, lambda: len(requests(tmp_path)) == 1)
        old = screen._n_requests
        await type_text(pilot, screen, "second text")
        (tmp_path / "answers").touch()
        await has_read(pilot, screen)
        assert shown(screen).endswith("second text")
        screen.post_message(ModelNews(old, TextRead(())))
        screen.post_message(ModelNews(old, Failed("old", is_loaded=False)))
        await pilot.pause()
        assert shown(screen).endswith("second text")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("lost", "There is no model /models/lost. Press Enter to start again"),
        (
            "dies",
            "The model's process ended with code 3: Segmentation fault in the driver. Press Enter to start again",
        ),
        ("refuses", "The text has 9,000 tokens; enter at most 2,048."),
    ],
)
async def test_a_failure_is_one_sentence_and_enter_tries_again(
    make_app: MakeApp, tmp_path: Path, mode: str, message: str
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", mode, tmp_path)
        await type_text(pilot, screen, "the lamb")
        await wait_until(pilot, lambda: message in shown(screen))
        app.session.model.command = (*app.session.model.command[:2], "plain", str(tmp_path))
        for process in stubs():
            process.kill()
            process.wait()
        await type_text(pilot, screen, "the lamb")
        await has_read(pilot, screen)


async def test_another_language_model_can_be_named_for_the_session(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "lost", tmp_path)
        await wait_until(pilot, lambda: screen.failed)
        app.session.model.command = (*app.session.model.command[:2], "plain", str(tmp_path))
        await pilot.press("f2")
        await wait_until(pilot, lambda: isinstance(app.screen, Ask) and app.screen.query(Input))
        app.screen.query_one(Input).value = "/models/tiny"
        await pilot.press("enter")
        await wait_until(pilot, lambda: screen.loaded)
        (process,) = stubs()
        assert process.cmdline()[-4:-1] == ["--model", "/models/tiny", "--"]
        await pilot.press("escape", "T")
        await wait_until(pilot, lambda: app.screen is not screen and app.screen.name == "text" and app.screen.loaded)
        assert stubs() == [process]


async def test_a_process_killed_while_it_reads_is_started_again_by_enter(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "slow", tmp_path)
        (tmp_path / "loaded").touch()
        await type_text(pilot, screen, "the lamb")
        await wait_until(pilot, lambda: requests(tmp_path))
        os.kill(stubs()[0].pid, signal.SIGKILL)
        await wait_until(pilot, lambda: "was killed by signal 9" in shown(screen))
        (tmp_path / "answers").touch()
        await pilot.press("enter")
        await has_read(pilot, screen)


async def test_the_model_stays_loaded_between_screens_and_ends_with_the_app(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        await wait_until(pilot, lambda: screen.loaded)
        (process,) = stubs()
        await pilot.press("escape", "S")
        await wait_until(pilot, lambda: app.screen.name == "steer" and app.screen.loaded)
        assert stubs() == [process]
    assert not process.is_running()
    assert stubs() == []


async def test_leaving_the_app_while_the_model_loads_leaves_no_process(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_model(pilot, app, "T", "slow", tmp_path)
        await wait_until(pilot, stubs)
    assert stubs() == []


async def test_another_sae_replaces_the_process_even_while_it_loads(data: DataDir, tmp_path: Path) -> None:
    record_sae(data, "k=8")
    model = LoadedModel(data, lambda job: None)
    news: list[object] = []
    model.command = (sys.executable, str(model_stub.__file__), "slow", str(tmp_path))
    model.ask("one", ChosenSae(1), None, news.append)
    await _until(lambda: len(stubs()) == 1)
    (first,) = stubs()
    model.command = (sys.executable, str(model_stub.__file__), "plain", str(tmp_path))
    model.ask("two", ChosenSae(2, "k=8"), ReadText("the lamb"), news.append)
    await _until(lambda: any(isinstance(one, TextRead) for one in news))
    assert not first.is_running()
    (second,) = stubs()
    assert second.cmdline()[-1] == str(data.sae(2) / "k=8")
    model.close()
    assert stubs() == []


async def test_a_model_that_cannot_be_loaded_is_not_loaded_again_for_each_waiting_request(
    data: DataDir, tmp_path: Path
) -> None:
    model = LoadedModel(data, lambda job: None)
    first: list[object] = []
    second: list[object] = []
    model.command = (sys.executable, str(model_stub.__file__), "slow", str(tmp_path))
    model.ask("one", ChosenSae(1), None, first.append)
    await _until(stubs)
    model.ask("two", ChosenSae(1), ReadText("the lamb"), second.append)
    stubs()[0].kill()
    await _until(lambda: second)
    assert isinstance(second[0], Failed)
    assert first[-1] == second[0]
    assert stubs() == []
    model.close()


@pytest.mark.parametrize("is_on_gpu", [True, False])
async def test_an_idle_process_ends_and_the_next_request_starts_it_again(
    data: DataDir, tmp_path: Path, is_on_gpu: bool
) -> None:
    gpu = ReservedGpu(3, "GPU-a", "nvml", str(tmp_path / "locks")) if is_on_gpu else None
    model = LoadedModel(data, lambda job: gpu, *((3600, 0.01) if is_on_gpu else (0.01, 3600)))
    model.command = (sys.executable, str(model_stub.__file__), "plain", str(tmp_path))
    for _ in range(2):
        news: list[object] = []
        model.ask("one", ChosenSae(1), None, news.append)
        await _until(lambda news=news: any(isinstance(one, ModelLoaded) for one in news))
        await _until(lambda: not stubs())
    model.close()


async def test_a_gpu_is_locked_while_the_model_is_loaded_and_then_released(data: DataDir, tmp_path: Path) -> None:
    gpu = ReservedGpu(3, "GPU-a", "nvml", str(tmp_path / "locks"))
    model, news = LoadedModel(data, lambda job: gpu), []
    model.command = (sys.executable, str(model_stub.__file__), "plain", str(tmp_path))
    model.ask("one", ChosenSae(1), None, news.append)
    await _until(lambda: any(isinstance(one, ModelLoaded) for one in news))
    assert news[-1].device == "GPU 3"
    (process,) = stubs()
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert process.cmdline()[-4:-2] == ["--device", "cuda"]
    assert not GpuLocks(Path(gpu.locks), [gpu.uuid]).take()
    process.kill()
    await _until(lambda: not stubs())
    model.ask("one", ChosenSae(1), ReadText("the lamb"), news.append)
    await _until(lambda: isinstance(news[-1], TextRead))
    model.close()
    assert GpuLocks(Path(gpu.locks), [gpu.uuid]).take()


async def test_without_an_idle_gpu_a_job_from_a_gpu_runs_on_the_cpu_and_says_so(data: DataDir, tmp_path: Path) -> None:
    job_id = record_job(data, "b", JobState.FINISHED, device="cuda")
    data.sae(job_id).mkdir(parents=True)
    model, news = LoadedModel(data, lambda job: None), []
    model.command = (sys.executable, str(model_stub.__file__), "plain", str(tmp_path))
    model.ask("one", ChosenSae(job_id), None, news.append)
    await _until(lambda: any(isinstance(one, ModelLoaded) for one in news))
    assert news[-1].device == "the CPU, since no GPU is idle"
    model.close()


async def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_pasted_text_with_wide_and_control_characters_is_drawn_within_the_width(
    make_app: MakeApp, tmp_path: Path
) -> None:
    pasted = "天气 naïve 🙂 word\x1b[31m\x07\r\nline\u202e two \x9b" * 100
    assert len(pasted) >= 3_000
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        app.post_message(events.Paste(pasted))
        await wait_until(pilot, lambda: len(screen.query_one(TextField).text) > 2_000)
        await pilot.press("enter")
        await has_read(pilot, screen)
        (request,) = requests(tmp_path)
        assert request["text"] == "天气 naïve 🙂 word[31m\nline two " * 100
        view = screen.query_one(TokenText)
        for size in ((80, 24), (40, 20), (120, 40)):
            await pilot.resize_terminal(*size)
            await wait_until(pilot, lambda size=size: view.size.width and view.size.width <= size[0])
            await pilot.pause()
            widths = [sum(cell_len(text) for text, _ in line) for line in view._lines[view.fixed_lines :]]
            assert max(widths) <= view.size.width
            assert "".join(text for text, _ in styles(screen)) == request["text"].rstrip().replace("\n", "⏎")
            for strip in (view.render_line(y) for y in range(view.size.height)):
                assert strip.cell_length == view.size.width
                assert strip.text.isprintable()
        await pilot.press("end")
        await wait_until(pilot, lambda: view.cursor == len(view._texts) - 1)
        top = round(view.scroll_y)
        assert top <= view._place()[0] < top + view.size.height


async def test_the_cursor_moves_by_token_and_by_row_and_follows_clicks(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        await type_text(pilot, screen, " ".join(f"word{number:02d}" for number in range(30)))
        await has_read(pilot, screen)
        view = screen.query_one(TokenText)
        await pilot.press("home", "right", "right")
        await wait_until(pilot, lambda: view.cursor == 2)
        in_row = len(view._rows[0])
        await pilot.press("down")
        await wait_until(pilot, lambda: view.cursor == in_row + 1)
        await pilot.press("up", "left")
        await wait_until(pilot, lambda: view.cursor == 0)
        await pilot.click(view, offset=(1, 1 + 1))
        await wait_until(pilot, lambda: view.cursor == in_row)


async def test_up_recalls_the_last_texts_and_down_returns_to_the_draft(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_model(pilot, app, "T", "plain", tmp_path)
        field = screen.query_one(TextField)
        for text in ("first text", "second text"):
            await type_text(pilot, screen, text)
            await has_read(pilot, screen)
        field.focus()
        field.text = "draft"
        recalled = []
        for key in ("up", "up", "up", "down", "down"):
            await pilot.press(key)
            recalled.append(field.text)
        assert recalled == ["second text", "first text", "first text", "second text", "draft"]


async def test_read_only_mode_starts_no_process(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4, readonly=True)
    async with app.run_test(size=(80, 24)) as pilot:
        browser = await open_browser(pilot, app, "plain", tmp_path)
        for key in "TS":
            await pilot.press(key)
            await pilot.pause()
            assert app.screen is browser
        assert "read-only" in app.notices[-1].message
        assert stubs() == []


async def test_an_sae_on_another_host_is_not_offered(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        browser = await open_browser(pilot, app, "plain", tmp_path)
        app.session.place = " on gpu1"
        await pilot.press("T")
        await wait_until(pilot, lambda: app.notices)
        assert app.screen is browser
        assert app.notices[-1].message == "! This SAE is on gpu1. Start sae-tui there to use it in its language model."


async def test_a_job_without_an_sae_folder_gets_one_sentence(data: DataDir) -> None:
    job_id = record_job(data, "b", JobState.FINISHED)
    model, news = LoadedModel(data, lambda job: None), []
    model.ask("one", ChosenSae(job_id), None, news.append)
    await _until(lambda: any(isinstance(one, Failed) for one in news))
    assert news[-1] == Failed(f"job {job_id} has no SAE in {data.sae(job_id)}", is_loaded=False)


def test_tokens_are_wrapped_whole_and_only_broken_if_wider_than_a_row() -> None:
    texts = ["The", " king", "\n\n", "", "abcdefghijklmnop", " 天", "气"]
    rows = [[(piece.token, piece.x, piece.text) for piece in row] for row in wrapped(texts, 10)]
    assert rows == [
        [(0, 0, "The"), (1, 3, " king"), (2, 8, "⏎")],
        [(2, 0, "⏎")],
        [(3, 0, "�")],
        [(4, 0, "abcdefghij")],
        [(4, 0, "klmnop"), (5, 6, " 天")],
        [(6, 0, "气")],
    ]
