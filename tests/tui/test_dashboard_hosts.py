"""Tests for the dashboard with other hosts, with child processes in place of ssh."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.far_side import far_side, runs_of
from support.tui import StillMonitor, record_job, title_of, wait_until

from sae_tui.hosts import follower
from sae_tui.hosts.hosts import Hosts
from sae_tui.panels.aggregate import AggregatePanel
from sae_tui.panels.far_gpus import FarGpus
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.status import StatusLine
from sae_tui.screens.far_log import FarLogScreen
from sae_tui.screens.launch import LaunchScreen
from sae_tui.ssh import by_hand
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.find import Find
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.log_view import LogView
from sae_tui.widgets.reading import LinesScreen, Page
from sae_tui.widgets.setting_form import SettingForm
from trainer.contract.store.states import JobState

THEIRS = """
if "--log" in words:
    say(HELLO); say({"type": "log", "lines": ["step 10 \\x1b[2J", f"rank {words[-1]}"]}); stay()
say(HELLO)
say({"type": "jobs", "jobs": [JOB | {"id": 9, "name": "old", "state": "finished"}, JOB]})
who = {"pid": 4711, "user": "ada", "name": "python x.py", "memory_used_bytes": 5 << 30}
busy = {"index": 1, "temperature_c": 91, "holder": "job 7 (theirs)", "processes": [who, {"pid": 5}]}
say({"type": "gpus", "cards": [CARD, CARD | busy]})
"""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    there = tmp_path / "far"
    there.mkdir()
    for verb in ("stop", "pause", "resume"):
        (there / verb).write_text(f"say('job 7 will {verb}')")
    return there


def text(app, panel) -> str:
    return app.screen.query_one(panel).plain


def messages_of(app) -> list[str]:
    return [str(notice.message) for notice in app.notices]


def shown(app) -> None:
    """Draw the latest samples, as the app does at every interval."""
    app.redraw.show_gpus()


async def far_jobs(pilot) -> None:
    await wait_until(pilot, lambda: "theirs" in text(pilot.app, JobsPanel))
    await wait_until(pilot, lambda: all(view.gpus for view in pilot.app.session.hosts.views))
    shown(pilot.app)
    await pilot.pause()


async def test_gpus_and_jobs_are_grouped_by_host_and_totals_include_all_hosts(make_app, data, folder) -> None:
    record_job(data, "mine", JobState.RUNNING)
    app = make_app(4, hosts=Hosts(["gpu1", "me@gpu2"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(120, 40)) as pilot:
        await far_jobs(pilot)
        await wait_until(pilot, lambda: "mine" in text(app, JobsPanel))
        assert "3 hosts · 8 GPUs · 3 running · 0 waiting" in text(app, StatusLine)
        assert title_of(app.screen.query_one(GpuPanel)) == "GPUs on gpu-box"
        lines = [line.strip() for line in text(app, FarGpus).splitlines()]
        assert lines[0] == "gpu1    ● 2 GPUs · 40% · 16 of 160 GiB · 600 W"
        assert lines[1].startswith("0 NVIDIA H100") or lines[1].startswith("0 H100")
        assert lines[2].endswith("job 7 (theirs)")
        assert lines[3].startswith("me@gpu2 ●")
        assert "91°C GPU 1 on gpu1" in text(app, AggregatePanel)
        assert "/ 402.0 GiB" in text(app, AggregatePanel)
        rows = [line.strip() for line in text(app, JobsPanel).splitlines()][1:]
        starts = ["gpu-box · this host, 1 job", "1 mine", "gpu1", "9 old", "7 theirs", "me@gpu2", "9 old", "7 theirs"]
        assert [row[: len(start)] for row, start in zip(rows, starts, strict=True)] == starts


async def test_a_filter_and_the_cursor_cover_all_hosts_and_skip_host_names(make_app, data, folder) -> None:
    record_job(data, "mine", JobState.RUNNING)
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(120, 40)) as pilot:
        await far_jobs(pilot)
        table = app.screen.query_one(JobsPanel)
        # Hosts may report their jobs in any order.
        await wait_until(pilot, lambda: table.cursor == "1")
        await pilot.press("down")
        assert table.cursor == "gpu1 9"
        # Actions that work only for jobs on this host are not offered for this job; their keys name the command that
        # works there.
        await pilot.press("space", "R", "N", "number_sign", "plus", "A", "h", "D")
        assert (table.marked, table.cursor, len(app.screen_stack)) == (frozenset(), "gpu1 9", 2)
        commands = ("rename 9 NAME", "note 9 TEXT", "tag 9 --add WORD", "priority 9 --to N", "after 9 OTHER", "hold 9",
                    "rm 9")  # fmt: skip
        assert messages_of(app)[-7:] == [f"! Job 9 is on gpu1, so use `{by_hand('gpu1', one)}`." for one in commands]
        assert messages_of(app)[-8].startswith("! Only jobs on this host can be marked")
        await pilot.press("down", "down")
        assert table.cursor == "gpu1 7"
        await pilot.press("slash", *"theirs", "enter")
        await wait_until(pilot, lambda: "mine" not in table.plain)
        assert "gpu-box · 0 of 1" in table.plain
        assert "gpu1 · 1 of 2" in table.plain
        assert table.cursor == "gpu1 7"


async def test_the_hold_key_names_the_command_that_releases_a_held_job_on_another_host(make_app, folder) -> None:
    jobs = 'say(HELLO); say({"type": "jobs", "jobs": [JOB | {"state": "queued", "held": True}]}); stay()'
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(folder, jobs)))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "theirs" in text(app, JobsPanel))
        await pilot.press("end", "h")
        assert messages_of(app)[-1] == f"! Job 7 is on gpu1, so use `{by_hand('gpu1', 'release 7')}`."


async def test_a_job_on_another_host_can_be_stopped_paused_and_resumed(make_app, folder) -> None:
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(120, 40)) as pilot:
        await far_jobs(pilot)
        await pilot.press("end")
        assert "Stop" in text(app, Footer)
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert "Stop job 7 (theirs) on gpu1?" in app.screen.query_one("#question").render().plain
        await pilot.press("y")
        await wait_until(pilot, lambda: any("On gpu1: job 7 will stop." in note for note in messages_of(app)))
        assert ["stop", "7"] in runs_of(folder)
        await pilot.press("p")
        await wait_until(pilot, lambda: ["pause", "7"] in runs_of(folder))
        await pilot.press("g")
        await pilot.press("up", "g")
        await wait_until(pilot, lambda: ["resume", "9"] in runs_of(folder))
        # Job 7 is running, so there was nothing to resume.
        assert ["resume", "7"] not in runs_of(folder)


async def test_only_a_training_job_on_another_host_can_finish_early(make_app, folder) -> None:
    trains = {"name": "a training", "loss": 0.2, "step": 200, "total_steps": 2000}
    jobs = [{"id": 8, "name": "rows"}, trains | {"id": 7}, trains | {"id": 6, "phase": "cooling down"}]
    jobs_line = f'say({{"type": "jobs", "jobs": [JOB | one for one in {jobs!r}]}}); say({{"type": "gpus"}}); stay()'
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(folder, f"say(HELLO); {jobs_line}")))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "a training" in text(app, JobsPanel))
        assert "▶ cooling" in text(app, JobsPanel)
        asked = []
        for key in ("end", "up", "up"):
            await pilot.press(key, "s")
            await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
            asked.append(app.screen.query_one("#question").render().plain)
            await pilot.press("escape")
            await wait_until(pilot, lambda: not isinstance(app.screen, Confirm))
        assert ["finish it early" in question for question in asked] == [False, True, False]
        assert "it cools down over 30 steps" in asked[1]
        await pilot.press("down", "s")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("f")
        await wait_until(pilot, lambda: ["stop", "7", "--finish"] in runs_of(folder))
        assert ["stop", "7"] not in runs_of(folder)


async def test_enter_on_a_host_shows_its_gpu_processes(make_app, folder) -> None:
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(120, 40)) as pilot:
        await far_jobs(pilot)
        app.screen.query_one(FarGpus).focus()
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, LinesScreen) and app.screen.query(Page))
        lines = [" ".join(line.split()) for line in text(app, Page).splitlines()]
        assert lines[:2] == ["GPU 0 H100 idle", "GPU 1 H100 job 7 (theirs)"]
        assert lines[2:] == ["4711 ada 5.0 GiB python x.py", "5 – – cannot be seen from there"]


async def test_the_form_is_launched_on_another_host_with_its_current_values(make_app, folder) -> None:
    (folder / "launch").write_text("import tomllib; say('job 8 is ' + tomllib.loads(sys.stdin.read())['name'])")
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(120, 40)) as pilot:
        await far_jobs(pilot)
        await pilot.press("n")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.form.review.text)
        app.screen.query_one(SettingForm).focus_field("name")
        await pilot.press("ctrl+u", *"wide")
        await pilot.press("f6")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press(*"auto:2", "enter")
        await wait_until(pilot, lambda: any("On gpu1: job 8 is wide." in note for note in messages_of(app)))
        assert ["launch", "/dev/stdin", "--gpus", "auto:2"] in runs_of(folder)
        assert isinstance(app.screen, LaunchScreen)


async def test_a_host_whose_jobs_cannot_be_read_shows_the_problem(make_app, folder) -> None:
    damaged = 'say(HELLO); say({"type": "jobs", "problem": "control.db is damaged"}); stay()'
    app = make_app(1, hosts=Hosts(["gpu1"], far_side(folder, damaged)))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "gpu1 · ⚠ control.db is damaged" in text(app, JobsPanel))


async def test_thirty_hosts_leave_space_for_jobs(make_app, folder) -> None:
    app = make_app(1, hosts=Hosts([f"gpu{n}" for n in range(30)], far_side(folder, "say(HELLO); stay()")))
    async with app.run_test(size=(80, 24)) as pilot:
        shown(app)
        await pilot.pause()
        assert app.screen.query_one(FarGpus).region.height <= 12
        assert app.screen.query_one(JobsPanel).region.height >= 3


async def test_a_read_only_app_changes_nothing_on_other_hosts_but_reads_their_logs(make_app, folder) -> None:
    app = make_app(4, readonly=True, hosts=Hosts(["gpu1"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(120, 40)) as pilot:
        await far_jobs(pilot)
        await pilot.press("end", "s", "p", "up", "g", "down")
        await pilot.press("l")
        await wait_until(pilot, lambda: isinstance(app.screen, FarLogScreen))
        await wait_until(pilot, lambda: "rank 0" in text(app, LogView))
        assert text(app, LogView).splitlines()[0] == "step 10 �[2J"
        assert title_of(app.screen.query_one(LogView)).startswith("Job 7 on gpu1 · log of rank 0 · running · theirs")
        assert all(words[0] == "stream" for words in runs_of(folder))


async def test_a_disconnected_host_shows_when_it_disconnected_and_keeps_its_jobs(make_app, folder) -> None:
    hosts = Hosts(["gpu1"], far_side(folder, THEIRS + "import time; time.sleep(1)", "sys.exit(255)"))
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "as of" in text(app, JobsPanel))
        shown(app)
        await wait_until(pilot, lambda: "✗ cut since" in text(app, FarGpus))
        assert "theirs" in text(app, JobsPanel)
        assert "2 hosts · 4 GPUs · 0 running · 0 waiting" in text(app, StatusLine)
        await pilot.press("end", "s")
        assert any("gpu1 is not connected." in note for note in messages_of(app))


async def test_the_status_line_counts_gpus_on_other_hosts_if_this_host_has_none(make_app, folder) -> None:
    monitor = StillMonitor(1)
    monitor._latest, monitor._rings, monitor.problem = (), [], "the NVIDIA driver is not loaded"
    app = make_app(monitor=monitor, hosts=Hosts(["gpu1"], far_side(folder, THEIRS + "stay()")))
    async with app.run_test(size=(80, 24)) as pilot:
        await far_jobs(pilot)
        assert "2 hosts · 2 GPUs · 1 running · 0 waiting" in text(app, StatusLine)
        assert "The NVIDIA driver is not loaded." in text(app, GpuPanel)


async def test_hosts_with_many_gpus_leave_space_and_scroll_to_the_cursor(make_app, folder) -> None:
    many = 'say(HELLO); say({"type": "gpus", "cards": [CARD | {"index": n} for n in range(16)]}); stay()'
    app = make_app(1, hosts=Hosts(["gpu1", "gpu2"], far_side(folder, many)))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: all(view.gpus for view in app.session.hosts.views))
        shown(app)
        await pilot.pause()
        panel = app.screen.query_one(FarGpus)
        lines = panel.plain.splitlines()
        assert lines[0].startswith(" gpu1 ●")
        assert "more" in lines[-2]
        assert lines[-1].startswith(" gpu2 ●")
        assert panel.region.height <= 12
        assert app.screen.query_one(JobsPanel).region.height > 3
        panel.focus()
        await pilot.press("down")
        assert panel.plain.splitlines()[1].startswith(" gpu2 ●")
