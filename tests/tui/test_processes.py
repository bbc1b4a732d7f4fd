"""Tests for the screen that lists processes, and for the same list on a GPU's screen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from support.tui import StillMonitor, record_job, wait_until

from sae_tui import actions
from sae_tui.gpu.processes import ProcessReader
from sae_tui.gpu.simulated import GIB, Simulated, uuid_of
from sae_tui.jobs import edits
from sae_tui.jobs.user import user_name
from sae_tui.jobs.view.processes import ORDERS
from sae_tui.panels.processes import GpuMeters, ProcessTable
from sae_tui.screens import process_list
from sae_tui.screens.processes import ProcessesScreen
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.filter import FilterSummary
from sae_tui.widgets.find import Find
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.reading import LinesScreen, Page
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Rank
from trainer.contract.store.states import JobState

SECRET, VALUE = "AN_OWN_NAME", "not-for-others"
RESTS = "import time; time.sleep(600)"


@pytest.fixture
def two() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two processes that stand in for ranks on the first two GPUs."""
    argv, environment = [sys.executable, "-c", RESTS, "--token=a\x1b[2J"], {"PATH": "/bin", SECRET: VALUE}
    processes = [subprocess.Popen(argv, env=environment) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def on_gpus(two) -> StillMonitor:
    occupied = {uuid_of(index): (process.pid, GIB) for index, process in enumerate(two)}
    return StillMonitor(source=Simulated(4, clock=lambda: 1000.0, occupied=lambda: occupied))


def text(app) -> str:
    return app.screen.query_one(ProcessTable).plain


async def opened(pilot, *words: str) -> None:
    app = pilot.app
    await pilot.pause()
    await pilot.press("t")
    await wait_until(pilot, lambda: isinstance(app.screen, ProcessesScreen))
    await wait_until(pilot, lambda: all(word in text(app) for word in words))


def rank_of(data, processes) -> int:
    """Record a job whose ranks are these processes."""
    uuids = tuple(uuid_of(index) for index in range(len(processes)))
    n_gpus = len(processes)
    # The supervisor must not be the test process, which is the parent of both processes: a supervisor's children belong
    # to its job.
    supervisor = ProcessRef.of(processes[0].pid)
    job_id = record_job(
        data, "minilm", JobState.RUNNING, supervisor=supervisor, gpu_ids=tuple(range(n_gpus)), gpu_uuids=uuids,
        world_size=n_gpus,
    )  # fmt: skip
    control = Control(data.control_db)
    attempt = control.job(job_id).attempt
    for rank, process in enumerate(processes):
        identity = ProcessRef.of(process.pid)
        assert identity is not None
        control.record_rank(Rank(job_id=job_id, attempt=attempt, rank=rank, **msgspec.structs.asdict(identity)))
    control.close()
    return job_id


async def test_a_key_shows_the_processes_of_all_gpus(make_app, on_gpus, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(160, 40)) as pilot:
        await opened(pilot, "mallory", "python train.py", str(two[0].pid))
        assert f"{two[1].pid} {user_name()}" in text(app)
        assert "time.sleep(600) --tok" in text(app)
        assert "\x1b" not in text(app)
        assert app.session.monitor.shares_wanted
        await pilot.press("slash", *"mallory", "enter")
        await wait_until(pilot, lambda: str(two[0].pid) not in text(app))
        assert "1 of 3" in app.screen.query_one("#found", LineView).plain
        await pilot.press("escape")
        assert app.screen is app.router.dashboard
        # The dashboard's own list continues to use the shares.
        await wait_until(pilot, lambda: on_gpus.shares_wanted)
        await pilot.press("comma")
        await wait_until(pilot, lambda: not app.session.monitor.shares_wanted)


async def test_ranks_are_folded_and_can_be_expanded(make_app, data, on_gpus, two) -> None:
    job_id = rank_of(data, two)
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, f"▸ job {job_id}, 2 ranks: minilm")
        await pilot.press("end", "enter")
        await wait_until(pilot, lambda: f"rank 1 of job {job_id}: minilm" in text(app))
        await pilot.press("space")
        await wait_until(pilot, lambda: "rank 1" not in text(app))
        await pilot.press("t")
        await wait_until(pilot, lambda: f"{os.getpid()} {user_name()}" in text(app))


