"""Tests for the job data that screens and commands read, including when files are missing or invalid."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from pathlib import Path

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.going import DONE, FAILED, STARTED
from sae_tui.jobs.gpus.occupancy import Occupancy
from sae_tui.jobs.supervisor.follow_run import StallWatch
from sae_tui.jobs.view.find import find
from sae_tui.jobs.view.reader import MOST_POINTS, JobReader, JobsReader, judged_value
from sae_tui.jobs.view.sweeps import in_order, labels
from trainer.contract.process import ProcessRef
from trainer.contract.runs import log_tail
from trainer.contract.runs.log_tail import tail
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Event, Rank
from trainer.contract.store.states import JobState


@pytest.fixture
def running(box):
    """Record a running job with its own metrics file."""
    job_id = box.record(gpu_ids=(0,), gpu_uuids=("GPU-0",), config=dump_job(box.config()))
    box.data.run(job_id).create()
    assert box.control.lease(box.job(job_id), [(0, "GPU-0")], attempt=1)
    box.control.transition(job_id, JobState.RUNNING)
    writer = SeriesWriter(box.data.run(job_id).metrics_db)
    yield job_id, writer
    writer.close()


def write(writer: SeriesWriter, first: int, last: int, rank: int = 0) -> None:
    rows = [MetricRow("loss", step, 1 / step, rank) for step in range(first, last + 1)]
    rows.append(MetricRow("tokens_per_s", last, 500.0))
    writer.write(rows, Heartbeat("training", last, 10_000, 100 * last, time.time()))


def test_without_a_store_there_are_no_jobs_and_no_problem(box):
    reader = JobsReader(box.data)
    assert not reader.poll()
    assert (reader.jobs, reader.problem) == ((), "")
    job_id = box.record()
    assert reader.poll()
    assert [job.id for job in reader.jobs] == [job_id]
    assert not reader.poll()


def test_evaluations_that_end_after_the_first_poll_are_reported_as_news(box):
    job_id = box.record()
    box.control.add_event(job_id, DONE, "was evaluated before")
    reader = JobsReader(box.data)
    reader.poll()
    for kind in (STARTED, DONE, FAILED):
        box.control.add_event(job_id, kind, kind)
        reader.poll()
    assert [(one.job_id, one.event.kind) for one in reader.news] == [(job_id, DONE), (job_id, FAILED)]


def test_a_runs_values_are_shown_before_its_supervisor_copies_them(box, running):
    job_id, writer = running
    reader = JobsReader(box.data)
    reader.poll()
    assert (reader.jobs[0].step, reader.jobs[0].eta_s, reader.jobs[0].progress) == (0, None, 0.0)
    write(writer, 1, 1000)
    assert reader.poll()
    (view,) = reader.jobs
    assert (view.step, view.total_steps, view.tokens, view.loss, view.phase) == (
        1000,
        10_000,
        100_000,
        1e-3,
        "training",
    )
    assert view.progress == 0.1
    assert view.eta_s == 9000 * 100 / 500
    assert box.job(job_id).step == 0
    assert not reader.poll()


@pytest.mark.parametrize("state", [JobState.STALLED, JobState.STOPPING, JobState.FAILED])
def test_only_a_job_that_is_taking_steps_has_a_remaining_time(box, running, state):
    job_id, writer = running
    write(writer, 1, 1000)
    reader = JobsReader(box.data)
    reader.poll()
    assert reader.jobs[0].eta_s == 9000 * 100 / 500
    box.control.transition(job_id, state)
    reader.poll()
    assert (reader.jobs[0].state, reader.jobs[0].eta_s) == (state, None)


def sweep(box, **fields):
    """Record a sweep with three SAEs. The last SAE is the best, but the job's row contains the first SAE's values."""
    config = parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": {"k": [8, 16, 32]}})[0]
    job_id = box.record(config=dump_job(config), **fields)
    box.data.run(job_id).create()
    values = {"fvu": 0.2184, "loss": 3.0, "l0": 8.0, "tokens_per_s": 500.0}
    # k=16 has the lowest batch FVU, but not the lowest held-out FVU.
    for label, fvu, held_out in (("k=8", 0.2184, 0.23), ("k=16", 0.05, 0.3), ("k=32", 0.1463, 0.15)):
        values |= {f"fvu@{label}": fvu, f"loss@{label}": 10 * fvu, f"l0@{label}": float(label[2:])}
        values |= {f"heldout_fvu@{label}": held_out, f"heldout_l0@{label}": float(label[2:]) + 1}
    with contextlib.closing(SeriesWriter(box.data.run(job_id).metrics_db)) as writer:
        rows = [MetricRow(name, 5, value) for name, value in values.items()]
        writer.write(rows, Heartbeat("finished", 5, 10, 500, time.time()))
    return job_id


def test_the_best_sae_represents_a_sweep_even_if_the_row_stores_another_saes_values(box):
    job_id = sweep(box, fvu=0.2184, loss=3.0, l0=8.0)
    reader, detail = JobsReader(box.data), JobReader(box.data, job_id)
    reader.poll()
    detail.poll()
    for view in (*reader.jobs, detail.view):
        assert (view.fvu, view.loss, view.l0, view.tokens_per_s) == (0.1463, 1.463, 32.0, 500.0)
        assert (view.heldout_fvu, view.heldout_l0, view.k) == (0.15, 33.0, "8…32")
        assert view.best_sae == "k=32"
    shutil.rmtree(box.data.run(job_id).root)
    again = JobsReader(box.data)
    again.poll()
    assert (again.jobs[0].fvu, again.jobs[0].best_sae) == (0.2184, "")


def test_a_sweep_is_sorted_among_jobs_by_its_best_sae(box):
    swept = sweep(box, fvu=0.2184)
    other = box.record(fvu=0.01, heldout_fvu=0.2)
    reader = JobsReader(box.data)
    reader.poll()
    assert [job.id for job in find(reader.jobs, by="fvu")] == [swept, other]


def test_a_job_from_an_older_version_shows_the_held_out_values_from_its_run(box):
    old = box.record(fvu=0.08, l0=32.0, step=500, state=JobState.FINISHED)
    box.data.run(old).create()
    with contextlib.closing(SeriesWriter(box.data.run(old).metrics_db)) as writer:
        rows = [MetricRow("fvu", 500, 0.08), MetricRow("heldout_fvu", 500, 0.134), MetricRow("heldout_l0", 500, 36.4)]
        writer.write(rows, Heartbeat("finished", 500, 500, 64_000, time.time()))
    without = box.record(fvu=0.01, state=JobState.FINISHED)
    reader = JobsReader(box.data)
    reader.poll()
    views = {view.id: view for view in reader.jobs}
    assert (views[old].fvu, views[old].heldout_fvu, views[old].heldout_l0) == (0.08, 0.134, 36.4)
    assert [judged_value(views[job_id], "fvu") for job_id in (old, without)] == [(0.134, False), (0.01, True)]
    assert [judged_value(views[job_id], "l0") for job_id in (old, without)] == [(36.4, False), (None, True)]


def test_the_saes_in_a_sweep_are_ordered_as_in_the_job_file_or_by_size(box):
    order = ["k=16", "k=32", "k=8"]
    job_id = sweep(box)
    assert in_order(order, box.job(job_id).config) == ["k=8", "k=16", "k=32"]
    assert in_order(order, "[sae]\nwings = [1]") == ["k=8", "k=16", "k=32"]
    assert in_order(["lr=0.001,k=8", "lr=1e-05,k=8", "b"], "") == ["b", "lr=1e-05,k=8", "lr=0.001,k=8"]
    assert labels("not [ toml") == labels("[launch]\ngpus = [0, 1]\n") == ()


def test_a_stop_request_is_shown_with_its_job(box, running):
    job_id, _ = running
    reader = JobsReader(box.data)
    reader.poll()
    assert not reader.jobs[0].stop_requested
    box.control.request(job_id, "stop")
    assert reader.poll()
    assert reader.jobs[0].stop_requested


def test_a_job_with_a_deleted_run_folder_stays_in_the_list(box, running):
    job_id, writer = running
    write(writer, 1, 10)
    reader = JobsReader(box.data)
    reader.poll()
    shutil.rmtree(box.data.run(job_id).root)
    reader.poll()
    assert [job.id for job in reader.jobs] == [job_id]
    assert reader.problem == ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b"not a database" * 100), "is corrupt"),
        (lambda path: sqlite3.connect(path).execute("PRAGMA user_version=99"), "made by a newer version"),
    ],
)
def test_an_unusable_store_is_reported_and_a_replacement_is_read(box, spoil, said):
    path = box.data.control_db
    box.data.create()
    spoil(path)
    reader = JobsReader(box.data)
    assert not reader.poll()
    assert said in reader.problem
    path.unlink()
    job_id = box.record()
    assert reader.poll()
    assert ([job.id for job in reader.jobs], reader.problem) == ([job_id], "")


def test_a_replaced_store_is_read_again_and_a_deleted_store_has_no_jobs(box):
    box.record("old")
    reader = JobsReader(box.data)
    reader.poll()
    for path in box.data.root.glob("control.db*"):
        path.unlink()
    assert reader.poll()
    assert reader.jobs == ()
    box.record("new")
    assert reader.poll()
    assert [job.name for job in reader.jobs] == ["new"]


def test_curves_are_extended_with_new_points_up_to_a_limited_length(box, running):
    job_id, writer = running
    reader = JobReader(box.data, job_id)
    write(writer, 1, 100)
    assert reader.poll()
    assert [point.step for point in reader.series["loss", 0]] == list(range(1, 101))
    write(writer, 101, 150)
    write(writer, 1, 50, rank=1)
    reader.poll()
    assert [point.step for point in reader.series["loss", 0]] == list(range(1, 151))
    assert len(reader.series["loss", 1]) == 50
    write(writer, 151, 9000)
    reader.poll()
    steps = [point.step for point in reader.series["loss", 0]]
    assert len(steps) <= MOST_POINTS
    assert steps == sorted(set(steps))
    write(writer, 9001, 9010)
    reader.poll()
    assert [point.step for point in reader.series["loss", 0]][-10:] == list(range(9001, 9011))


def test_curves_are_rewound_when_a_run_resumes_from_a_checkpoint(box, running):
    job_id, writer = running
    reader = JobReader(box.data, job_id)
    write(writer, 1, 100)
    reader.poll()
    writer.rewind(Heartbeat("resuming", 50, 10, 100, 0.0))
    write(writer, 51, 70)
    reader.poll()
    assert [point.step for point in reader.series["loss", 0]] == list(range(1, 71))


def test_events_from_the_supervisor_and_the_trainer_are_merged_by_time(box, running):
    job_id, writer = running
    box.control.add_event(job_id, "running", "first")
    writer.write(
        [],
        Heartbeat("training", 1, 10, 100, 0.0),
        [Event(timestamp=time.time(), level="info", kind="x", message="second")],
    )
    box.control.add_event(job_id, "stalled", "third")
    reader = JobReader(box.data, job_id)
    reader.poll()
    assert [event.message for event in reader.events] == ["first", "second", "third"]


def test_an_unknown_job_is_reported_as_a_problem_and_not_as_an_exception(box):
    box.record()
    reader = JobReader(box.data, 77)
    assert not reader.poll()
    assert (reader.view, reader.problem) == (None, "there is no job 77; `sae-tui jobs` lists them")


def test_reading_a_thousand_jobs_takes_little_time(box):
    box.data.create()
    control = box.control
    with control._write() as db:
        db.executemany(
            "INSERT INTO jobs(name, state, config, user, host, device, gpu_source, gpu_ids, gpu_uuids, distributed,"
            " world_size, mode, attempt, created, step, tokens)"
            " VALUES('j', 'finished', ?, 'me', 'h', 'cpu', 'none', '[]', '[]', 0, 1, 'single', 1, 0.0, 1, 1)",
            [("x" * 600,)] * 1000,
        )
    reader = JobsReader(box.data)
    begun = time.process_time()
    assert reader.poll()
    assert len(reader.jobs) == 1000
    assert time.process_time() - begun < 0.5


# Logs.


def test_a_tail_reads_only_the_end_of_a_large_log(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as stream:
        stream.truncate(5 * 2**30)
        stream.seek(5 * 2**30)
        stream.write(b"\nlast but one\nlast\n")
    begun = time.monotonic()
    assert tail(path, 2) == ["last but one", "last"]
    assert time.monotonic() - begun < 0.5
    path.unlink()


@pytest.mark.parametrize(
    ("content", "n_lines", "lines"),
    [
        (b"", 5, []),
        (b"one\ntwo\nthree", 2, ["two", "three"]),
        (b"a 10%\ra 50%\ra 100%\ndone\r\n", 5, ["a 100%", "done"]),
        (b"x" * 70_000 + b"\nend\n", 2, ["x" * 70_000, "end"]),
        (b"\xff\xfe\n", 1, ["\ufffd\ufffd"]),
        (b"one\n\r10% |#\r20% |##", 5, ["one", "20% |##"]),
        (b"\r100% |###\r         \rdone\n", 5, ["done"]),
        (b"abc\rX\nabc\rX\x1b[K\n", 5, ["Xbc", "X"]),
        (
            b"\router 0%\n\rin 1%\x1b[A\n\rin 2%\x1b[A\n\rin 3%\x1b[A\router 9%\n\rin 1%",
            5,
            ["outer 0%", "outer 9%", "in 1%"],
        ),
        (b"a\x1b[31mb\x1b[K\n", 5, ["a\x1b[31mb\x1b[K"]),
    ],
)
def test_a_tail_contains_the_last_lines_of_a_log(tmp_path, content, n_lines, lines):
    path = tmp_path / "log"
    path.write_bytes(content)
    assert tail(path, n_lines) == lines


def test_a_missing_log_has_no_lines(tmp_path):
    assert tail(tmp_path / "none", 5) == []
    assert LogFollower(tmp_path / "none").new_lines() == []


def test_a_log_follower_returns_each_line_once_and_restarts_after_a_truncation(tmp_path):
    path = tmp_path / "log"
    follower = LogFollower(path)
    path.write_bytes(b"one\ntw")
    assert follower.new_lines() == ["one"]
    with path.open("ab") as stream:
        stream.write(b"o\n")
    assert follower.new_lines() == ["two"]
    path.write_bytes(b"new\n")
    assert follower.new_lines() == ["new"]


def test_a_log_follower_knows_the_line_that_is_being_written(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n\r10% |#")
    lines, follower = LogFollower.from_end(path, 10)
    assert (lines, follower.unfinished) == (["one"], "10% |#")
    with path.open("ab") as stream:
        stream.write(b"\r20% |##")
    assert (follower.new_lines(), follower.unfinished) == ([], "20% |##")
    with path.open("ab") as stream:
        stream.write(b"\r30% |###\nnext\n")
    assert (follower.new_lines(), follower.unfinished) == (["30% |###", "next"], "")


@given(
    st.lists(st.sampled_from(["a", "bc", " ", "\r", "\r", "\x1b[K", "\x1b[2K\r", "\x1b[2K", "█"]), max_size=30).map(
        "".join
    )
)
def test_a_redrawn_line_is_shown_as_a_terminal_would_show_it(text):
    screen = pyte.Screen(100, 1)
    pyte.Stream(screen).feed(text)
    shown = log_tail.readable(text.encode())
    assert shown.rstrip() == (screen.display[0].rstrip() if "\r" in text else text.rstrip())


# Stalls and occupancy.


def test_a_run_stalls_after_a_minute_without_a_step_and_recovers():
    watch = StallWatch(60.0, now=0.0)
    assert not watch.is_stalled(("training", 1), 0.0)
    assert not watch.is_stalled(("training", 1), 60.0)
    assert watch.is_stalled(("training", 1), 61.0)
    assert not watch.is_stalled(("saving", 1), 62.0)
    assert not watch.is_stalled(("training", 2), 63.0)


def test_a_slow_run_stalls_after_ten_times_its_usual_step_time():
    watch = StallWatch(60.0, now=0.0)
    for step in range(10):
        assert not watch.is_stalled(("training", step), 30.0 * step)
    assert not watch.is_stalled(("training", 9), 270.0 + 300.0)
    assert watch.is_stalled(("training", 9), 270.0 + 301.0)


def test_simulated_gpus_show_a_ranks_process_and_memory(box, running):
    job_id, _ = running
    occupancy = Occupancy(box.data)
    assert occupancy.jobs_by_uuid() == {"GPU-0": job_id}
    assert occupancy.processes_by_uuid() == {}
    me = ProcessRef.current()
    row = Rank(job_id=job_id, attempt=1, rank=0, pid=me.pid, start_ticks=me.start_ticks, boot_id=me.boot_id)
    box.control.record_rank(row)
    pid, n_bytes = occupancy.processes_by_uuid()["GPU-0"]
    assert pid == me.pid
    assert n_bytes > 500 * 2**20
    box.control.transition(job_id, JobState.FINISHED)
    assert occupancy.jobs_by_uuid() == {}


def test_a_machine_without_a_store_has_no_jobs_on_its_gpus(box):
    assert Occupancy(box.data).jobs_by_uuid() == {}


def test_only_the_end_of_a_very_long_line_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        stream.truncate(5 * log_tail.LONGEST)
    follower = LogFollower(log)
    for _ in range(6):
        assert follower.new_lines() == []
    assert len(follower._partial) <= log_tail.LONGEST
    with log.open("ab") as stream:
        stream.write(b"\rthe end\nnext\n")
    assert follower.new_lines() == ["the end", "next"]


def test_a_reader_rebuilds_lost_roll_ups_of_an_ended_run_unless_it_is_read_only(box):
    job_id = box.record()
    paths = box.data.run(job_id)
    paths.create()
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        write(writer, 1, 20_000)
    with contextlib.closing(sqlite3.connect(paths.metrics_db)) as db:
        db.execute("DELETE FROM rollups")
        db.commit()
        count = "SELECT count(*) FROM rollups WHERE level = 2"
        for mends, made in ((False, 0), (True, 6)):
            with contextlib.closing(JobReader(box.data, job_id, mends=mends)) as reader:
                assert reader.poll()
                points = reader.series["loss", 0]
            assert MOST_POINTS // 4 < len(points) <= MOST_POINTS // 2 + 1
            assert db.execute(count).fetchone() == (made,)
