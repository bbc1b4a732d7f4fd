"""Tests with many launchers, in separate processes, that request the same GPUs at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.gpus.availability import Holders, choices, with_other_users
from sae_tui.jobs.gpus.locks import ENV_LOCK_DIR, GpuLocks, lock_folder, lock_holders, lock_problem
from sae_tui.jobs.queue.gpu_reader import GpuReader
from sae_tui.jobs.queue.waiting_job import QueueEntry
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

RACER = str(Path(__file__).with_name("racer.py"))
ROUNDS = 25
RACERS = 8
# Another user occupies the fourth of the five simulated GPUs.
SOURCE = "simulated:5"


class Racer:
    """A process that tries to start a job on request."""

    def __init__(self, data: DataDir) -> None:
        command = [sys.executable, RACER, str(data.root)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.hears() == "ready"

    def told(self, word: object) -> None:
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def hears(self) -> str:
        return self._process.stdout.readline().strip()

    @property
    def identity(self) -> dict:
        ref = ProcessRef.of(self._process.pid)
        return {"supervisor_pid": ref.pid, "supervisor_start": ref.start_ticks, "boot_id": ref.boot_id}

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def racers(box):
    box.data.create()
    Control(box.data.control_db).close()
    started = [Racer(box.data) for _ in range(RACERS)]
    yield started
    for racer in started:
        racer.end()


def race(box, racers: list[Racer], job_ids: list[int]) -> list[list[str]]:
    """Let the racers start their jobs simultaneously; return the GPUs that each racer holds at the end."""
    for racer, job_id in zip(racers, job_ids, strict=True):
        racer.told(job_id)
    got = [word.split(",") if (word := racer.hears()) != "-" else [] for racer in racers]
    leases = {lease.gpu_uuid: lease.job_id for lease in box.control.leases()}
    assert leases == {uuid: job_id for job_id, uuids in zip(job_ids, got, strict=True) for uuid in uuids}
    for racer in racers:
        racer.told("on")
        assert racer.hears() == "released"
    for job_id in job_ids:
        box.control.transition(job_id, JobState.STOPPED)
    return got


def assert_booked_once(got: list[list[str]]) -> None:
    assert Counter(uuid for uuids in got for uuid in uuids).most_common(1)[0][1] == 1


def test_eight_launchers_never_book_one_of_four_gpus_twice(box, racers):
    for turn in range(ROUNDS):
        wanted = [tuple((number + turn + step) % 4 for step in range(1 + number % 3)) for number in range(RACERS)]
        job_ids = [
            box.record(
                gpu_ids=indices, gpu_uuids=tuple(f"GPU-{index}" for index in indices), gpus_wanted=len(indices),
                **racer.identity,
            )
            for racer, indices in zip(racers, wanted, strict=True)
        ]  # fmt: skip
        got = race(box, racers, job_ids)
        assert_booked_once(got)
        # The first job never waits for later ones.
        assert got[0] == [f"GPU-{index}" for index in wanted[0]]


@pytest.mark.slow
def test_launchers_for_jobs_that_accept_any_gpus_never_book_a_gpu_twice(box, racers):
    GpuReader(box.data, SOURCE).samples()
    for _ in range(ROUNDS):
        job_ids = [
            box.record(gpu_source=SOURCE, any_gpus=True, gpus_wanted=1 + (number == 0), **racer.identity)
            for number, racer in enumerate(racers)
        ]
        got = race(box, racers, job_ids)
        assert_booked_once(got)
        # A launcher that loses a race normally retries after a second, but the racers do not.
        assert 1 <= sum(map(len, got)) <= 4


# Tests with two users on one machine.


GIB = 2**30


def gpus_seen(*indices: int) -> tuple[GpuSample, ...]:
    return tuple(
        GpuSample(index, f"GPU-{index}", "RTX 3090", 0.0, memory_used_bytes=GIB, memory_total_bytes=24 * GIB)
        for index in indices
    )


@pytest.fixture
def two_users(tmp_path, monkeypatch):
    """Create two data folders on one machine, with a shared folder for locks on real GPUs."""
    monkeypatch.setenv(ENV_LOCK_DIR, str(tmp_path / "locks"))
    # Inject samples, because this machine may have no GPU driver.
    monkeypatch.setattr(GpuReader, "samples", lambda *_: gpus_seen(0, 1))
    folders = []
    for name in ("ann", "bob"):
        data = DataDir(tmp_path / name)
        data.create()
        folders.append(data)
    return folders


HOLDER = """
import sys
from pathlib import Path
from sae_tui.jobs.gpus.locks import GpuLocks
locks = GpuLocks(Path(sys.argv[1]), sys.argv[2:])
print(locks.take(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_user_holds():
    """Return a function that starts a process holding GPU locks, like another user's supervisor."""
    started = []

    def hold(folder: Path, *uuids: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(folder), *uuids]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "True\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def in_line(data: DataDir, box, **fields) -> tuple[Control, int]:
    me = ProcessRef.current()
    identity = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    box.data = data
    return Control(data.control_db), box.record(gpus_wanted=1, **identity | {"gpu_source": "nvml"} | fields)


def test_real_gpus_are_locked_per_machine_and_simulated_gpus_per_data_folder(two_users):
    ann, bob = two_users
    assert lock_folder(ann, "nvml") == lock_folder(bob, "auto")
    assert lock_folder(ann, "nvml").stat().st_mode & 0o7777 == 0o1777
    assert lock_problem(ann, "nvml") == lock_problem(ann, "none") == ""
    assert lock_folder(ann, "simulated:4") == ann.locks / ann.host_word
    assert lock_folder(bob, "none") == bob.locks


def test_a_gpu_held_by_another_users_job_is_shown_as_held_and_never_taken(two_users, other_user_holds, box):
    _, bob = two_users
    folder = lock_folder(bob, "nvml")
    holder = other_user_holds(folder, "GPU-0")
    assert lock_holders(folder, ["GPU-0", "GPU-1"]) == {"GPU-0": holder.pid}
    first, second = choices(gpus_seen(0, 1), with_other_users(Holders(), folder, gpus_seen(0, 1)))
    assert (first.state, second.state) == ("busy", "available")
    assert first.reason.startswith("held by a job of ")
    assert first.reason.endswith(f"(pid {holder.pid})")
    control, job_id = in_line(bob, box, any_gpus=True)
    line = QueueEntry(bob, control, control.job(job_id))
    assert line.try_start()
    assert line.job.gpu_uuids == ("GPU-1",)
    line.locks.release()
    control.close()


def test_a_job_that_names_another_users_gpu_waits_until_it_is_released(two_users, other_user_holds, box):
    _, bob = two_users
    holder = other_user_holds(lock_folder(bob, "nvml"), "GPU-0")
    control, job_id = in_line(bob, box, gpu_ids=(0,), gpu_uuids=("GPU-0",))
    line = QueueEntry(bob, control, control.job(job_id))
    assert not line.try_start()
    assert control.job(job_id).waits_for.startswith("GPU 0 is held by a job of ")
    assert control.leases() == []
    holder.kill()
    holder.wait()
    assert line.try_start()
    line.locks.release()
    control.close()


def test_a_job_notices_a_lock_that_another_user_takes_at_the_last_moment(two_users, other_user_holds, box):
    _, bob = two_users
    folder = lock_folder(bob, "nvml")
    control, job_id = in_line(bob, box, gpu_ids=(0,), gpu_uuids=("GPU-0",), shares_gpus=True)
    holder = other_user_holds(folder, "GPU-0")
    line = QueueEntry(bob, control, control.job(job_id))
    # A job that shares its GPU may run next to other users' processes, but not next to a job with an exclusive lock.
    assert not line.try_start()
    assert str(holder.pid) in control.job(job_id).waits_for
    assert line.locks.descriptors == ()
    control.close()


def test_jobs_sharing_a_gpu_hold_its_lock_together_and_exclude_others(two_users):
    folder = lock_folder(two_users[0], "nvml")
    shared = [GpuLocks(folder, ["GPU-0"], shared=True) for _ in range(2)]
    assert all(locks.take() for locks in shared)
    alone = GpuLocks(folder, ["GPU-1", "GPU-0"])
    assert not alone.take()
    assert (alone.refused, alone.descriptors) == ("GPU-0", ())
    assert GpuLocks(folder, ["GPU-1"]).take()
    for locks in shared:
        locks.release()
    assert GpuLocks(folder, ["GPU-0"]).take()
