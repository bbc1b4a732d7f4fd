"""Tests for the screen of a job that runs a command, and for its row in the list of jobs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.commands import command_file, record_program, record_samples, record_series
from support.tui import record_job, title_of, wait_until

from sae_tui.gpu.simulated import uuid_of
from sae_tui.jobs.program_environment import snapshot
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.cause import CausePanel
from sae_tui.panels.curves import CurvesPanel
from sae_tui.panels.events import EventsPanel
from sae_tui.panels.headline import Headline
from sae_tui.panels.job_columns import SHOWN, columns_of
from sae_tui.panels.jobs import JobsPanel, job_row
from sae_tui.panels.log import LogPanel
from sae_tui.panels.metric_grid import MetricPlot
from sae_tui.panels.preview import PreviewPanel
from sae_tui.panels.program import ProgramCurves, ProgramPanel
from sae_tui.panels.ranks import RanksPanel
from sae_tui.panels.settings import SettingsPanel
from sae_tui.screens.job import JobScreen
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.table import _row_line, fit_columns
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

# A program with a child that holds 40 MiB and keeps a core busy.
_CHILD = "import time\nkept = bytearray(40 << 20)\nend = time.time() + 600\nwhile time.time() < end: pass"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}])"


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True)
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def record(data: DataDir, state: JobState, *argv: str, log: str = "", settings: dict | None = None, **fields) -> int:
    """Record a command on this machine's first two GPUs, with its log."""
    config = command_file(*(argv or ("sh", "train.sh")), **(settings or {}))
    gpus = {"gpu_ids": (0, 1), "gpu_uuids": (uuid_of(0), uuid_of(1)), "world_size": 2}
    job_id = record_job(data, "probe", state, config=config, **(gpus | {"host": socket.gethostname()} | fields))
    data.run(job_id).create()
    data.run(job_id).log(0).write_text(log)
    return job_id


async def opened(pilot, app, job_id: int) -> JobScreen:
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(job_id)
    await wait_until(pilot, lambda: app.session.detail is not None and app.screen.query(LogPanel))
    await wait_until(pilot, lambda: app.screen.query_one(Headline).plain)
    return app.screen


def is_shown(panel) -> bool:
    return all(getattr(node, "display", True) for node in panel.ancestors_with_self)


def shown(screen, panel) -> str:
    return screen.query_one(panel).plain


async def test_without_metrics_the_log_fills_the_screen_and_nothing_about_saes_is_shown(make_app, data) -> None:
    job_id = record(data, JobState.RUNNING, log="".join(f"line {n}\n" for n in range(100)))
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: "line 99" in shown(screen, LogPanel))
        assert screen.query_one(LogPanel).size.height >= 12
        assert title_of(screen.query_one(LogPanel)).strip().startswith("Log")
        assert "rank" not in title_of(screen.query_one(LogPanel))
        for panel in (CurvesPanel, RanksPanel, ProgramCurves):
            assert not screen.query_one(panel).display
        whole = "\n".join(panel.plain for panel in screen.query(LineView) if is_shown(panel))
        assert {"FVU", "L0", "dead", "tok/s", "single"} & {*whole.split()} == set()
        assert "has run for " in shown(screen, Headline)
        offered = shown(screen, Footer)
        assert "Copy" in offered
        assert not [word for word in ("Evaluate", "Export", "Features", "Card", "Curve", "Rank") if word in offered]
        for key in ("e", "v", "f", "x", "right_square_bracket"):
            await pilot.press(key)
            assert app.screen is screen


async def test_with_metrics_a_command_shows_curves_with_any_names(make_app, data) -> None:
    job_id = record(data, JobState.RUNNING)
    record_series(data, job_id, ["loss", "eval/accuracy", "my own metric", "grad_norm", "tokens_per_s"])
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        curves = screen.query_one(ProgramCurves)
        await wait_until(pilot, lambda: len([one for one in curves.query(MetricPlot) if one.display]) == 4)
        plots = [plot for plot in curves.query(MetricPlot) if plot.display]
        await wait_until(pilot, lambda: all(any(0x2800 < ord(char) < 0x2900 for char in one.plain) for one in plots))
        titles = [title_of(plot).split()[0] for plot in plots]
        assert titles == ["loss", "eval/accuracy", "gradient", "my"]
        assert "50%" in shown(screen, Headline)
        assert "step 200/400" in shown(screen, Headline)
        await pilot.press("a")
        await wait_until(pilot, lambda: app.screen is not screen)
        speed = [plot for plot in app.screen.query(MetricPlot) if title_of(plot).startswith("steps/s")]
        assert len(speed) == 1


