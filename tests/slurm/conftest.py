"""Fixtures for job attempts on a real two-node SLURM cluster shared by all tests in a process."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.slurm import Cluster, obstacle

from sae_tui.jobs.launchers import cluster as cluster_of_job
from sae_tui.jobs.launchers import slurm
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.slurm import SlurmAttempt
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import wanted_ranks
from trainer.contract.runs.rank_spec import RankSpec, rank_command
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := obstacle():
        pytest.skip(reason)
    # The paths of pytest's folders are too long for a socket.
    started = Cluster(Path(tempfile.mkdtemp(prefix="slurm-")))
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(started.folder, ignore_errors=True)


class Submission:
    """Supervises one attempt, and gives tests access to its data."""

    def __init__(self, data: DataDir, job: AnyJob, control: Control) -> None:
        self.data, self.job, self.control = data, job, control
        row = Job(name=job.name, config="", user="ada", host="box", device="cpu", gpu_source="none")
        self.job_id = control.create_job(row)
        self.paths = data.run(self.job_id)
        self.paths.create()
        self.paths.job_file.write_text(dump_job(job))
        self.spec = RankSpec(
            run_dir=self.paths.root,
            output_dir=data.sae(self.job_id),
            attempt=1,
            world_size=wanted_ranks(job),
            device="cpu" if str(job.launch.gpus).startswith("cpu") else "cuda",
            control_db=data.control_db,
            job_id=self.job_id,
        )
        self.command: Callable = rank_command
        self.attempt = self.new_attempt()

    def new_attempt(self) -> SlurmAttempt:
        setup = AttemptSetup(self.job_id, self.job, self.paths, self.spec, command=self.command)
        return SlurmAttempt(setup)

    def start(self, command: Callable = rank_command) -> None:
        self.command = command
        self.attempt = self.new_attempt()
        self.attempt.start()

    @property
    def slurm_id(self) -> str:
        return (self.paths.attempt(1) / "slurm_job").read_text()

    @property
    def told(self) -> list[str]:
        return [event.message for event in self.control.events(self.job_id)]

    def until(self, condition: Callable[[], object], timeout_s: float = 100.0) -> None:
        """Poll the attempt until the condition is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = [self.paths.logs / name for name in ("slurm.log", "rank0.log", "rank1.log")]
            logs_text = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())
            assert time.monotonic() < deadline, f"{self.told}\n{logs_text}"
            self.attempt.wait(0.1)

    def until_ended(self) -> list[int | None]:
        """Poll the attempt until it has ended; return the ranks' exit codes."""
        self.until(lambda: not self.attempt.alive)
        return [rank.code for rank in self.attempt.ranks]

    def until_training(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        progress = self.paths.progress_file(1)

        def is_training() -> bool:
            meanwhile()
            return progress.exists() and b'"training"' in progress.read_bytes()

        self.until(is_training)


@pytest.fixture
def submission(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Return a function that creates a SLURM job in a folder whose name needs shell quoting."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # Short delays suffice because both nodes share a file system and the controller has nothing else to do.
    monkeypatch.setattr(slurm, "WORDS_S", 1.0)
    monkeypatch.setattr(cluster_of_job, "LOOK_EVERY_S", 0.3)
    data = DataDir(tmp_path / 'it\'s 100 % "$(data)"')
    data.create()
    control = Control(data.control_db)

    def make(name: str = "job", n_steps: int = 1_000_000, given: AnyJob | None = None, **launch: object) -> Submission:
        if given:
            return Submission(data, given, control)
        raw = {"data": {"source": "synthetic", "d_in": 8}, "sae": {"d_sae": 16, "k": 4}, "name": name}
        train = {"batch_size": 64, "n_steps": n_steps, "log_every": 1, "eval_every": 0}
        where = {"backend": "slurm", "nodes": 2, "gpus": "cpu:1"}
        job, problems = parse_job(raw | {"train": train, "launch": where | launch})
        assert job, problems
        return Submission(data, job, control)

    yield make
    control.close()
    cluster.cancel_all()
