"""Tests for rows of `control.db` with unexpected values, caused by a broken disk, another version or another user."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from sae_tui import cli
from sae_tui.cli_commands.completion import job_ids
from sae_tui.jobs import edits, store_access
from sae_tui.jobs.gpus.occupancy import Occupancy
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.memory_need import measured_peak
from sae_tui.jobs.queue.waiting_job import QueueEntry
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair
from sae_tui.jobs.view import find
from sae_tui.jobs.view.reader import JobsReader
from sae_tui.jobs.view.watcher import JobDetail, Watcher
from sae_tui.panels.headline import headline
from trainer.contract.errors import UserError
from trainer.contract.paths import numbered
from trainer.contract.process import ProcessRef
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.settings.sources import DataShape
from trainer.contract.store import database
from trainer.contract.store.rows import Event, Job, Lease, Rank
from trainer.contract.store.states import JobState

HUGE, DEEP, NO_TEXT = 2**63 - 1, "[" * 20_000, b"CAST"
HOSTILE = {
    "state": ["bogus", "", b"\xff", 5, "running\0"],
    "name": [b"\xff", NO_TEXT],
    "config": [b"\xff", "not toml [", DEEP, "a" + ".a" * 50_000 + " = 1", "x = " + "9" * 5000],
    "note": [b"\xff", NO_TEXT],
    "user": [b"\xff"],
    "error": [b"\xff"],
    "host": [b"\xff"],
    "device": ["banana", "", b"cpu", "CPU"],
    "gpu_source": ["a\0b", "simulated:x", "simulated:0", "../../x", "", "banana"],
    "mode": ["", "\x1b[2J", "two words", b"ddp", "banana"],
    "backend": ["", 5, "banana"],
    "id": [HUGE, -1],
    "created": ["yesterday", float("inf"), -1e300],
    "ended": [1e300],
    "world_size": [0, "many", HUGE],
    "attempt": ["first"],
    "step": ["ten", -1],
    "tokens": [b"\x00"],
    "loss": ["low"],
    "supervisor_pid": [2**40, "me"],
    "gpu_ids": ["none", "[1", "{}", '["a"]', DEEP, 5],
    "gpu_uuids": ["[1]"],
    "after": ["[-1]", "null"],
    "tags": ["good", "[[]]", b"\xff"],
    "held": ["no"],
    "gpus_wanted": [HUGE],
    "tokens_per_s": [float("inf"), -1.0],
    "max_restarts": [-1],
}
KINDS = [(column, value) for column, values in HOSTILE.items() for value in values]


JOB_FILE, _ = parse_job({"data": {"path": "x"}, "sae": {"d_sae": 16, "k": 4}})


def spoil(data, job_id: int, column: str, value: object, table: str = "jobs") -> None:
    """Write an invalid value to a row; `NO_TEXT` stands for text that is not UTF-8."""
    mark, value = ("CAST(x'ff' AS TEXT)", ()) if value is NO_TEXT else ("?", (value,))
    key = "id" if table == "jobs" else "job_id"
    with contextlib.closing(sqlite3.connect(data.control_db)) as db:
        db.execute(f'UPDATE {table} SET "{column}" = {mark} WHERE {key} = ?', (*value, job_id))
        db.commit()


def no_supervisor(*_: object) -> None:
    """Do nothing instead of starting a supervisor."""


# The parser is created only once, because creating it takes ten times as long as running a command.
PARSER = cli.make_parser(no_supervisor)


@pytest.fixture
def three_jobs(box, monkeypatch) -> tuple[int, int, int]:
    """Record a finished job, a queued job, and a job with a run folder. The test corrupts the last job's row."""
    # The original function starts a process whenever a store is opened, which happens thousands of times in this test.
    monkeypatch.setattr(database, "network_file_system", lambda _: None)
    config = dump_job(box.config())
    finished = box.record(
        "old", state="finished", config=config, tokens_per_s=100.0, started=time.time(), ended=time.time()
    )
    me = ProcessRef.current()
    supervisor = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    waiting = box.record("waits", gpus_wanted=1, gpu_ids=(3,), gpu_uuids=("GPU-3",), **supervisor)
    where = box.placement((0,))
    bad = launching.launch(box.data, box.config("bad"), where, gpu_source="none", start=no_supervisor)
    box.control.update(bad, peak_memory_bytes=2**30, d_in=8)
    return finished, waiting, bad


