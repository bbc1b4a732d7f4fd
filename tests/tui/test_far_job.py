"""Tests for the screens of a job on another host; the real `sae-tui stream` on another data folder replaces ssh."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import msgspec
import pytest
from support.far_side import far_side, real_side, runs_of
from support.features import features_file
from support.report_cards import put_card
from support.tui import record_job, record_metrics, title_of, wait_until

from sae_tui.hosts import follower, job_copy
from sae_tui.hosts.hosts import Hosts
from sae_tui.panels.differences import ResultsPanel
from sae_tui.panels.headline import Headline
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.latents import LatentDetail, LatentList
from sae_tui.screens.card import CardPanel, CardScreen
from sae_tui.screens.compare import CompareScreen
from sae_tui.screens.dashboard import Dashboard
from sae_tui.screens.far_job import FarJobScreen
from sae_tui.screens.far_log import FarLogScreen
from sae_tui.screens.features import FeaturesScreen
from sae_tui.screens.launch import LaunchScreen
from sae_tui.screens.metrics import MetricsScreen
from sae_tui.ssh import by_hand
from sae_tui.widgets.footer import Footer
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import FEATURES
from trainer.contract.runs.latent_notes import NOTES
from trainer.contract.settings.job_file import any_job_of, dump_job, job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.states import JobState

SCREEN = (120, 40)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(follower, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(job_copy, "FIRST_WAIT_S", 0.05)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def there(tmp_path: Path) -> DataDir:
    """Return the other host's data folder, with a finished job that has a report card and features."""
    data = DataDir(tmp_path / "there")
    data.create()
    output = {"output_path": str(data.sae(1))}
    job_id = record_job(data, "theirs", JobState.FINISHED, step=200, total_steps=200, **output)
    record_metrics(data, job_id)
    data.run(job_id).job_file.write_text(dump_job(job_of({"name": "theirs", "data": {"path": "data/sample"}})))
    put_card(data.sae(job_id))
    (data.sae(job_id) / "cfg.json").write_text("{}")
    (data.sae(job_id) / FEATURES).write_bytes(features_file())
    return data


@pytest.fixture
def hosts(there: DataDir, tmp_path: Path) -> Hosts:
    return Hosts(["gpu1"], real_side(tmp_path / "ssh", there.root))


def text(app, panel) -> str:
    """Return what a panel shows, or "" until the screen has the panel."""
    return "\n".join(one.plain for one in app.screen.query(panel))


def line(app) -> str:
    return "".join(str(one.render()) for one in app.screen.query("#far-line"))


def shown(app) -> str:
    """Return everything that the screen's panels show."""
    return "\n".join(one.plain for one in app.screen.query(".panel") if hasattr(one, "plain"))


def question(app) -> str:
    return "".join(one.render().plain for one in app.screen.query("#question"))


def messages_of(app) -> str:
    return str(list(app.notices)[-1].message)


async def reach(pilot, *keys: str) -> None:
    """Press these keys on the other host's job in the jobs table."""
    await wait_until(pilot, lambda: "theirs" in text(pilot.app, JobsPanel), 30)
    await pilot.press("end", *keys)


async def opened(pilot) -> None:
    await reach(pilot, "enter")
    app = pilot.app
    await wait_until(pilot, lambda: isinstance(app.screen, FarJobScreen) and "theirs" in title_of(headline(app)), 30)
    await wait_until(pilot, lambda: "connected" in line(app), 30)


def headline(app) -> Headline:
    return app.screen.query_one(Headline)


async def test_everything_about_a_job_on_another_host_can_be_read(make_app, hosts) -> None:
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        job = app.screen
        assert "held-out FVU" in headline(app).plain
        assert "architecture" in "\n".join(panel.plain for panel in job.query("SettingsPanel"))
        await pilot.press("v")
        await wait_until(
            pilot, lambda: isinstance(app.screen, CardScreen) and "0.2500 ± 0.0100" in text(app, CardPanel)
        )
        assert title_of(app.screen.query_one(CardPanel)).startswith("Job 1 on gpu1 · Report card")
        await pilot.press("f")
        await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen), 30)
        await wait_until(pilot, lambda: "Lämb" in text(app, LatentDetail))
        await pilot.press("escape", "escape", "a")
        await wait_until(pilot, lambda: isinstance(app.screen, MetricsScreen))
        await pilot.press("escape", "b")
        await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await pilot.press("escape", "l")
        await wait_until(pilot, lambda: isinstance(app.screen, FarLogScreen))
        await pilot.press("escape")
        assert app.screen is job


