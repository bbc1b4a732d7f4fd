"""Tests for a machine's policy, with real supervisors: limits at launch, in the queue, and while a job runs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import pytest

from sae_tui.jobs import edits
from sae_tui.jobs.gpus.idle import CHECK_EVERY_S, IdleWatch
from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.jobs.launch.limits import problems_with_policy, with_policy_limit
from sae_tui.jobs.queue.waiting_job import QueueEntry
from sae_tui.jobs.user import user_name
from sae_tui.policy import Policy, read_policy
from trainer.contract.errors import JobFileError
from trainer.contract.process import ProcessRef
from trainer.contract.store.database import open_writer
from trainer.contract.store.job_store import Control, LeaseConflict
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.trust import user_of

HOST = socket.gethostname()


def set_policy(box, text: str) -> Policy:
    """Share the data folder with a group, and write its policy."""
    box.make_store()
    box.data.root.chmod(0o2770)
    file = box.data.root / "policy.toml"
    file.write_text(text)
    file.chmod(0o644)
    return read_policy(box.data)


def queued(box, *gpus: int, **fields) -> int:
    me = ProcessRef.current()
    identity = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    uuids = tuple(f"GPU-{index}" for index in gpus)
    return box.record(**{"gpu_ids": gpus, "gpu_uuids": uuids, "gpus_wanted": len(gpus)} | identity | fields)


def entry(box, job_id: int) -> QueueEntry:
    control = Control(box.data.control_db)
    return QueueEntry(box.data, control, control.job(job_id))


def test_a_job_beyond_its_users_limit_waits_until_another_job_ends(box):
    set_policy(box, "gpus_per_user = 2")
    first, second, other = queued(box, 0, 1), queued(box, 2), queued(box, 3, user="bob")
    started = entry(box, first)
    assert started.try_start()
    assert not entry(box, second).try_start()
    assert box.job(second).waits_for == "me has 2 of 2 GPUs that the policy allows"
    assert entry(box, other).try_start()
    box.control.transition(first, JobState.FINISHED)
    assert entry(box, second).try_start()


def test_a_damaged_policy_does_not_prevent_jobs_from_starting(box):
    policy = set_policy(box, "gpus_per_user = 1\nmax_time = [")
    assert policy.problems
    for number in range(3):
        assert entry(box, queued(box, number)).try_start()


LOCKER = """
import sys
from pathlib import Path
from sae_tui.jobs.gpus.locks import GpuLocks
assert GpuLocks(Path(sys.argv[1]), sys.argv[2:]).take()
print("locked", flush=True)
sys.stdin.read()
"""


def test_gpus_locked_by_a_users_job_in_another_data_folder_count_towards_the_limit(box):
    set_policy(box, "gpus_per_user = 2")
    me = user_of(0) if user_name() == "root" else user_name()
    running, waiting = queued(box, 0, user=me), queued(box, 1, user=me)
    command = [sys.executable, "-c", LOCKER, str(box.data.locks), "GPU-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        assert entry(box, running).try_start()
        assert not entry(box, waiting).try_start()
        assert box.job(waiting).waits_for == f"{me} has 2 of 2 GPUs that the policy allows"
        other.stdin.close()


def test_two_processes_that_decide_at_the_same_time_cannot_exceed_a_limit(box):
    limit = {"array": 7, "array_limit": 1}
    rows = [box.job(queued(box, number, **limit)) for number in range(2)]
    assert box.control.lease(rows[0], [(0, "GPU-0")])
    with pytest.raises(LeaseConflict, match=r"^1 of at most 1 job of array 7 is active$"):
        box.control.lease(rows[1], [(1, "GPU-1")])
    third = box.job(queued(box, 2))
    with pytest.raises(LeaseConflict, match=r"^me has 1 of 1 GPU that the policy allows$"):
        box.control.lease(third, [(2, "GPU-2")], None, 1)
    assert box.control.lease(third, [(2, "GPU-2")], None, 2)


def test_no_more_cpu_jobs_of_an_array_run_at_once_than_its_limit_allows(box):
    ids = [queued(box, array=1, array_limit=2) for _ in range(4)]
    assert [entry(box, job_id).try_start() for job_id in ids] == [True, True, False, False]
    assert box.job(ids[2]).waits_for == "2 of at most 2 jobs of array 1 are active"
    box.control.transition(ids[0], JobState.FINISHED)
    assert entry(box, ids[2]).try_start()
    assert not entry(box, ids[3]).try_start()


def test_gpu_use_is_read_from_the_rows_of_one_host(box):
    now = time.time()
    fields = {"started": now - 50, "gpus_wanted": 2}
    running = queued(box, 0, 1, state=JobState.RUNNING, **fields)
    ended = queued(box, 0, state=JobState.FINISHED, started=now - 90, ended=now - 60)
    paused = box.record(any_gpus=True, energy_s=40.0, **fields)
    queued(box, 0, state=JobState.FINISHED, started=now - 90, ended=now - 80)
    queued(box, 0, host="elsewhere", state=JobState.RUNNING, started=now)
    queued(box, 0)
    found = {use.id: use for use in box.control.gpu_use(HOST, now - 70)}
    assert {job_id: use.n_gpus for job_id, use in found.items()} == {running: 2, ended: 1, paused: 2}
    assert (found[paused].energy_s, found[ended].ended) == (40.0, now - 60)


HOURS = """
gpus_per_user = 2
max_time = "4h"