def use_everything(box, waiting: int, bad: int) -> None:
    """Use the job list as the app, the commands and waiting supervisors do."""
    data = box.data
    flags = ["--data-dir", str(data.root)]

    def run(command: str) -> int:
        return cli._run(PARSER.parse_args([*command.split(), *flags]))

    for command in ("jobs", "jobs --json", "jobs --sort queue", "jobs --sort state", "jobs bad", f"job {waiting}"):
        assert run(command) == 0
    for command in (f"job {bad}", f"job {bad} --json", f"clone {bad} --print", f"compare {bad} {waiting}"):
        assert run(command) in (0, 1)
    reader = JobsReader(data)
    reader.poll()
    assert waiting in {job.id for job in reader.jobs}
    reader.close()
    watcher = Watcher(data, no_supervisor)
    watcher.follow(bad)
    watcher._look(JobsReader(data))
    assert waiting in {job.id for job in watcher.jobs}
    everything_shown(data, watcher)
    Occupancy(data).jobs_by_uuid()
    assert str(waiting) in job_ids(PARSER.parse_args(["jobs", *flags]))
    reconcile(data)
    with store_access.open_control(data) as control:
        line = QueueEntry(data, control, control.job(waiting))
        assert line.try_start()
        line.locks.release()
        asks = (control.job, control.ranks, control.events, control.open_requests, control.state)
        for ask in (*asks, lambda job_id: control.transition(job_id, JobState.RUNNING)):
            with contextlib.suppress(UserError):
                ask(bad)
    for act in (edits.stop, edits.pause, trash.throw_away):
        with contextlib.suppress(UserError):
            act(data, bad)
    launched = launching.launch(data, box.config("next"), box.placement(), gpu_source="none", start=no_supervisor)
    assert box.job(launched).state == JobState.QUEUED


def everything_shown(data, watcher: Watcher) -> None:
    """Compute everything that the screens show for every listed job."""
    for job in watcher.jobs:
        headline(JobDetail(job, "", {}, (), (), 0, None), 80)
    shape = DataShape(8, None, 4096)
    for device in ("cpu", "cuda"):
        str(measured_peak(JOB_FILE, shape, 1, "single", device, watcher.jobs))
    for by in find.orders():
        assert find.find(watcher.jobs, "a", by) is not None


ANYTHING = st.one_of(
    st.none(),
    st.sampled_from([0, 1, -1, 2**31, HUGE, -HUGE - 1, 5e-324, 1e300, float("inf"), float("-inf")]),
    st.sampled_from(
        ["", "[]", "[0]", "[1, 1]", "[[[", '["a"]', "null", DEEP, "\0", "../../etc", "\x1b]2;x\x07", NO_TEXT]
    ),
    st.sampled_from(["banana", "simulated:-1", "auto", "nvml", "dp", "../..", "a\0b", "\x9b2J"]),
    st.sampled_from([*JobState, "local", "slurm", "cuda", "stop", 'name = "a"\n', "[sae]\nk = [1, 2]", "= [" * 9]),
    st.integers(-HUGE - 1, HUGE),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=8),
)
KINDS_OF_ROWS = {"jobs": Job, "ranks": Rank, "leases": Lease, "events": Event}
ROWS = st.one_of(
    st.tuples(
        st.just(table), st.dictionaries(st.sampled_from(kind.__struct_fields__), ANYTHING, min_size=1, max_size=4)
    )
    for table, kind in KINDS_OF_ROWS.items()
)
GOOD = {
    "ranks": {"attempt": 1, "rank": 0, "pid": 1, "start_ticks": 1, "boot_id": "x"},
    "leases": {"host": "h", "gpu_uuid": "u", "gpu_index": 0, "user": "u", "pid": 1, "since": 1.0},
    "events": {"timestamp": 1.0, "level": "info", "kind": "k", "message": "m"},
}