async def test_notes_on_latents_of_another_host_are_shown_but_not_written(make_app, hosts, there) -> None:
    (there.sae(1) / NOTES).write_text('{"latent": 0, "starred": true, "name": "sheep"}\n')
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        await pilot.press("f")
        await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen), 30)
        await wait_until(pilot, lambda: "sheep · Lämb" in text(app, LatentList))
        for key in ("asterisk", "R", "N", "u"):
            n = len(app.notices)
            await pilot.press(key)
            await wait_until(pilot, lambda n=n: len(app.notices) > n)
            assert "sae-tui annotate 1 LATENT" in messages_of(app)
        assert (app.screen.session.data.sae(1) / NOTES).read_bytes() == (there.sae(1) / NOTES).read_bytes()


async def test_means_over_seeds_on_another_host_are_shown_with_their_deviations(make_app, hosts, there) -> None:
    config = dump_job(job_of({"name": "x", "data": {"path": "data/sample"}, "train": {"seed": [0, 1]}}))
    job_id = record_job(there, "their seeds", JobState.FINISHED, config=config, step=20, total_steps=20)
    there.run(job_id).create()
    writer = SeriesWriter(there.run(job_id).metrics_db)
    values = {"fvu": 0.15, "fvu@seed=0": 0.15, "fvu@seed=1": 0.14}
    values |= {f"heldout_{name}": value for name, value in values.items()}
    writer.write([MetricRow(name, 20, value) for name, value in values.items()], Heartbeat("finished", 20, 20, 9, 0.0))
    writer.close()
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await wait_until(pilot, lambda: "their seeds" in text(app, JobsPanel), 30)
        (row,) = [row for row in text(app, JobsPanel).splitlines() if "their seeds" in row]
        assert "0.145(7)" in row
        await pilot.press("end", "up", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, FarJobScreen), 30)
        await wait_until(pilot, lambda: "2 seeds: held-out FVU 0.1450 ± 0.0071" in text(app, Headline), 30)
        assert "best" not in headline(app).plain


def wait_to_send_features(folder: Path, may_send: Path) -> None:
    """Make the other host wait until a file exists before it sends features."""
    program = folder / "1"
    wait = f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(may_send)!r}), True)]"
    program.write_text(f"import os, time\nif '--features' in words:\n    say(HELLO); {wait}\n{program.read_text()}")


async def test_features_are_copied_once_even_if_the_key_is_pressed_twice(make_app, hosts, tmp_path) -> None:
    wait_to_send_features(tmp_path / "ssh", tmp_path / "go")
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        await pilot.press("f", "f")
        await wait_until(pilot, lambda: "reading its features" in line(app))
        await pilot.press("f")
        (tmp_path / "go").touch()
        await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen), 30)
        await wait_until(pilot, lambda: "Lämb" in text(app, LatentDetail))
        await pilot.press("escape")
        await wait_until(pilot, lambda: "connected" in line(app))
        assert len([run for run in runs_of(tmp_path / "ssh") if "--features" in run]) == 1
        assert not list(app.notices)


async def test_leaving_while_features_are_copied_is_not_reported(make_app, hosts, tmp_path) -> None:
    wait_to_send_features(tmp_path / "ssh", tmp_path / "go")
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        await pilot.press("f")
        await wait_until(pilot, lambda: any("--features" in run for run in runs_of(tmp_path / "ssh")), 30)
        copy = app.screen._copy
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, Dashboard))
        await wait_until(pilot, lambda: not copy._links and not list((tmp_path / "tmp").iterdir()), 30)
        await pilot.pause()
        assert not list(app.notices)


async def test_keys_that_cannot_work_name_the_command_for_the_other_host(make_app, hosts, there) -> None:
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        assert not any(word in text(app, Footer) for word in ("Evaluate", "Export", "Load"))
        for key, answer in (
            ("e", f"Job 1 is on gpu1, so use `{by_hand('gpu1', 'eval 1')}`."),
            ("x", f"Job 1 is on gpu1, so use `{by_hand('gpu1', 'export 1 --out DIR')}`."),
            ("L", f"The SAE of job 1 is in {there.sae(1)} on gpu1; load it there."),
        ):
            await pilot.press(key)
            assert messages_of(app) == f"! {answer}"
        await pilot.press("v")
        await wait_until(pilot, lambda: isinstance(app.screen, CardScreen))
        await pilot.press("e")
        await wait_until(pilot, lambda: messages_of(app).endswith(f"{by_hand('gpu1', 'eval 1')}`."))


