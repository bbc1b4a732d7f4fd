"""Tests for evaluations in the app: what is asked before one starts, and how a running one is shown and stopped. Also
tests the dialogs for exports and imports.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.report_cards import put_card
from support.tui import record_job, wait_until
from textual.pilot import Pilot
from textual.widgets import Input, Label

from sae_tui.app import SaeApp
from sae_tui.jobs import going
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.evaluation.offer import offer_of
from sae_tui.jobs.going import Going
from sae_tui.jobs.launch.exporting import Exported
from sae_tui.panels.headline import Headline
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.status import StatusLine
from sae_tui.screens import export as export_screen
from sae_tui.screens.evaluate import EvaluateDialog
from sae_tui.screens.export import ExportDialog, ImportDialog
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.menu import Menu
from sae_tui.widgets.tick import Tick
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.progress import Reached
from trainer.contract.runs.report_card import EFFECTS, IN_MODEL, PROBES, ROWS
from trainer.contract.settings.catalog import WRITTEN_FORMATS
from trainer.contract.settings.job_file import dump_job, job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

MakeApp = Callable[..., SaeApp]


@pytest.fixture
def job_id(data: DataDir) -> int:
    job_id = record_job(data, "a", JobState.FINISHED)
    data.run(job_id).create()
    put_card(data.sae(job_id))
    (data.sae(job_id) / "cfg.json").touch()
    return job_id


async def open_job(pilot: Pilot[None], app: SaeApp, job_id: int) -> None:
    """Open a job's screen."""
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(job_id)
    await wait_until(pilot, lambda: app.screen.name == "job" and app.session.detail is not None)


async def test_an_evaluation_asks_for_its_parts_and_needs_at_least_one(
    make_app: MakeApp, data: DataDir, job_id: int, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[request.EvaluationRequest] = []
    monkeypatch.setattr(request, "evaluate", lambda _, one: (asked.append(one), "")[1])
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_job(pilot, app, job_id)
        await pilot.press("e")
        await wait_until(pilot, lambda: isinstance(app.screen, EvaluateDialog))
        boxes = {box.id: box for box in app.screen.query(Tick)}
        # The job's data is not on this machine, so the language model is unknown.
        assert [(name, box.value, box.disabled) for name, box in boxes.items()] == [
            (ROWS, True, False),
            (IN_MODEL, False, True),
            (EFFECTS, False, True),
            (PROBES, False, True),
        ]
        assert "`sae-tui eval 1 --model JOB.toml`" in str(app.screen.query(".why-not").first(Label).render())
        drawn = [str(box.render()) for box in boxes.values()]
        assert [one[1] for one in drawn] == ["X", " ", " ", " "], "a tick must be visible without its colour"
        await pilot.press("space", "enter")
        await pilot.pause()
        assert isinstance(app.screen, EvaluateDialog)
        await pilot.press("space", "enter")
        await wait_until(pilot, lambda: asked)
    assert [(one.job_id, one.parts, one.waits) for one in asked] == [(job_id, (ROWS,), False)]


def test_for_synthetic_rows_the_offer_says_that_there_is_no_language_model(data) -> None:
    config = dump_job(job_of({"data": {"source": "synthetic"}, "train": {"n_tokens": 1000}}))
    job_id = record_job(data, "made", JobState.FINISHED, config=config)
    put_card(data.sae(job_id))
    (data.sae(job_id) / "cfg.json").touch()
    with closing(Control(data.control_db, readonly=True)) as control:
        rows, *others = offer_of(data, control.job(job_id), None, cuda=False).parts
    assert rows.why_not == ""
    assert {part.why_not for part in others} == {"its rows are synthetic, so there is no language model"}


async def test_a_running_evaluation_has_a_row_and_is_stopped_with_the_same_key_as_a_job(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    lock = FileLock(data.run(job_id).evaluation_lock)
    assert lock.acquire()
    now = Going(
        job_id=job_id, process=ProcessRef.current(), host=socket.gethostname(), parts=(IN_MODEL,),
        began=time.time(), reached=Reached("in the model", 0.41, 180),
    )  # fmt: skip
    going.write(data, now)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs and app.session.jobs[0].evaluation)
        await wait_until(pilot, lambda: len(app.screen.query_one(JobsPanel).rows) == 2)
        assert "▶ evaluating 41 % · 3 min left · in the model" in app.screen.query_one(JobsPanel).plain
        assert "0 running · 1 evaluating · 0 waiting" in app.screen.query_one(StatusLine).plain
        await pilot.press("down")
        await wait_until(pilot, lambda: "s Stop" in app.screen.query_one(Footer).plain)
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query_one("#question").painted)
        assert app.screen.question == "Stop the evaluation of job 1 (a)? Earlier measurements are kept."
        await pilot.press("y")
        with closing(Control(data.control_db)) as control:
            await wait_until(pilot, lambda: control.open_requests(job_id) == {"stop-evaluation"})
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen.name == "job")
        await wait_until(pilot, lambda: "▶ evaluating 41 %" in app.screen.query_one(Headline).plain)
        going.remove(data, job_id)
        await wait_until(pilot, lambda: "evaluating" not in app.screen.query_one(Headline).plain)