async def test_a_command_shows_the_current_use_by_all_its_processes(make_app, data, program) -> None:
    job_id = record(data, JobState.RUNNING, supervisor=ProcessRef.of(program.pid))
    record_program(data, job_id, program.pid)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: "2 processes" in shown(screen, ProgramPanel))
        first = screen._use
        assert first is not None
        assert first.memory_bytes > 40 << 20
        screen._read_use()
        await wait_until(pilot, lambda: screen._use is not first and screen._use.cpu_percent is not None)
        assert screen._use.cpu_percent > 0
        assert "CPU " in shown(screen, ProgramPanel)


async def test_a_command_shows_how_its_gpus_were_used_while_it_ran(make_app, data) -> None:
    host, end = socket.gethostname(), time.time() // 60 * 60
    for index, use in ((0, 100), (1, 50), (2, 3)):
        record_samples(data, host, index, uuid_of(index), end - 120, [0] * 60 + [use] * 60)
    job_id = record(data, JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen._use is not None)
        view = JobView(**{**_fields(app, job_id), "started": end - 120, "ended": end - 1})
        screen._use = screen._program.read(view, ())
        screen.show_jobs()
        lines = shown(screen, ProgramPanel).splitlines()
        assert lines[0].strip() == "Use · 2 min"
        assert any(line.startswith(" GPU 0 ") and "100%" in line and "2.0 GiB" in line for line in lines)
        assert any(line.startswith(" GPU 1 ") and "50%" in line for line in lines)
        assert not any("GPU 2" in line for line in lines)
        (first,) = (window for index, window in screen._use.gpus if index == 0)
        assert [*first.columns["utilization"]].count(100) == 60


def _fields(app, job_id: int) -> dict:
    (view,) = (job for job in app.session.jobs if job.id == job_id)
    return {name: getattr(view, name) for name in view.__struct_fields__}


async def test_the_settings_show_the_command_but_no_secret_and_not_the_stored_environment(make_app, data) -> None:
    settings = {"folder": "/srv/probes", "env": ["SEED=7", "HF_TOKEN=hf_verysecret"]}
    job_id = record(data, JobState.RUNNING, "python", "probe.py", "--layer", "12", settings=settings)
    stored = {b"VIRTUAL_ENV": b"/home/ada/.venv", b"NOT_SHOWN": b"anywhere"}
    snapshot(stored).write(data.run(job_id))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: "/home/ada/.venv" in shown(screen, SettingsPanel))
        text = shown(screen, SettingsPanel)
        assert "python probe.py --layer 12" in " ".join(text.split())
        assert "/srv/probes" in text
        assert "SEED=7" in text
        assert "virtual environment" in " ".join(text.split())
        whole = "\n".join(panel.plain for panel in screen.query(LineView))
        assert "verysecret" not in whole
        assert "NOT_SHOWN" not in whole


async def test_a_key_copies_the_command_that_runs_the_program_again(make_app, data) -> None:
    job_id = record(data, JobState.RUNNING, "sh", "-c", "echo 'a b' --token=hf_kept")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("Y")
        assert app.clipboard == """sae-tui run --name=probe -- sh -c 'echo '"'"'a b'"'"' --token=hf_kept'"""


@pytest.mark.parametrize("readonly", [False, True])
async def test_secrets_of_a_command_are_copied_with_a_warning_and_never_in_a_read_only_view(
    make_app, data, readonly
) -> None:
    job_id = record(data, JobState.RUNNING, "python", "x.py", "--token", "hf_kept")
    app = make_app(4, readonly=readonly)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("Y")
        assert ("hf_kept" in app.clipboard) is not readonly
        (message,) = [note.message for note in app._notifications]
        assert "secrets" in message


async def test_stopping_a_command_says_which_signal_its_program_gets(make_app, data) -> None:
    job_id = record(data, JobState.RUNNING, settings={"stop_signal": "USR1", "grace_s": 300.0})
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        expected = f"Stop job {job_id} (probe)? Its program gets SIGUSR1, and is killed after 5 min."
        assert app.screen.question == expected