async def test_escape_from_a_screen_of_another_hosts_job_returns_to_where_it_was_opened(
    make_app, data, hosts, there
) -> None:
    record_metrics(data, record_job(data, "mine", JobState.FINISHED, step=200, total_steps=200))
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await wait_until(pilot, lambda: "mine" in text(app, JobsPanel))
        app.screen.query_one(JobsPanel).select("1")
        await pilot.press("space")
        for key, opens in (("f", FeaturesScreen), ("c", CompareScreen)):
            await reach(pilot, key)
            await wait_until(pilot, lambda opens=opens: isinstance(app.screen, opens), 30)
            await pilot.press("escape")
            await wait_until(pilot, lambda: app.screen is app.router.dashboard)
            assert isinstance(app.focused, JobsPanel)
            assert app.focused.selected is None  # the cursor is on the other host's job
        (there.sae(1) / FEATURES).unlink()
        await reach(pilot, "f")
        await wait_until(pilot, lambda: app.notices and "no max-activating examples" in messages_of(app), 30)
        await wait_until(pilot, lambda: app.screen is app.router.dashboard)


async def test_a_job_on_another_host_is_compared_with_marked_jobs(make_app, data, hosts) -> None:
    record_metrics(data, record_job(data, "mine", JobState.FINISHED, step=200, total_steps=200))
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await wait_until(pilot, lambda: "mine" in text(app, JobsPanel))
        app.screen.query_one(JobsPanel).select("1")
        await pilot.press("space")
        await reach(pilot, "c")
        await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen), 30)
        await wait_until(pilot, lambda: "1 on gpu1" in text(app, ResultsPanel))


