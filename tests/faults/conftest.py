"""Fixtures with real training jobs, and with disks small enough to fill."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.real_job import Result, undisturbed
from jobs.conftest import Box, wait_for

from sae_tui.jobs import detach, edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.process import ProcessRef
from trainer.contract.runs.log_tail import tail
from trainer.contract.store.metrics_store import Heartbeat, SeriesReader
from trainer.contract.store.rows import Event, Job
from trainer.contract.store.states import JobState

START_S = 90.0
LOG_EVERY = 5


class Training:
    """A job on CPU ranks that trains until it is stopped. Its progress is read from rank 0's log."""

    def __init__(
        self, box: Box, n_ranks: int = 1, prepare: Callable[[RunPaths], object] = lambda paths: None, **train: object
    ) -> None:
        """Launch the job. `prepare` is called with the run's paths before any of the job's processes exist."""
        self.box, self.n_ranks = box, n_ranks

        def start(data: DataDir, job_id: int) -> None:
            prepare(data.run(job_id))
            detach.start(data, job_id)

        job = box.config().replace("train", **({"n_steps": 10**6, "log_every": LOG_EVERY, "eval_every": 0} | train))
        self.id = launching.launch(box.data, job, Placement("cpu", (), n_ranks), gpu_source="none", start=start)
        self.paths = box.data.run(self.id)
        self.processes: list[ProcessRef] = []

    def begun(self) -> Training:
        row = self.box.wait(self.id, JobState.RUNNING, timeout_s=START_S)
        ranks = self.box.control.ranks(self.id)
        assert len(ranks) == self.n_ranks
        self.processes = [row.supervisor, *(rank.process for rank in ranks)]
        self.go_on(2 * LOG_EVERY)
        return self

    def log(self) -> str:
        return self.paths.log(0).read_text()

    def step(self) -> int:
        matches = [re.search(r"step (\d+)/", line) for line in tail(self.paths.log(0), 5)]
        return max((int(match[1]) for match in matches if match), default=0)

    def go_on(self, n_steps: int) -> None:
        """Wait until the job has taken `n_steps` more steps."""
        first = self.step()
        wait_for(lambda: self.step() >= first + n_steps, f"{n_steps} steps after {first}", 60)

    def rest(self, seconds: float) -> None:
        """Halt the ranks for this long, so that they do not keep cores busy while the test waits."""
        for number, pause_s in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
            for rank in self.processes[1:]:
                rank.send(number)
            time.sleep(pause_s)

    def says(self, text: str) -> None:
        """Wait until the log contains this text."""
        wait_for(lambda: text in self.log(), f"the log to contain {text!r}", 60)

    def stop(self) -> Job:
        edits.stop(self.box.data, self.id)
        return self.box.wait_ended(self.id, timeout_s=60)

    def stored(self) -> tuple[list[int], list[Event], Heartbeat]:
        """Return the steps with a loss, rank 0's events, and its last heartbeat."""
        with contextlib.closing(SeriesReader(self.paths.metrics_db)) as reader:
            return [point.step for point in reader.points("loss")], reader.events(), reader.heartbeat()

    def kill(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)


ONE_THREAD = "OMP_NUM_THREADS", "1"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread. On a busy machine, threads waiting for each other spend 50 times as long spinning as working."""
    monkeypatch.setenv(*ONE_THREAD)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.end_everything()


@pytest.fixture(scope="session")
def like(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return the result of an undisturbed job on two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*ONE_THREAD)
        return undisturbed(tmp_path_factory.mktemp("undisturbed"), 2)


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path], Path]]:
    """Return a function that mounts an 8 MiB disk at a folder."""
    mounted: list[Path] = []

    def mount(folder: Path) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        # A process that is being killed may still be using the disk.
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def train(box: Box, small_disk: object) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(**options: object) -> Training:
        started.append(Training(box, **options))
        return started[-1].begun()

    yield start
    for training in started:
        training.kill()