@pytest.mark.parametrize("readonly", [False, True])
async def test_the_process_page_is_complete_and_a_key_shows_its_secrets(make_app, on_gpus, two, readonly) -> None:
    app = make_app(monitor=on_gpus, readonly=readonly)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, str(two[0].pid))
        await pilot.press("end", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, LinesScreen) and app.screen.query(Page))
        page = app.screen.query_one(Page)
        await wait_until(pilot, lambda: "environment" in page.plain)
        assert f"started by   {os.getpid()}" in page.plain
        assert "PATH=/" in page.plain
        assert f"{SECRET}=…" in page.plain
        await pilot.press("a")
        await pilot.pause()
        assert (VALUE in page.plain) is not readonly
        assert app.screen.shows_all is not readonly
        # Users share screenshots, so screenshots hide the values, even behind a dialog.
        await app.push_screen(Confirm("?"))
        assert VALUE not in app.export_screenshot()
        assert VALUE not in page.plain


async def test_a_key_turns_the_process_under_the_cursor_into_a_job_after_confirmation(
    make_app, on_gpus, two, data
) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, str(two[0].pid))
        app.screen.query_one(ProcessTable).cursor = f"pid:{two[1].pid}"
        await pilot.press("A")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query("#question"))
        assert app.screen.question.startswith(f"Turn process {two[1].pid} of {user_name()}")
        await wait_until(pilot, lambda: app.screen.query_one("#question").painted)
        await pilot.press("y")
        await wait_until(pilot, lambda: any("is now job 1" in note.message for note in app._notifications))
        with closing(Control(data.control_db)) as control:
            assert (control.job(1).gpu_ids, control.job(1).mode) == ((1,), "adopted")
            edits.kill(data, 1, control)
        await wait_until(pilot, lambda: two[1].poll() is not None, 30)