async def test_a_failed_command_shows_why_and_its_key_runs_it_again(make_app, data) -> None:
    error = "its program ended with exit code 3; its last log line: no such layer"
    job_id = record(data, JobState.FAILED, error=error, log="no such layer\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: shown(screen, CausePanel))
        assert "✗ its program ended with exit code 3" in shown(screen, CausePanel)
        assert "→ g runs it again from the start" in shown(screen, CausePanel)
        assert "checkpoint" not in "\n".join(panel.plain for panel in screen.query(LineView))
        await wait_until(pilot, lambda: "Run again" in shown(screen, Footer))
        assert "no such layer" in shown(screen, LogPanel)


async def test_a_finished_command_runs_again_only_after_confirmation(make_app, data, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    job_id = record(data, JobState.FINISHED, gpu_ids=(), gpu_uuids=(), world_size=1, attempt=1)
    data.run(job_id).job_file.write_text(command_file("sh", "train.sh"))
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("g")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert app.screen.question == f"Job {job_id} (probe) has finished. Run its command again from the start?"
        await pilot.press("y")
        await wait_until(pilot, lambda: app.session.jobs[0].state is JobState.QUEUED)
        message = "runs again from the start, as attempt 2"
        await wait_until(pilot, lambda: message in " ".join(shown(app.screen, EventsPanel).split()))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("metrics", [[], ["loss"]])
async def test_nothing_wraps_on_a_commands_screen(make_app, data, size, metrics) -> None:
    log = "".join(f"line {n} {'x' * 200}\n" for n in range(100))
    job_id = record(data, JobState.RUNNING, "sh", "-c", "a-long-word " * 30, log=log)
    if metrics:
        record_series(data, job_id, metrics)
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen._use is not None and "line 99" in shown(screen, LogPanel))
        await wait_until(pilot, lambda: screen.query_one(ProgramCurves).display == bool(metrics))
        for panel in screen.query(LineView):
            if panel.display and panel.size.width:
                assert all(panel.render_line(y).cell_length == panel.size.width for y in range(panel.size.height))


def test_a_commands_row_shows_run_time_loss_and_exit_code_instead_of_sae_values() -> None:
    usual = {"id": 1, "name": "probe.py --layer 12 --rank 8", "config": command_file("sh"), "user": "me"}
    usual |= {"host": "here", "device": "cpu", "gpu_source": "none", "started": time.time() - 300.2}

    def line(width: int = 80, **fields: object) -> str:
        row = job_row(JobView(**(usual | fields)))
        return "".join(text for text, _ in _row_line(row, fit_columns(columns_of(SHOWN), width), columns_of(SHOWN), {}))

    running = line(state=JobState.RUNNING)
    assert running.split()[-3:] == ["5", "min", "00"]
    assert "–" not in running
    assert "probe.py --layer 12 --rank" in running
    assert "5 min 00 · loss 0.25" in line(state=JobState.RUNNING, loss=0.25)
    ended = {"ended": usual["started"] + 60}
    assert line(state=JobState.FINISHED, **ended).split()[-4:-2] == ["✓", "finished"]
    error = "its program ended with exit code 3; its last log line: no such layer"
    assert "60 s · exit code 3" in line(state=JobState.FAILED, error=error, **ended)
    killed = "its program was killed (SIGKILL)"
    assert "60 s · was killed (SIGKILL)" in line(state=JobState.FAILED, error=killed, **ended)
    steps = {"step": 200, "total_steps": 400, "progress": 0.5, "eta_s": 90.0, "loss": 0.25}
    counted = line(118, state=JobState.RUNNING, **steps)
    assert "50%" in counted
    assert "2 min" in counted
    assert "FVU" not in counted
    for width in (80, 118, 196):
        for fields in ({}, steps, ended | {"error": error, "state": JobState.FAILED}):
            assert len(line(width, **({"state": JobState.RUNNING} | fields))) <= width


async def test_the_run_time_in_the_list_grows_while_nothing_else_changes(make_app, data) -> None:
    job_id = record(data, JobState.RUNNING)
    with contextlib.closing(Control(data.control_db)) as control:
        control.update(job_id, started=time.time())
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs and "probe" in shown(app.screen, JobsPanel))
        before = shown(app.screen, JobsPanel)

        def has_grown() -> bool:
            app.screen.show_gpus()
            return shown(app.screen, JobsPanel) != before

        await wait_until(pilot, has_grown)


async def test_the_preview_of_a_command_shows_its_first_metric_or_only_its_log(make_app, data) -> None:
    job_id = record(data, JobState.RUNNING, "python", "probe.py", log="hello\n")
    app = make_app(4)
    async with app.run_test(size=(120, 50)) as pilot:
        preview = app.screen.query_one(PreviewPanel)
        await wait_until(pilot, lambda: "hello" in "".join(one.plain for one in preview.query(LineView)))
        assert "python probe.py" in shown(app.screen, "#preview-text")
        assert not [plot for plot in preview.query("Plot") if plot.display]
        record_series(data, job_id, ["accuracy"])
        await wait_until(pilot, lambda: [plot for plot in preview.query("Plot") if plot.display])
        (plot,) = (plot for plot in preview.query("Plot") if plot.display)
        await wait_until(pilot, lambda: plot.plain.strip().startswith("accuracy"))


async def test_the_question_before_a_command_is_deleted_mentions_only_its_logs(make_app, data) -> None:
    job_id = record(data, JobState.FAILED)
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.session.actions.delete([job_id])
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query("#no"))
        assert app.screen.question.startswith(f"Delete job {job_id} (probe) with logs? ")
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen is app.router.dashboard)
