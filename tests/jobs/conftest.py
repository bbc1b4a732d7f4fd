"""Fixtures for tests with real supervisor and rank processes; each test has its own data folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.driver import build_drivers
from support.stores import put_store

from sae_tui.jobs import detach
from sae_tui.jobs.gpus.locks import lock_holder
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.resume import ResumePlan, resume
from sae_tui.jobs.user import user_name
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store import database
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

FAKE_SUPERVISOR = [sys.executable, str(Path(__file__).with_name("fake_supervisor.py"))]
FAKE_QUEUE = [sys.executable, str(Path(__file__).with_name("fake_queue.py"))]
start_fake = functools.partial(detach.start, command=FAKE_SUPERVISOR)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


def write_shard(folder: Path, n_tokens: int = 4096, d_in: int = 8) -> Path:
    n_bytes = 4 * n_tokens * d_in
    header = {"activations": {"dtype": "F32", "shape": [n_tokens, d_in], "data_offsets": [0, n_bytes]}}
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    values = array("f", (source.gauss(0, 1) for _ in range(n_tokens * d_in)))
    (folder / "acts.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + values.tobytes())
    return folder


class Box:
    """A data folder, with methods that do what a user would do."""

    wait_for = staticmethod(wait_for)

    def __init__(self, root: Path) -> None:
        self.data = DataDir(root / "data")
        self.activations = write_shard(root / "acts")

    def config(self, name: str = "job", **launch: object) -> JobConfig:
        raw = {"name": name, "data": {"path": str(self.activations)}, "sae": {"d_sae": 16, "k": 4}}
        steps = re.search(r"steps=(\d+)", name)
        train = {"batch_size": 64, "n_steps": int(steps[1]) if steps else 10}
        job, problems = parse_job(raw | {"train": train, "launch": launch})
        assert job, problems
        return job

    def launch(
        self, name: str, gpus: tuple[int, ...] = (), world_size: int = 1, *, place: dict | None = None, **launch: object
    ) -> int:
        """Launch a job with fake ranks, whose behaviour depends on the job's name; `place` contains queue options."""
        where, job = self.placement(gpus, world_size), self.config(name, **launch)
        self.make_store()
        return launching.launch(self.data, job, where, gpu_source="none", start=start_fake, **place or {})

    def placement(self, gpus: tuple[int, ...] = (), world_size: int = 1) -> Placement:
        named = tuple((index, f"GPU-{index}") for index in gpus)
        return Placement("cuda" if gpus else "cpu", named, len(gpus) or world_size)

    def resume(self, job_id: int, *overrides: str, gpus: tuple[int, ...] = ()) -> ResumePlan:
        return resume(self.data, job_id, lambda _: self.placement(gpus), overrides, start=start_fake)

    def make_store(self) -> None:
        """Create an empty job store if none exists."""
        self.data.create()
        put_store(self.data.control_db, "control")

    def messages(self, job_id: int, kind: str) -> list[str]:
        return [event.message for event in self.control.events(job_id) if event.kind == kind]

    def record(self, name: str = "job", **fields: object) -> int:
        """Record a job without processes."""
        self.make_store()
        values = {"config": "", "user": "me", "host": socket.gethostname(), "device": "cpu"}
        values |= {"gpu_source": "none"}
        control = Control(self.data.control_db)
        try:
            return control.create_job(Job(name=name, **(values | fields)))
        finally:
            control.close()

    @property
    def control(self) -> Control:
        if not hasattr(self, "_control"):
            self._control = Control(self.data.control_db)
        return self._control

    def job(self, job_id: int) -> Job:
        return self.control.job(job_id)

    def wait(self, job_id: int, *states: JobState, timeout_s: float = 30.0) -> Job:
        wait_for(lambda: self.job(job_id).state in states, f"job {job_id} to be {states}", timeout_s)
        return self.job(job_id)

    def wait_ended(self, job_id: int, timeout_s: float = 30.0) -> Job:
        wait_for(lambda: self.job(job_id).state.is_final, f"job {job_id} to end", timeout_s)
        return self.job(job_id)

    def wait_steps(self, job_id: int, rank_count: int = 1) -> Job:
        """Wait until the job has taken a step, and check that all its ranks are alive."""
        wait_for(lambda: self.job(job_id).step > 0, f"steps of job {job_id}")
        assert len(self.living(job_id)) == rank_count
        return self.job(job_id)

    def living(self, job_id: int) -> list[int]:
        """Return the pids of all live ranks of the job."""
        return [rank.pid for rank in self.control.ranks(job_id) if rank.process.is_alive()]

    def queue_process(self) -> ProcessRef | None:
        """Return this user's queue process, or None if it is not running."""
        pid = lock_holder(self.data.queue_lock(socket.gethostname(), user_name()))
        return ProcessRef.of(pid) if pid else None

    def start_queue(self) -> ProcessRef:
        """Start the queue process with fake ranks, and return it."""
        self.make_store()
        detach.start_queue(self.data, FAKE_QUEUE)
        queue = self.queue_process()
        assert queue
        return queue

    def enqueue(self, name: str, gpus: tuple[int, ...] = (), **place: object) -> int:
        """Launch a job with fake ranks, but leave it to the queue process to start the job's supervisor."""
        self.make_store()
        where, job = self.placement(gpus), self.config(name)
        return launching.launch(self.data, job, where, gpu_source="none", start=lambda *_: None, **place)

    def end_everything(self) -> None:
        if not self.data.control_db.exists():
            return
        if (queue := self.queue_process()) and queue.pid != os.getpid():
            queue.send(signal.SIGKILL)
        for job in self.control.jobs():
            processes = [job.supervisor, *(rank.process for rank in self.control.ranks(job.id))]
            for process in processes:
                if process and process.pid != os.getpid():
                    process.send(signal.SIGKILL)
        self.control.close()


LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked_store(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Lock the store from another process, as a writer would, and yield that process."""
    command = [sys.executable, "-c", LOCKER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as locker:
        assert locker.stdout.readline() == "locked\n"
        yield locker
        locker.stdin.close()


@pytest.fixture(name="locked_store")
def _locked_store(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., contextlib.AbstractContextManager[subprocess.Popen[str]]]:
    """Limit every wait for the store's lock to 50 ms, and return `locked_store`."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    return locked_store


@pytest.fixture
def no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start supervisors and queue processes as new Python processes, as outside tests."""
    monkeypatch.setattr(detach, "subprocess", subprocess)


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., None]:
    return wait_for


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a folder with three fake versions of NVIDIA's library: `new`, `old` and `none`."""
    return build_drivers(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.end_everything()
