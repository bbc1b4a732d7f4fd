"""Tests that real programs' metrics and resource usage are stored exactly once, even after interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.metrics_files import event

from sae_tui.cli import main
from sae_tui.jobs.program_metrics import collector
from sae_tui.jobs.program_metrics.collector import MOST_SERIES, ProgramMetrics, clean_name
from sae_tui.jobs.view.reader import JobReader, JobsReader
from trainer.contract.process import ProcessRef
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.command import Command, CommandJob
from trainer.contract.settings.job import Launch
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.database import open_writer
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

HEAD = "import json, os, sys, time\n"
# Draws a progress bar like tqdm, with a newline only after the last update.
BARS = HEAD + (
    "for n in range(41):\n"
    "    bar = f'{n * 100 // 40:3d}%|{\"#\" * (n // 4):10s}| {n}/40 [00:01<00:01, 20.0it/s, loss={1 / (n + 1):.3f}]'\n"
    "    sys.stderr.write('\\rtrain: ' + bar)\n"
    "    time.sleep(0.03)\n"
    "sys.stderr.write('\\n')\n"
)
# The first attempt ends after step 9; the second resumes at step 5 and ends after step 7.
RESUMES = HEAD + (
    "attempt = int(os.environ['SAE_TUI_ATTEMPT'])\n"
    "print('lr=0.5')\n"
    "for step in range(10) if attempt == 1 else range(5, 8):\n"
    "    print(json.dumps({'step': step, 'total_steps': 10, 'loss': 100 * attempt + step}))\n"
    "sys.exit(attempt == 1)\n"
)
EVENTS = HEAD + (
    "os.makedirs('tb/train'), os.makedirs('tb/validation')\n"
    "for name, content in json.loads(os.environ['FILES']).items():\n"
    "    with open(f'tb/{name}/events.out.tfevents.1.host.2', 'wb') as stream:\n"
    "        stream.write(bytes.fromhex(content))\n"
)


def launch(box, folder: Path, program: str, *flags: str) -> Job:
    """Run a program as a job, and wait for it to end."""
    folder.mkdir(exist_ok=True)
    before = {job.id for job in box.control.jobs()} if box.data.control_db.exists() else set()
    argv = ["--data-dir", str(box.data.root), "--gpu-source", "none", "run", "--gpus", "0", "--folder", str(folder)]
    assert main([*argv, *flags, "--", sys.executable, "-c", program]) == 0
    (job_id,) = {job.id for job in box.control.jobs()} - before
    return box.wait_ended(job_id, timeout_s=60)


def stored(run: Path, name: str) -> dict[int, float | None]:
    with contextlib.closing(SeriesReader(run / "metrics.db")) as reader:
        return {point.step: point.value for point in reader.points(name)}


def events(run: Path) -> list[str]:
    with contextlib.closing(SeriesReader(run / "metrics.db")) as reader:
        return [one.message for one in reader.events()]


@pytest.mark.timeout(120)
def test_a_program_that_draws_a_progress_bar_has_steps_a_speed_and_a_curve(box, tmp_path, capfd) -> None:
    job = launch(box, tmp_path / "work", BARS)
    assert (job.state, job.step, job.total_steps, job.tokens_per_s) == (JobState.FINISHED, 40, 40, 20.0)
    losses = stored(box.data.run(job.id).root, "loss")
    assert losses[40] == pytest.approx(1 / 41, abs=1e-3) == job.loss
    assert len(losses) > 30
    capfd.readouterr()
    assert main(["--data-dir", str(box.data.root), "job", str(job.id)]) == 0
    shown = capfd.readouterr().out
    assert "loss  " in shown
    assert not any(word in shown for word in ("FVU", "L0", "dead"))
    main(["--data-dir", str(box.data.root), "jobs", "--json"])
    (listed,) = json.loads(capfd.readouterr().out)
    assert listed["metrics"]["loss"] == listed["loss"] == job.loss
    assert listed["fvu"] is None
    main(["--data-dir", str(box.data.root), "logs", str(job.id)])
    (last,) = capfd.readouterr().out.splitlines()
    assert last.startswith("train: 100%|##########| 40/40")


@pytest.mark.timeout(120)
def test_a_restarted_program_replaces_values_from_the_step_at_which_it_resumes(box, tmp_path) -> None:
    job = launch(box, tmp_path / "work", RESUMES, "--retries", "1")
    assert (job.state, job.attempt, job.step, job.total_steps) == (JobState.FINISHED, 2, 7, 10)
    run = box.data.run(job.id).root
    assert stored(run, "loss") == {step: (200 if step >= 5 else 100) + step for step in range(8)}


@pytest.mark.timeout(120)
def test_event_files_are_read_and_equal_names_in_two_folders_are_kept_apart(box, tmp_path) -> None:
    files = {"train": event(3, {"epoch_loss": 0.5}), "validation": event(3, {"epoch_loss": 0.75})}
    encoded = json.dumps({name: content.hex() for name, content in files.items()})
    job = launch(box, tmp_path / "work", EVENTS, "--env", f"FILES={encoded}")
    run = box.data.run(job.id).root
    with contextlib.closing(SeriesReader(run / "metrics.db")) as reader:
        names = {name for name, _ in reader.series()} & {"epoch_loss", "train/epoch_loss", "validation/epoch_loss"}
    assert len(names) == 2
    assert {value for name in names for value in stored(run, name).values()} == {0.5, 0.75}
    assert job.step == 3


@pytest.mark.timeout(120)
def test_a_pattern_determines_which_values_are_metrics(box, tmp_path, capsys) -> None:
    job = launch(box, tmp_path / "work", "print('at 3 nll <0.5> loss: 9')", "--metrics", "at {step} nll <{loss}>")
    assert (job.step, job.loss) == (3, 0.5)
    run = ["--data-dir", str(box.data.root), "--gpu-source", "none", "run", "--gpus", "0", "--metrics", "loss", "true"]
    assert main(run) == 2
    assert '--metrics: "loss" has no name in braces, like {loss}' in capsys.readouterr().err


# In the tests below, this process acts as the program, and a thread reads its output.


class Reading:
    """A run whose log is written by this process."""

    def __init__(self, root: Path) -> None:
        self.run, self.work = root / "data/runs/1", root / "work"
        self.log = self.run / "rank0.log"
        for folder in (self.run, self.work):
            folder.mkdir(parents=True)
        self.log.touch()

    def write(self, text: str) -> None:
        with self.log.open("a") as stream:
            stream.write(text)

    @contextlib.contextmanager
    def reading(self, attempt: int = 1) -> Iterator[ProgramMetrics]:
        spec = RankSpec(self.run, self.run / "output", attempt, 1, "cpu")
        config = CommandJob(command=Command(["true"], str(self.work)), launch=Launch())
        metrics = ProgramMetrics(spec, config, self.log, lambda: [ProcessRef.current()])
        metrics.start()
        yield metrics
        metrics.close()
        assert not metrics._thread.is_alive()


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    monkeypatch.setattr(collector, "EVERY_S", 0.02)
    return Reading(tmp_path)


def test_a_new_supervisor_continues_where_the_previous_one_stopped(one: Reading) -> None:
    one.write("start\nloss: 0.5\nloss: 0.25\n")
    with one.reading():
        pass
    one.write("loss: 0.125\nlo")
    with one.reading():
        pass
    assert stored(one.run, "loss") == {1: 0.5, 2: 0.25, 3: 0.125}


def test_values_stored_before_the_position_was_recorded_are_not_stored_twice(one: Reading) -> None:
    one.write("loss: 0.5\nloss: 0.25\n")
    with one.reading():
        pass
    # As if the supervisor had been killed after storing the values but before recording its position.
    (one.run / "program-metrics.json").unlink()
    with one.reading():
        pass
    assert stored(one.run, "loss") == {0: 0.5, 1: 0.25}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": 3}', b'{"log": {"offset": -5, "mark": "zz"}}'])
def test_a_damaged_position_record_loses_no_values(one: Reading, content: bytes) -> None:
    (one.run / "program-metrics.json").write_bytes(content)
    one.write("loss: 0.5\n")
    with one.reading():
        pass
    assert stored(one.run, "loss") == {0: 0.5}


def test_at_most_two_hundred_series_are_stored_and_one_event_says_so(one: Reading) -> None:
    one.write("".join(f"m{n}=1\n" for n in range(MOST_SERIES + 50)))
    with one.reading():
        pass
    one.write("m1=2 other=3\n")
    with one.reading():
        pass
    with contextlib.closing(SeriesReader(one.run / "metrics.db")) as reader:
        names = {name for name, _ in reader.series() if name.startswith(("m", "other"))}
    assert len(names) == MOST_SERIES
    assert stored(one.run, "m1")[MOST_SERIES + 50] == 2
    assert events(one.run) == ["reports more than 200 metrics; the others are not stored"]


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("a\x1b[31m/b\n", "a[31m/b"),
        ("recall@5", "recall_at_5"),
        ("tokens_per_s", "program/tokens_per_s"),
        ("memory_bytes", "program/memory_bytes"),
        ("Loss", "loss"),
        ("x" * 200, "x" * 80),
        ("\u202e", ""),
    ],
)
def test_series_names_are_sanitised(name: str, cleaned: str) -> None:
    assert clean_name(name) == cleaned


def test_values_printed_while_the_store_is_locked_are_stored_later(one: Reading, locked_store, wait_for) -> None:
    one.write("loss: 0.5\n")
    with one.reading():
        wait_for(lambda: (one.run / "metrics.db").exists() and stored(one.run, "loss"), "the first value")
        with locked_store(one.run / "metrics.db"):
            one.write("loss: 0.25\n")
            time.sleep(0.1)
    assert stored(one.run, "loss") == {0: 0.5, 1: 0.25}


def test_cpu_time_and_memory_are_stored_by_second_and_kept_if_steps_start_over(one: Reading, monkeypatch) -> None:
    monkeypatch.setattr(collector, "USAGE_EVERY_S", 0.0)
    one.write("step=100 loss=1\n")
    with one.reading():
        sum(range(2_000_000))
    cpu, memory = stored(one.run, "cpu_percent"), stored(one.run, "host_memory_bytes")
    assert set(cpu) == set(memory) <= {0, 1, 2, 3}
    assert max(filter(None, memory.values())) > 2**20
    one.write("step=0 loss=2\n")
    with one.reading(attempt=2):
        pass
    assert stored(one.run, "loss") == {0: 2}
    assert set(memory) <= set(stored(one.run, "host_memory_bytes"))
    with contextlib.closing(SeriesReader(one.run / "metrics.db")) as reader:
        assert reader.latest()["memory_bytes"] >= max(filter(None, memory.values()))


def test_a_jobs_gpu_usage_is_read_from_stored_samples(tmp_path: Path) -> None:
    from sae_tui.jobs.program_metrics.usage import gpu_usage
    from trainer.contract.paths import DataDir

    data, now = DataDir(tmp_path), time.time()
    with contextlib.closing(open_writer(data.gpu_db, "gpu")) as db:
        for index, (busy, used) in enumerate([(50, 3 * 2**30), (100, 5 * 2**30), (0, 9 * 2**30)]):
            row = (socket.gethostname(), index, now, f"GPU-{index}", busy, used, 80 * 2**30)
            query = (
                "INSERT INTO gpu_metrics(host, gpu_index, timestamp, gpu_uuid, utilization, memory_used, memory_total)"
            )
            db.execute(f"{query} VALUES(?, ?, ?, ?, ?, ?, ?)", row)
    host = socket.gethostname()
    used = {"gpu_percent": 75.0, "gpu_memory_bytes": 5.0 * 2**30}
    assert gpu_usage(data, host, ["GPU-0", "GPU-1"], now - 5) == used
    # Samples from before the job's start may come from another job.
    assert gpu_usage(data, host, ["GPU-0"], now + 5) == {}
    assert gpu_usage(data, host, ["GPU-7"], now - 5) == gpu_usage(data, host, [], now - 5) == {}


def test_a_silent_programs_time_left_is_derived_from_its_time_limit(box) -> None:
    config = CommandJob(command=Command(["true"]), launch=Launch(time_limit="2:00:00"))
    fields = {"config": dump_job(config), "state": JobState.RUNNING, "started": time.time() - 1800}
    silent, reports = box.record(**fields), box.record(**fields)
    box.control.update(reports, step=1, tokens=1, total_steps=11, tokens_per_s=1.0)
    reader = JobsReader(box.data)
    reader.poll()
    left = {job.id: job.eta_s for job in reader.jobs}
    assert left[silent] == pytest.approx(5400, abs=60)
    assert left[reports] == 10
    box.control.transition(silent, JobState.FINISHED)
    with contextlib.closing(JobReader(box.data, silent)) as one_job:
        one_job.poll()
        assert one_job.view.eta_s is None


def test_only_part_of_ten_megabytes_of_output_is_searched_for_metrics(one: Reading) -> None:
    with one.reading():
        noise = "x" * 99 + "\n"
        for _ in range(10):
            one.write(noise * 10_000)
        one.write("loss: 0.5\n")
    (step,) = stored(one.run, "loss")
    assert step < 100_000
    assert events(one.run) == ["prints too much to search all of it for metrics, so some may be missing"]


def test_the_metrics_reader_loads_no_large_library() -> None:
    code = (
        "import sys, sae_tui.jobs.program_metrics.collector as _\n"
        "print({'numpy', 'torch', 'google', 'textual', 'wandb'} & {name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "set()\n", done.stderr


def test_the_position_record_can_be_read_back() -> None:
    encoded = msgspec.json.encode(collector.CollectorState())
    assert msgspec.json.decode(encoded, type=collector.CollectorState) == collector.CollectorState()