async def test_actions_are_offered_only_with_an_sae_and_an_imported_sae_has_a_report_card(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    failed = record_job(data, "b", JobState.FAILED)
    imported = record_job(data, "theirs", JobState.IMPORTED)
    app = make_app(4)
    async with app.run_test(size=(160, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 3)
        for one, offers in ((failed, False), (job_id, True)):
            app.session.go.open_job(one)
            await wait_until(pilot, lambda one=one: app.session.detail and app.session.detail.view.id == one)
            await wait_until(pilot, lambda: "l Log" in app.screen.query_one(Footer).plain)
            shown = app.screen.query_one(Footer).plain
            assert [words in shown for words in ("v Card", "e Evaluate", "x Export")] == [offers] * 3
            # The job has only one rank, so no key for ranks is offered.
            assert ["a All metrics" in shown, "b Curve" in shown, "] Rank" in shown] == [True, True, False]
        app.session.go.open_job(imported)
        await wait_until(pilot, lambda: app.session.detail and app.session.detail.view.id == imported)
        await wait_until(pilot, lambda: any("not evaluated" in one.plain for one in app.screen.query(Headline)))
        assert "not evaluated yet; press e to measure FVU and L0" in app.screen.query_one(Headline).plain
        await pilot.press("a")
        await wait_until(pilot, lambda: "The SAE was imported" in app.screen.query_one("#nothing", LineView).plain)
        put_card(data.sae(imported))
        with closing(Control(data.control_db)) as control:
            control.add_event(imported, "evaluated", "was evaluated")
        await wait_until(pilot, lambda: "FVU 0.25" in app.screen.query_one(Headline).plain)
        shown = app.screen.query_one(Headline).plain
        assert "trained on 100.0k tokens  FVU 0.25  L0 32" in shown
        assert "0/?" not in shown
        assert "tok/s" not in shown


async def test_an_export_asks_for_format_and_folder_and_shows_its_result(
    make_app: MakeApp, data: DataDir, job_id: int, tmp_path: Path
) -> None:
    (data.run(job_id).job_file).write_text('[data]\npath = "x"\n')
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_job(pilot, app, job_id)
        await pilot.press("x")
        await wait_until(pilot, lambda: isinstance(app.screen, ExportDialog))
        folder = app.screen.query_one("#folder", Input)
        assert folder.value.endswith("/a-1")
        folder.value = str(tmp_path / "out")
        await pilot.press("enter")
        # The trainer reports that this job has no checkpoint.
        answer = app.screen.query_one("#answer", Label)
        await wait_until(pilot, lambda: "no checkpoint was saved" in str(answer.content), seconds=60)
        assert not (tmp_path / "out").exists()
        # A folder that is not empty requires confirmation. Formats that can only be imported are not offered.
        folder.value = str(tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: f"{tmp_path} is not empty." in str(answer.content))
        assert [value for _, value in app.screen.query_one(Menu)._options] == list(WRITTEN_FORMATS)
        folder.value = str(tmp_path / ("x" * 300))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "File name too long" in str(answer.content), seconds=60)
        await pilot.press("escape")
        assert app.screen.name == "job"


async def test_an_export_whose_dialog_was_closed_continues_and_is_reported(
    make_app: MakeApp, data: DataDir, job_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closed, handed_on = threading.Event(), []

    def export(*_: object, on_reached: Callable[[Reached], object]) -> Exported:
        is_closed.wait(10)
        on_reached(Reached("writing", 0.5))
        handed_on.append(True)
        return Exported(checkpoint="c", step=7, output_path="there")

    monkeypatch.setattr(export_screen, "export_sae", export)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_job(pilot, app, job_id)
        await pilot.press("x")
        await wait_until(pilot, lambda: isinstance(app.screen, ExportDialog))
        app.screen.query_one("#folder", Input).value = str(tmp_path / "out")
        await pilot.press("enter", "escape")
        await wait_until(pilot, lambda: app.screen.name == "job")
        is_closed.set()
        await wait_until(pilot, lambda: any(one.message == "The SAE of step 7 is in there" for one in app.notices))
        assert handed_on


async def test_an_upload_is_part_of_the_export_only_if_a_repository_is_entered(
    make_app: MakeApp, data: DataDir, job_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def export(_data: DataDir, _id: int, _out: Path, arguments: list[str], **_: object) -> Exported:
        given.append(arguments)
        return Exported(checkpoint="c", step=7, output_path="there", pushed={"url": "https://hub/ada/sae"})

    monkeypatch.setattr(export_screen, "export_sae", export)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_job(pilot, app, job_id)
        await pilot.press("x")
        await wait_until(pilot, lambda: isinstance(app.screen, ExportDialog))
        app.screen.query_one("#folder", Input).value = str(tmp_path / "out")
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(given) == 1 and not app.screen._is_going)
        app.screen.query_one("#push", Input).value = "ada/sae"
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(given) == 2)
        assert given == [["--format", "saelens"], ["--format", "saelens", "--push=ada/sae", "--yes"]]
        answer = app.screen.query_one("#answer", Label)
        await wait_until(pilot, lambda: "and in https://hub/ada/sae" in str(answer.content))


async def test_an_import_asks_for_the_sae_and_its_activations_and_shows_the_reason_if_it_fails(
    make_app: MakeApp, job_id: int, tmp_path: Path
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("I")
        await wait_until(pilot, lambda: isinstance(app.screen, ImportDialog))
        answer = app.screen.query_one("#answer", Label)
        await pilot.press("enter")
        assert str(answer.content) == "Enter the SAE and the folder of activations."
        (tmp_path / "theirs").mkdir()
        app.screen.query_one("#folder", Input).value = str(tmp_path / "theirs")
        app.screen.query_one("#data", Input).value = str(tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: not app.screen._is_going, seconds=60)
        assert str(tmp_path) in str(answer.content)
        assert len(app.session.jobs) == 1