async def test_a_signal_is_sent_to_the_process_under_the_cursor_after_confirmation(make_app, on_gpus, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, str(two[0].pid))
        table = app.screen.query_one(ProcessTable)
        table.cursor = f"pid:{two[1].pid}"
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press(*"term", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert f"Send TERM to process {two[1].pid} of {user_name()}" in app.screen.question
        await pilot.press("n")
        assert two[1].poll() is None
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press(*"term", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query("#question"))
        await wait_until(pilot, lambda: app.screen.query_one("#question").painted)
        await pilot.press("y")
        await wait_until(pilot, lambda: two[1].poll() == -signal.SIGTERM)
        assert two[0].poll() is None


async def test_marked_processes_get_one_signal_after_one_question_that_names_them(make_app, on_gpus, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, *(str(one.pid) for one in two))
        table = app.screen.query_one(ProcessTable)
        for process in two:
            table.cursor = f"pid:{process.pid}"
            await pilot.press("m")
        await wait_until(pilot, lambda: all(f"●{process.pid}" in text(app) for process in two))
        assert "2 marked" in app.screen.query_one("#found", LineView).plain
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press(*"term", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query("#question"))
        question = app.screen.question
        assert question.startswith(f"Send TERM (ask it to exit) to 2 processes: 2 of {user_name()} (pids ")
        assert all(str(process.pid) in question for process in two)
        await wait_until(pilot, lambda: app.screen.query_one("#question").painted)
        two[0].kill()
        two[0].wait()
        await pilot.press("y")
        await wait_until(pilot, lambda: two[1].poll() == -signal.SIGTERM)
        message = f"SIGTERM was sent to 1 of 2 processes; process {two[0].pid} has already exited."
        await wait_until(pilot, lambda: message in [note.message for note in app._notifications])
        await pilot.press("U")
        await wait_until(pilot, lambda: "●" not in text(app))


@pytest.mark.parametrize(("name", "warns"), [("kill", True), ("cont", False)])
async def test_a_signal_that_ends_a_rank_warns_about_the_other_ranks(make_app, data, on_gpus, two, name, warns) -> None:
    job_id = rank_of(data, two)
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, f"▸ job {job_id}, 2 ranks: minilm")
        await pilot.press("end", "enter")
        await wait_until(pilot, lambda: "rank 1" in text(app))
        app.screen.query_one(ProcessTable).cursor = f"pid:{two[1].pid}"
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press(*name, "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert app.screen.question.startswith(f"Send {name.upper()} to rank 1 of job {job_id}")
        assert app.screen.question.endswith(" The job's other ranks will exit too.") is warns


@pytest.mark.parametrize(("name", "warns"), [("kill", True), ("stop", False)])
async def test_a_signal_that_ends_a_marked_rank_warns_about_the_other_ranks(
    make_app, data, on_gpus, two, name, warns
) -> None:
    job_id = rank_of(data, two)
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, f"▸ job {job_id}, 2 ranks: minilm")
        await pilot.press("m")
        table = app.screen.query_one(ProcessTable)
        table.cursor = f"job:{job_id}"
        await pilot.press("m", "enter")
        assert any("Only a process on a GPU can be marked" in note.message for note in app._notifications)
        await wait_until(pilot, lambda: "rank 1" in text(app))
        table.cursor = f"pid:{two[1].pid}"
        await pilot.press("m", "s")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press(*name, "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert "1 of mallory (pid 31415)" in app.screen.question
        assert app.screen.question.endswith(f" The other ranks of job {job_id} will exit too.") is warns
    assert [process.poll() for process in two] == [None, None]


async def test_the_order_is_chosen_and_reversed_by_keys_and_by_clicks_on_headings(make_app, on_gpus, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, *(str(one.pid) for one in two))
        table = app.screen.query_one(ProcessTable)
        assert "MEMORY▼" in text(app)
        await pilot.press("o")
        await wait_until(pilot, lambda: "SM▼" in text(app) and "MEMORY▼" not in text(app))
        await pilot.press("O")
        await wait_until(pilot, lambda: "SM▲" in text(app))
        await pilot.click(ProcessTable, offset=(6, 0))
        await wait_until(pilot, lambda: "PID▲" in text(app))
        ascending = list(table.entries)
        assert [table.entries[key].process.pid for key in ascending] == sorted([31415, *(one.pid for one in two)])
        await pilot.click(ProcessTable, offset=(6, 0))
        await wait_until(pilot, lambda: "PID▼" in text(app) and list(table.entries) == ascending[::-1])
        await pilot.press("O")
        await wait_until(pilot, lambda: list(table.entries) == ascending)
        await pilot.resize_terminal(80, 24)
        names = list(ORDERS)
        await pilot.press(*["o"] * ((names.index("host memory") - names.index("pid")) % len(names)))
        await wait_until(pilot, lambda: "by host memory" in app.screen.query_one("#found", LineView).plain)


async def test_the_process_page_shows_graphs_that_grow_while_it_is_open(make_app, on_gpus, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, str(two[0].pid))
        listed = app.screen.query_one(process_list.ProcessList)
        app.screen.query_one(ProcessTable).cursor = f"pid:{two[0].pid}"
        await wait_until(pilot, lambda: listed.table.selected.process.cpu_percent is not None)
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, LinesScreen) and app.screen.query(Page))
        page, process = app.screen.query_one(Page), listed.table.selected.process
        await wait_until(pilot, lambda: "last 2 min" in page.plain)
        for title in (" SM ", " GPU memory 1.0 GiB", " CPU 0%", " Host memory "):
            assert title in page.plain
        n_read = len(listed._history.of(process))
        await wait_until(pilot, lambda: app.redraw.show_gpus() or len(listed._history.of(process)) > n_read)
        two[0].kill()
        two[0].wait()
        on_gpus.source = Simulated(4, clock=lambda: 1001.0)
        on_gpus.step()
        await wait_until(pilot, lambda: app.redraw.show_gpus() or "It has exited" in page.plain)
        assert "last 2 min" in page.plain


async def test_cpu_use_and_shares_are_shown_soon_after_the_list_opens(make_app, on_gpus, two, monkeypatch) -> None:
    monkeypatch.setattr(process_list, "_READ_EVERY_S", 600.0)
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, str(two[0].pid))
        table = app.screen.query_one(ProcessTable)
        shown = lambda: table.entries[f"pid:{two[0].pid}"].process  # noqa: E731
        await wait_until(pilot, lambda: shown().cpu_percent is not None and shown().sm_percent is not None)


