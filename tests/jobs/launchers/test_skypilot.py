"""Tests for jobs on rented machines, with a stub of SkyPilot's command whose jobs are real processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sky import Sky

from sae_tui.jobs.launchers import skypilot
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.skypilot import RentedAttempt, cancel_left_behind, read_rented
from sae_tui.jobs.skypilot import client
from sae_tui.jobs.skypilot.task import Task, machine_name
from trainer.contract.paths import DataDir
from trainer.contract.runs.checkpoint_manifest import newest_whole, position_of
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RankSpec
from trainer.contract.runs.resume import stored_run
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import any_job_of, dump_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.rows import Job

# Words of `sky autostop` after the name: a machine that has been idle for an hour is stopped, and keeps its disk.
STOPS = ["--yes", "-i", "60"]


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sky]:
    monkeypatch.setattr(skypilot, "LOOK_EVERY_S", 0.3)
    monkeypatch.setattr(skypilot, "LOOK_AGAIN_S", 0.2)
    stub = Sky(tmp_path / "sky", monkeypatch)
    yield stub
    stub.close()


def training(n_steps: int) -> AnyJob:
    return any_job_of(
        {
            "name": "tiny",
            "data": {"source": "synthetic", "d_in": 8},
            "sae": {"d_sae": 16, "k": 4},
            "train": {"batch_size": 64, "n_steps": n_steps, "log_every": 10, "eval_every": 0, "report_card": False},
            "launch": {"backend": "skypilot", "gpus": "cpu"},
        }
    )


def command(line: str) -> AnyJob:
    table = {"kind": "command", "command": {"argv": ["bash", "-c", line]}}
    return any_job_of(table | {"launch": {"backend": "skypilot", "gpus": "cpu"}})


class Rental:
    """A job with its attempts, which tests drive as a supervisor does."""

    def __init__(self, folder: Path, job: AnyJob) -> None:
        self.data, self.job = DataDir(folder / "data"), job
        self.data.create()
        self.control = Control(self.data.control_db)
        row = Job(name=job.name, config=dump_job(job), user="ada", host="box", device="cpu", gpu_source="none")
        self.job_id = self.control.create_job(row)
        self.paths = self.data.run(self.job_id)
        self.paths.create()

    def start(self, number: int = 1) -> RentedAttempt:
        spec = RankSpec(
            run_dir=self.paths.root,
            output_dir=self.data.sae(self.job_id),
            attempt=number,
            world_size=1,
            device="cpu",
            control_db=self.data.control_db,
            job_id=self.job_id,
        )
        attempt = RentedAttempt(AttemptSetup(self.job_id, self.job, self.paths, spec))
        attempt.start()
        return attempt

    @property
    def name(self) -> str:
        """The name of the machine."""
        return machine_name(self.paths.root, self.job.name)

    @property
    def told(self) -> str:
        return "\n".join(event.message for event in self.control.events(self.job_id))

    def log(self) -> str:
        files = [self.paths.log(0), self.paths.logs / "sky.log"]
        return "\n".join(file.read_text() for file in files if file.exists())

    def until(self, attempt: RentedAttempt, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, f"{self.told}\n{self.log()}"
            attempt.wait(0.05)

    def until_ended(self, attempt: RentedAttempt) -> tuple[int | None, str]:
        """Return the exit code, and why the attempt failed, if it did."""
        self.until(attempt, lambda: not attempt.alive)
        (code,) = attempt.codes
        return code, attempt.cause() if attempt.has_failed else ""

    def points(self) -> list[int]:
        with contextlib.closing(SeriesReader(self.paths.metrics_db)) as reader:
            return [point.step for point in reader.points("fvu")]

    def n_points(self) -> int:
        return len(self.points()) if self.paths.metrics_db.exists() else 0


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def rental(sky: Sky, tmp_path: Path) -> Iterator[Callable[[AnyJob], Rental]]:
    made: list[Rental] = []

    def make(job: AnyJob) -> Rental:
        made.append(Rental(tmp_path, job))
        return made[-1]

    yield make
    for one in made:
        one.control.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stopped_run_continues_on_another_machine_with_its_curves_and_sae(sky: Sky, rental) -> None:
    run = rental(training(n_steps=1_000_000))
    first = run.start()
    run.until(first, lambda: run.n_points() > 3)
    assert "`sae-tui --host tiny-" in run.told
    first.ask_to_stop()
    assert run.until_ended(first) == (EXIT_STOPPED, "")
    stopped_at = position_of(newest_whole(run.paths.checkpoints)).step
    assert stopped_at > 30
    assert stored_run(run.paths.root).position.step == stopped_at
    assert [words[1:] for words in sky.asked("autostop")] == [STOPS, ["--yes", "--down", "-i", "15"]]
    assert "cost: $1.23 so far" in run.told
    sky.take_back()

    second = run.start(2)
    run.until(second, lambda: run.points()[-1] > stopped_at + 10)
    second.ask_to_finish()
    assert run.until_ended(second) == (EXIT_FINISHED, "")
    points = run.points()
    assert points[-1] < 1_000_000
    assert {*range(10, points[-1], 10)} <= {*points}
    assert (run.data.sae(run.job_id) / "cfg.json").exists()
    assert sky.asked("autostop")[2][1:] == STOPS
    assert not sky.asked("cancel")
    assert not sky.asked("down")


def test_an_event_reports_a_machine_that_cannot_be_stopped_when_it_is_idle(sky: Sky, rental) -> None:
    sky.fault("autostop", output="NotSupportedError: Stopping spot instances is not supported on AWS.")
    run = rental(command("sleep 1000"))
    attempt = run.start()
    run.until(attempt, lambda: "keeps running when it is idle" in run.told)
    assert "(NotSupportedError: Stopping spot instances is not supported on AWS);" in run.told
    assert "`sae-tui down 1` ends it" in run.told
    attempt.end()
    run.until_ended(attempt)


def test_a_program_runs_there_and_its_exit_code_comes_back(rental) -> None:
    run = rental(command("echo hello from $((1 + 1)); exit 7"))
    code, why = run.until_ended(run.start())
    assert code == 7
    assert why.endswith("ended with exit code 7; its last log line: hello from 2")
    assert "hello from 2" in run.log()


def test_a_stopped_program_gets_sigterm_and_its_machine_is_kept(sky: Sky, rental) -> None:
    run = rental(command("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"))
    attempt = run.start()
    run.until(attempt, lambda: "ready" in run.log())
    attempt.ask_to_stop()
    assert run.until_ended(attempt)[0] == EXIT_STOPPED
    assert attempt.how() == "was cancelled"
    assert [words[1:] for words in sky.asked("autostop")] == [STOPS]
    assert "is still rented; it is stopped when it is idle" in run.told
    assert "`sae-tui down 1` ends it" in run.told


def test_a_new_supervisor_follows_the_job_and_stores_no_line_twice(sky: Sky, rental) -> None:
    run = rental(command("for n in 1 2 3; do echo line $n; sleep 0.3; done"))
    first = run.start()
    run.until(first, lambda: "line 1" in run.log())
    second = run.start()
    assert run.until_ended(second) == (EXIT_FINISHED, "")
    assert run.log().count("line 1") == 1
    assert len(sky.asked("launch")) == 1


def test_a_job_whose_supervisor_died_is_cancelled(sky: Sky, rental) -> None:
    run = rental(command("sleep 60"))
    attempt = run.start()
    run.until(attempt, lambda: attempt.describe().startswith("its job is RUNNING"))
    folder = run.paths.attempt(1)
    cancel_left_behind(folder)
    assert sky.asked("cancel") == [["--yes", read_rented(folder).name, "1"]]
    (folder / "rented.json").write_text("{broken")
    cancel_left_behind(folder)
    assert run.until_ended(attempt) == (EXIT_FAILED, "was cancelled with SkyPilot")


def test_a_machine_that_the_cloud_takes_back_ends_the_attempt(sky: Sky, rental) -> None:
    run = rental(command("echo ready; sleep 60"))
    attempt = run.start()
    run.until(attempt, lambda: "ready" in run.log())
    sky.take_back()
    code, why = run.until_ended(attempt)
    assert code == EXIT_FAILED
    assert why.endswith("is gone: the cloud took it back, or it was ended elsewhere")


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("sky.exceptions.NoCloudAccessError: Cloud access is not set up. Run: sky check", "has no cloud to rent from"),
        ("Authentication required for SkyPilot API server at x. Please run:\n  sky api login -e x", "`sky api login`"),
        ("botocore.exceptions.NoCredentialsError: Unable to locate credentials", "log in to the cloud again"),
        ("\x1b[33mFound no quota for a2-highgpu-1g spot instances in region us-central1\x1b[0m", "a higher quota"),
        ("An error occurred (InsufficientInstanceCapacity)\nFailed to provision resources.", "no cloud has a free"),
        ("ResourcesUnavailableError: No launchable resource found for task Task<name=x>.", "offers these GPUs"),
        ("HTTPSConnectionPool(host='x', port=443): Max retries exceeded with url: /y", "check this machine's network"),
        ("something\nunforeseen \x1b]0;title\x07", "SkyPilot says: unforeseen"),
        ("", "failed without a message"),
    ],
)
def test_a_launch_that_fails_says_why_in_one_sentence(sky: Sky, rental, output: str, wanted: str) -> None:
    sky.fault("launch", 1, output)
    run = rental(command("true"))
    code, why = run.until_ended(run.start())
    assert code == EXIT_FAILED
    assert why.startswith("no machine was rented: ")
    assert wanted in why
    assert why.isprintable()


def test_a_launch_that_hangs_is_given_up(sky: Sky, rental, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skypilot, "LAUNCH_S", 0.3)
    sky.fault("launch", hangs=True)
    run = rental(command("true"))
    assert run.until_ended(run.start()) == (EXIT_FAILED, "no machine was rented: `sky` did not answer in time")
    wait_for(lambda: sky.asked("down"))
    assert sky.asked("down") == [["--yes", run.name]]


def test_a_job_that_is_killed_during_its_launch_leaves_no_machine(sky: Sky, rental) -> None:
    sky.fault("launch", hangs=True)
    run = rental(command("true"))
    attempt = run.start()
    wait_for(lambda: sky.asked("launch"))
    attempt.end()
    assert run.until_ended(attempt)[0] == EXIT_FAILED
    wait_for(lambda: sky.asked("down") == [["--yes", run.name]])
    assert f"SkyPilot is asked to end its machine {run.name}" in run.told


def test_a_failed_launch_on_a_machine_with_checkpoints_stops_it_instead(sky: Sky, rental) -> None:
    run = rental(command("true"))
    assert run.until_ended(run.start())[0] == EXIT_FINISHED
    sky.fault("launch", output="Failed to rsync up")
    assert run.until_ended(run.start(2))[0] == EXIT_FAILED
    wait_for(lambda: len(sky.asked("autostop")) == 2)
    assert [words[1:] for words in sky.asked("autostop")] == [STOPS, STOPS]
    assert not sky.asked("down")


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ({"code": 0, "output": "JOBS\n1 RUNNING"}, "`sky` printed no JSON that sae-tui understands, but: 1 RUNNING"),
        ({"code": 0, "output": '{"x": [{"id": "one"}]}'}, "printed no JSON that sae-tui understands"),
        ({"code": 1, "output": "Connection refused"}, "cannot reach its server or the clouds"),
        ({"hangs": True}, "`sky` did not answer in time"),
    ],
)
def test_a_machine_that_cannot_be_asked_for_long_fails_the_job(sky: Sky, rental, monkeypatch, fault, wanted) -> None:
    run = rental(command("sleep 60"))
    attempt = run.start()
    run.until(attempt, lambda: attempt.describe().startswith("its job is RUNNING"))
    sky.fault("queue", **fault)
    monkeypatch.setattr(skypilot, "SILENT_S", 0.5)
    if "hangs" in fault:
        monkeypatch.setattr(skypilot, "ANSWER_S", 0.5)
    code, why = run.until_ended(attempt)
    assert code == EXIT_FAILED
    assert wanted in why


def test_without_the_command_the_job_fails_with_the_fix(rental, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(client.SkyError, match=r"command `sky` is not on \$PATH; run `pip install skypilot`"):
        rental(command("true")).start()


def test_files_that_cannot_be_copied_are_named_and_their_machine_is_kept(sky: Sky, rental, monkeypatch) -> None:
    (sky.folder / "bin" / "ssh").write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname' >&2; exit 255\n")
    monkeypatch.setattr(skypilot, "make_task", lambda *_: Task("run: echo @sae-tui end 0\n", []))
    run = rental(training(n_steps=10))
    assert run.until_ended(run.start()) == (EXIT_FINISHED, "")
    assert "because copying them failed" in run.told
    assert "`scp -r tiny-" in run.told
    assert [words[1:] for words in sky.asked("autostop")] == [STOPS]