[[hours]]
start = "20:00"
end = "06:00"
gpus_per_user = 4
max_time = "12h"
"""
NOON, EVENING = 1_793_620_800.0, 1_793_656_800.0  # 2 November 2026, 12:00 and 22:00 UTC


@pytest.mark.parametrize(
    ("gpus", "limit", "now", "said"),
    [
        (2, "4:00:00", NOON, []),
        (2, None, NOON, []),
        (5, None, NOON, [("error", "launch.gpus: asks for 5 GPUs, but this machine's policy allows each user only 4; "
                                   "ask for fewer")]),
        (2, "13:00:00", NOON, [("error", "launch.time_limit: is 13 h 00 min, but this machine's policy allows at "
                                         "most 12 h 00 min; lower it")]),
        (3, None, NOON, [("warning", "launch.gpus: asks for 3 GPUs, but the policy allows only 2 now, so the job waits "
                                     "for daily 20:00-06:00")]),
        (2, "5:00:00", NOON, [("warning", "launch.time_limit: is 5 h 00 min, but the policy allows only 4 h 00 min now,"
                                          " so the job waits for daily 20:00-06:00")]),
        (3, "5:00:00", EVENING, []),
    ],
)  # fmt: skip
def test_the_policy_determines_whether_a_launch_is_refused_or_causes_a_warning(box, gpus, limit, now, said):
    policy = set_policy(box, 'time_zone = "UTC"\n' + HOURS)
    problems = problems_with_policy(box.config(time_limit=limit), gpus, policy, (), now)
    assert [(problem.severity, str(problem)) for problem in problems] == said


def test_a_launch_warns_if_the_user_has_used_up_the_limit(box):
    policy = set_policy(box, "gpus_per_user = 2")
    past = [Job(name="", config="", user=user_name(), host=HOST, device="cpu", gpu_source="none", gpu_uuids=(uuid,),
                state=state) for uuid, state in (("GPU-0", JobState.RUNNING), ("GPU-1", JobState.QUEUED))]  # fmt: skip
    assert problems_with_policy(box.config(), 1, policy, past) == []
    (problem,) = problems_with_policy(box.config(), 2, policy, past)
    assert problem.severity == "warning"
    assert problem.message == (
        f"{user_name()} has 1 of 2 GPUs that the policy allows, and this job needs 2, so the job waits"
    )


def test_a_job_without_a_time_limit_gets_the_policys_limit_and_a_longer_one_is_refused(box):
    policy = set_policy(box, 'max_time = "90m"')
    assert with_policy_limit(box.config(), policy).launch.time_limit == "1:30:00"
    assert with_policy_limit(box.config(time_limit="10"), policy).launch.time_limit == "10"
    with pytest.raises(JobFileError, match=r"^launch.time_limit: is 3 h 00 min, but this machine's policy allows"):
        box.launch("steps=1", time_limit="3:00:00")
    assert box.control.jobs() == []
    job_id = box.launch("steps=1")
    assert 'time_limit = "1:30:00"' in box.job(job_id).config
    assert box.wait_ended(job_id).state == JobState.FINISHED


def test_a_resumed_job_must_meet_the_policy_too(box):
    job_id = box.launch("steps=100000", time_limit="3:00:00")
    box.wait_steps(job_id)
    edits.stop(box.data, job_id)
    box.wait_ended(job_id)
    set_policy(box, 'max_time = "90m"')
    with pytest.raises(JobFileError, match="allows at most 1 h 30 min; lower it"):
        box.resume(job_id)
    box.resume(job_id, 'launch.time_limit="30"')
    edits.stop(box.data, job_id)
    box.wait_ended(job_id)


def test_the_policys_time_limit_also_stops_jobs_launched_before_the_policy_was_set(box):
    first = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(first)
    second = box.launch("steps=100000", gpus=(0,), time_limit="3:00:00")
    assert "time_limit =" not in box.job(first).config
    set_policy(box, 'max_time = "2s"')
    edits.stop(box.data, first)
    job = box.wait_ended(second)
    assert (job.state, job.error) == (JobState.STOPPED, "reached its time limit of 2 s")


def store_use(box, utilization: int) -> None:
    """Store GPU 0's utilisation for the current minute and the next three, as another process would."""
    minute = int(time.time() // 60)
    with contextlib.closing(open_writer(box.data.gpu_db, "gpu")) as db:
        db.executemany(
            "INSERT OR REPLACE INTO gpu_minutes(host, gpu_index, minute, gpu_uuid, n, utilization, utilization_max)"
            " VALUES(?, 0, ?, 'GPU-0', 60, ?, ?)",
            [(HOST, minute + number, utilization, utilization) for number in range(4)],
        )


@pytest.mark.usefixtures("no_forks")
def test_a_job_that_does_not_use_its_gpu_is_reported_and_then_asked_to_stop(box, monkeypatch):
    monkeypatch.setenv("FAKE_IDLE_S", "1")
    set_policy(box, 'stop_idle_after = "3s"')
    job_id = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(job_id)
    store_use(box, 3)
    job = box.wait_ended(job_id)
    assert job.state == JobState.STOPPED
    assert job.error.startswith("kept its GPUs below 5 % utilisation for 3 s, which this machine's policy does not")
    (pointed_out,) = box.messages(job_id, "idle")
    assert pointed_out.startswith("has kept its GPUs below 5 % utilisation for ")
    # The ranks have saved and stopped.
    assert [rank.exit_code for rank in box.control.ranks(job_id)] == [3]


@pytest.mark.slow
@pytest.mark.usefixtures("no_forks")
def test_without_a_policy_an_idle_job_is_only_reported_and_a_busy_job_is_not(box, monkeypatch):
    monkeypatch.setenv("FAKE_IDLE_S", "1")
    idle = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(idle)
    store_use(box, 3)
    box.wait_for(lambda: box.messages(idle, "idle"), "the idle job to be pointed out")
    store_use(box, 98)
    time.sleep(1.5)
    assert box.job(idle).state == JobState.RUNNING
    assert len(box.messages(idle, "idle")) == 1
    edits.stop(box.data, idle)
    box.wait_ended(idle)


def idle_watch(box, clock: list[float]) -> IdleWatch:
    row = Job(name="", config="", user="me", host=HOST, device="cuda", gpu_source="none", gpu_ids=(0,),
              gpu_uuids=("GPU-0",))  # fmt: skip
    return IdleWatch(box.data, row, lambda: clock[0])


def test_a_clock_jump_does_not_make_a_job_count_as_idle(box, monkeypatch):
    box.make_store()
    clock = [0.0]
    store_use(box, 98)
    watch = idle_watch(box, clock)
    clock[0] += CHECK_EVERY_S
    assert watch.turn() == 0
    # The clock jumps ahead by a day, and then minutes without use are stored.
    later = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    store_use(box, 0)
    clock[0] += CHECK_EVERY_S
    assert watch.turn() == CHECK_EVERY_S


def test_a_job_with_unknown_gpu_use_does_not_count_as_idle(box):
    box.make_store()
    clock = [0.0]
    watch = idle_watch(box, clock)
    clock[0] += CHECK_EVERY_S
    assert watch.turn() is None
    store_use(box, 0)
    clock[0] += CHECK_EVERY_S
    # Whether the GPU was used before the first sample is unknown.
    assert watch.turn() <= CHECK_EVERY_S
    assert watch.turn() is None


def test_a_job_that_waits_because_of_a_limit_holds_no_gpu_lock(box):
    set_policy(box, "gpus_per_user = 1")
    assert entry(box, queued(box, 0)).try_start()
    assert not entry(box, queued(box, 1)).try_start()
    assert GpuLocks(box.data.locks, ["GPU-1"]).take()