async def test_meters_for_all_gpus_are_shown_above_the_processes(make_app, on_gpus, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, str(two[0].pid))
        meters = app.screen.query_one(GpuMeters)
        assert [line.split()[:2] for line in meters.plain.splitlines()] == [["GPU", str(index)] for index in range(4)]
        assert "1.9/24.0Gi" in meters.plain
        meters.show_gpus(app.session.monitor.latest(), 1)
        assert meters.plain.split()[:2] == ["GPU", "0"]
        assert "and 3 more GPUs" in meters.plain


async def test_for_a_rank_the_first_choice_is_to_stop_its_job(make_app, data, on_gpus, two) -> None:
    job_id = rank_of(data, two[:1])
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, f"rank 0 of job {job_id}: minilm")
        app.screen.query_one(ProcessTable).cursor = f"pid:{two[0].pid}"
        await pilot.press("s")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert app.screen.question == f"Stop job {job_id} (minilm)? It saves a checkpoint first."


async def test_a_read_only_app_can_send_no_signal_and_change_no_job(make_app, data, on_gpus, two) -> None:
    record_job(data, "done", JobState.FINISHED)
    app = make_app(monitor=on_gpus, readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("D", "y", "n")
        assert app.screen is app.router.dashboard
        assert "read-only" in app.screen.query_one("#status", LineView).plain
        footer = app.screen.query_one("Footer", LineView)
        await wait_until(pilot, lambda: "Compare" in footer.plain)
        assert not any(word in footer.plain for word in ("Delete", "Clone", "New job"))
        await opened(pilot, str(two[0].pid))
        await pilot.press("s")
        await pilot.pause()
        assert isinstance(app.screen, ProcessesScreen)
        assert "start it without --readonly," in "".join(notice.message for notice in app._notifications)


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (200, 60)])
async def test_every_line_has_the_width_of_the_list_at_any_size(make_app, on_gpus, size, two) -> None:
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        table = app.screen.query_one(ProcessTable)
        await wait_until(pilot, lambda: table.entries)
        for y in range(table.size.height):
            assert table.render_line(y).cell_length == table.size.width


async def test_without_gpus_the_process_list_refers_to_the_doctor(make_app) -> None:
    app = make_app(monitor=StillMonitor(source=Simulated(1, clock=lambda: 0.0, faults={0: "lost"}), samples=1))
    app.session.monitor._latest = ()
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, "This machine has no GPU; d shows why.")


async def test_hung_reads_are_reported_do_not_accumulate_and_block_no_action(make_app, on_gpus, monkeypatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(ProcessReader, "read", lambda *_: released.wait(60) and ())
    monkeypatch.setattr(process_list, "_READ_EVERY_S", 0.0)
    monkeypatch.setattr(process_list, "_SILENT_AFTER_S", 0.0)
    app = make_app(monitor=on_gpus)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        listed = app.screen.query_one(process_list.ProcessList)
        n_before = threading.active_count()
        for _ in range(50):
            listed.show_samples(app.session.monitor.latest(), "")
            await pilot.pause()
        assert threading.active_count() <= n_before + 1
        assert "the system does not respond" in listed.query_one(FilterSummary).text
        for _ in range(50):  # other work that hangs
            app.run_worker(lambda: released.wait(60), thread=True)
        app.session.actions.do(lambda: "it was done")
        await wait_until(pilot, lambda: "It was done." in [note.message for note in app._notifications])
        released.set()


async def test_an_action_without_a_free_thread_or_with_an_unexpected_error_is_reported(make_app, monkeypatch) -> None:
    monkeypatch.setattr(actions, "_BEGINS_WITHIN_S", 0.01)
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        app.session.actions.do(lambda: {}["missing"])
        await wait_until(pilot, lambda: any("KeyError('missing')" in note.message for note in app._notifications))

        def no_thread(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", no_thread)
            app.session.actions.do(lambda: "it was done")
            await wait_until(pilot, lambda: any("has not started yet" in note.message for note in app._notifications))