@pytest.mark.slow
@pytest.mark.hypothesis
@pytest.mark.timeout(1800)
def test_a_corrupt_row_does_not_affect_other_rows_and_repair_restores_it(box, three_jobs, capsys):
    # Everything runs in one process: corrupt a row, use everything, and restore the rows.
    finished, waiting, bad = three_jobs
    pristine = sqlite3.connect(":memory:")
    with contextlib.closing(sqlite3.connect(box.data.control_db)) as db:
        db.backup(pristine)

    @settings(
        # The number of examples in addition to the explicit ones; `make explore` runs 2,000.
        max_examples=settings().max_examples,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(row=ROWS)
    def try_one(row):
        table, values = row
        for later in (folder for folder in numbered(box.data.root / "runs") if int(folder.name) > bad):
            shutil.rmtree(later, ignore_errors=True)  # a supervisor may still be writing its log
        with contextlib.closing(sqlite3.connect(box.data.control_db, isolation_level=None)) as db:
            pristine.backup(db)
            if table != "jobs":
                first = GOOD[table] | {"job_id": bad}
                marks = ", ".join("?" * len(first))
                db.execute(f"INSERT INTO {table}({', '.join(first)}) VALUES({marks})", [*first.values()])
        for column, value in values.items():
            with contextlib.suppress(sqlite3.IntegrityError):
                spoil(box.data, bad, column, value, table)
        use_everything(box, waiting, bad)
        list(repair(box.data))
        with store_access.open_control(box.data) as control:
            assert {finished, waiting} < {job.id for job in control.jobs()}
            assert not control.unreadable

    for column, value in KINDS:
        try_one = example(row=("jobs", {column: value}))(try_one)
    try_one()
    assert "Traceback" not in capsys.readouterr().err


def test_an_unreadable_row_is_reported_once_and_restored_from_the_run(box, three_jobs):
    finished, waiting, bad = three_jobs
    before = box.job(bad)
    spoil(box.data, bad, "note", b"\xff")
    spoil(box.data, bad, "state", "bogus")
    spoil(box.data, bad, "tags", '["kept"]')
    reader = JobsReader(box.data)
    reader.poll()
    assert [job.id for job in reader.jobs] == [waiting, finished]
    sentence = f"the list of jobs has no readable row for job {bad}; `sae-tui repair` rebuilds it"
    assert (reader.problem, reader.passed_over) == ("", sentence)
    with pytest.raises(UserError, match=sentence):
        box.job(bad)
    list(repair(box.data))
    assert box.job(bad) == msgspec.structs.replace(before, tags=("kept",))


def test_a_job_that_depends_on_a_job_with_an_unreadable_row_waits(box, three_jobs):
    _, waiting, bad = three_jobs
    spoil(box.data, waiting, "after", f"[{bad}]")
    spoil(box.data, bad, "state", "bogus")
    with store_access.open_control(box.data) as control:
        assert not QueueEntry(box.data, control, control.job(waiting)).try_start()
        assert f"comes after job {bad}, but the list of jobs has no readable row" in control.job(waiting).waits_for


def command(box, *words: str) -> None:
    """Run a command as a user would; check that it succeeds and that its output has no terminal control characters."""
    argv = [sys.executable, "-m", "sae_tui", *words, "--data-dir", str(box.data.root)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "\x1b" in done.stdout + done.stderr) == (0, False), done.stderr


@pytest.mark.slow
def test_waiting_supervisors_and_commands_continue_despite_unreadable_rows(box, wait_for):
    first = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(first)
    second = box.launch("steps=3", gpus=(0,))
    wait_for(lambda: box.job(second).waits_for, "the second to wait")
    hostile = {"note": b"\xff", "device": "banana", "gpu_source": "a\0b", "mode": "\x1b[2J", "gpu_ids": DEEP}
    for column, value in hostile.items():
        spoil(box.data, box.record("bad", state="running", peak_memory_bytes=2**30), column, value)
    log = box.data.run(second).supervisor_log
    wait_for(lambda: "no readable row for jobs 7, 6, 5, 4, 3;" in log.read_text(), "the message in its log")
    for words in (["jobs"], ["job", str(second)], ["stop", str(first)]):
        command(box, *words)
    assert box.wait_ended(first).state == JobState.STOPPED
    assert box.wait_ended(second).state == JobState.FINISHED
    assert log.read_text().count("no readable row for jobs 7, 6, 5, 4, 3;") == 1
    command(box, "repair")
    with store_access.open_control(box.data) as control:
        assert (len(control.jobs()), control.unreadable) == (7, frozenset())


def test_a_supervisor_waits_until_its_own_row_can_be_read_again(box, wait_for):
    job_id = box.launch("steps=3", place={"hold": True})
    spoil(box.data, job_id, "state", "bogus")
    log = box.data.run(job_id).supervisor_log
    wait_for(lambda: "no readable row" in log.read_text(), "the message in its log")
    list(repair(box.data))
    with store_access.open_control(box.data) as control:
        edits.release(box.data, control, job_id)
    assert box.wait_ended(job_id).state == JobState.FINISHED
    assert log.read_text().count("no readable row") == 1


@pytest.mark.parametrize("column", ["state", "note"])
def test_the_end_of_a_job_is_recorded_even_if_its_row_is_unreadable(box, wait_for, column):
    job_id = box.launch("steps=100000")
    box.wait_steps(job_id)
    spoil(box.data, job_id, column, b"\xff")
    supervisor = msgspec.json.decode(box.data.run(job_id).record_file.read_bytes(), type=Job).supervisor
    supervisor.send(signal.SIGTERM)
    wait_for(box.data.run(job_id).exit_file.exists, "its end")
    list(repair(box.data))
    assert box.wait_ended(job_id).state == JobState.STOPPED


@pytest.mark.parametrize("source", ["banana", "simulated:x"])
def test_a_supervisor_continues_if_its_row_names_an_invalid_gpu_source(box, wait_for, source):
    job_id = box.launch("steps=3", gpus=(0,), place={"hold": True})
    spoil(box.data, job_id, "gpu_source", source)
    list(repair(box.data))
    with store_access.open_control(box.data) as control:
        edits.release(box.data, control, job_id)
    assert box.wait_ended(job_id).state == JobState.FINISHED