async def test_a_clone_opens_the_form_and_has_no_parent_here(make_app, hosts, data) -> None:
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await reach(pilot, "y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen), 30)
        origin = app.screen.form.origin
        assert (origin.was.name, origin.which, origin.parent) == ("theirs", "job 1 on gpu1", None)
        await wait_until(pilot, lambda: not list((data.root.parent / "tmp").iterdir()))


async def test_settings_that_run_code_are_cloned_only_with_consent(make_app, hosts, there, monkeypatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "q")
    command = {"name": "theirs", "kind": "command", "command": {"argv": ["make", "evil"]}}
    there.run(1).job_file.write_text(dump_job(any_job_of(command)))
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await reach(pilot, "y")
        await wait_until(pilot, lambda: "runs `make evil` as you" in question(app), 30)
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, Dashboard))
        # The environment stays on the other host, so the clone gets this app's environment.
        await pilot.press("y")
        await wait_until(pilot, lambda: "runs `make evil` as you" in question(app), 30)
        await pilot.press("y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen), 30)
        await wait_until(
            pilot, lambda: app.screen.query_one("#environment").content == "this app's, conda environment q"
        )


async def test_a_lost_connection_shows_since_when_the_screen_is_outdated(make_app, hosts, there, tmp_path) -> None:
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        (tmp_path / "ssh" / "1").write_text("sys.stderr.write('ssh: connect to host: No route to host'); sys.exit(255)")
        for link in app.screen._copy._links:
            link.stop()
        await wait_until(pilot, lambda: "No route to host · shown as of " in line(app))
        assert "theirs" in title_of(headline(app))
        await pilot.press("escape")
        assert isinstance(app.screen.query_one(JobsPanel), JobsPanel)


async def test_for_a_host_with_an_older_version_the_screen_says_to_update_it(make_app, tmp_path) -> None:
    old = """
if "--job" in words:
    sys.stderr.write("sae-tui: error: unrecognized arguments: --job 7; see sae-tui stream --help"); sys.exit(2)
say(HELLO); say({"type": "jobs", "jobs": [JOB]}); say({"type": "gpus", "cards": [CARD]}); stay()
"""
    app = make_app(4, hosts=Hosts(["gpu1"], far_side(tmp_path / "old", old)))
    async with app.run_test(size=SCREEN) as pilot:
        await reach(pilot, "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, FarJobScreen) and "older sae-tui" in line(app))
        assert line(app).strip().endswith("which sends only the logs of its jobs (l); update sae-tui there")
        await pilot.press("l")
        await wait_until(pilot, lambda: isinstance(app.screen, FarLogScreen))


async def test_stopping_a_job_on_another_host_asks_for_confirmation_here(make_app, there, tmp_path) -> None:
    record_job(there, "theirs too", JobState.RUNNING)
    app = make_app(4, hosts=Hosts(["gpu1"], real_side(tmp_path / "ssh", there.root)))
    async with app.run_test(size=SCREEN) as pilot:
        await wait_until(pilot, lambda: "theirs too" in text(app, JobsPanel), 30)
        await pilot.press("home", "enter")
        await wait_until(
            pilot, lambda: isinstance(app.screen, FarJobScreen) and "theirs too" in title_of(headline(app)), 30
        )
        await pilot.press("s")
        await wait_until(pilot, lambda: "Stop job 2 (theirs too) on gpu1?" in question(app))


async def test_an_open_job_uses_the_current_settings_and_hosts(make_app, there, tmp_path) -> None:
    record_job(there, "theirs too", JobState.RUNNING)
    app = make_app(4, hosts=Hosts(["gpu1"], real_side(tmp_path / "ssh", there.root)))
    async with app.run_test(size=SCREEN) as pilot:
        await wait_until(pilot, lambda: "theirs too" in text(app, JobsPanel), 30)
        await pilot.press("home", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, FarJobScreen) and "connected" in line(app), 30)
        home, far = app.session, app.screen.session
        home.settings = msgspec.structs.replace(home.settings, sampling_interval_s=7.0)
        assert far.settings.sampling_interval_s == 7.0
        assert (far.data, home.data) == (app.screen._copy.data, app.session.data)
        home.hosts.stop()
        home.hosts = Hosts(["gpu1"], real_side(tmp_path / "new", there.root))
        (tmp_path / "new" / "pause").write_text("print('pauses')")
        home.hosts.start(lambda: None)
        await wait_until(pilot, lambda: home.hosts.views[0].job(2), 30)
        await pilot.press("p")
        await wait_until(pilot, lambda: list(app.notices) and "On gpu1: pauses" in messages_of(app))
        await pilot.press("l")
        await wait_until(pilot, lambda: isinstance(app.screen, FarLogScreen))
        home.hosts.stop()
        home.hosts = None
        app.screen.show_jobs()
        await pilot.press("escape", "p")
        assert messages_of(app).endswith("gpu1 is not connected.")
        await pilot.press("l")
        assert isinstance(app.screen, FarJobScreen)


async def test_a_lost_job_says_nothing_about_checkpoints_which_are_not_copied(make_app, there, tmp_path) -> None:
    job_id = record_job(there, "theirs is lost", JobState.LOST, error="its processes are gone", attempt=1)
    there.run(job_id).create()
    there.run(job_id).job_file.write_text(there.run(1).job_file.read_text())
    app = make_app(4, hosts=Hosts(["gpu1"], real_side(tmp_path / "ssh", there.root)))
    async with app.run_test(size=SCREEN) as pilot:
        await wait_until(pilot, lambda: "theirs is lost" in text(app, JobsPanel), 30)
        await pilot.press("home", "enter")
        await wait_until(pilot, lambda: "g resumes job 2 on gpu1" in shown(app), 30)
        assert "its processes are gone" in shown(app)


async def test_a_command_from_another_host_with_control_characters_is_not_copied(make_app, hosts, there) -> None:
    config = dump_job(job_of({"name": "theirs", "data": {"path": "rows\x1b[201~; evil"}}))
    with contextlib.closing(Control(there.control_db)) as control:
        control.update(1, config=config)
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        await pilot.press("Y")
        assert messages_of(app) == "! The settings contain control characters, so the command is not copied."
        assert not app.clipboard


async def test_a_copied_command_from_another_host_names_it_and_warns_about_secrets(make_app, hosts, there) -> None:
    command = {"name": "theirs", "kind": "command", "command": {"argv": ["make"], "env": ["TOKEN=abc"]}}
    with contextlib.closing(Control(there.control_db)) as control:
        control.update(1, config=dump_job(any_job_of(command)))
    app = make_app(4, hosts=hosts)
    async with app.run_test(size=SCREEN) as pilot:
        await opened(pilot)
        await pilot.press("Y")
        await wait_until(pilot, lambda: app.clipboard.startswith("sae-tui run --host gpu1 "))
        assert "launches this job on gpu1 was sent" in messages_of(app)
        assert messages_of(app).endswith("It may contain secrets.")
