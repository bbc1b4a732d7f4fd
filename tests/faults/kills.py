"""Kills a job's processes without warning. Each function injects one fault, and raises an error if a guarantee is
violated.

Each function returns the seconds until the expected event.
"""

from __future__ import annotations

import contextlib
import math
import os
import pty
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from faults.real_job import SHORT, RealJob, Result, boxed
from jobs.conftest import Box, wait_for

from sae_tui.jobs.known_failures import remedy
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.states import JobState

# How soon a killed rank's peers must exit, and how soon a crashed job must train again, in seconds.
PEERS_GONE_AFTER_S = 10.0
AGAIN_AFTER_S = 10.0
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def launcher_killed(root: Path, dice: random.Random) -> float:
    """Kill `sae-tui launch` with SIGKILL at a random time, before or after its job is recorded."""
    with boxed(root) as box:
        command = subprocess.Popen(
            _launch_command(box), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(dice.uniform(0.3, 2.5))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
        return _wait_until_finished(box)


def terminal_closed(root: Path, dice: random.Random) -> float:
    """Close the terminal that `sae-tui launch --wait` runs in. All processes in its session then get SIGHUP."""
    with boxed(root) as box:
        pid, master = pty.fork()
        if not pid:
            # If the tests run under nohup, the process would otherwise ignore SIGHUP.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.execv(sys.executable, [*_launch_command(box), "--wait"])
        wait_for(lambda: box.data.control_db.exists() and box.control.jobs(), "the job", 30)
        time.sleep(dice.uniform(0, 3))
        os.close(master)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) != 0, "the command succeeded although its terminal was closed"
        return _wait_until_finished(box)


def supervisor_killed(root: Path, dice: random.Random, like: Result, n_ranks: int = 2) -> float:
    """Kill the supervisor.

    The ranks must save and exit, and the lost job, once resumed, must produce the same result as an undisturbed job.
    """
    with boxed(root) as box:
        job = RealJob(box, n_ranks)
        _wait_for_some_moment(job, dice)
        step = job.step
        job.kill(supervisor=True)
        taken = job.mend()
        if job.row.state != JobState.FINISHED:
            job.require(JobState.LOST, "disappeared")
            if step:
                job.require_whole_checkpoints()
            job.go_on().ended()
        job.require(JobState.FINISHED)
        job.require_same(like)
        return taken


def rank_killed(root: Path, rank: int, like: Result) -> float:
    """Kill a rank. The report must name this rank, the other ranks must exit, and the job must continue from its
    checkpoint.
    """
    with boxed(root) as box:
        job = RealJob(box, launch={"max_restarts": 1}).at_step(150)
        others = [other.process for other in job.ranks if other.rank != rank]
        job.kill(rank)
        began = time.monotonic()
        wait_for(lambda: not any(other.is_alive() for other in others), "the other rank to exit", PEERS_GONE_AFTER_S)
        wait_for(lambda: job.row.attempt == 2 and job.step and job.heartbeat.phase != "resuming", "a restart", 60)
        wait_for(lambda: "resumed from" in job.log(), "training again", 60)
        again = time.monotonic() - began
        job.ended()
        row = job.require(JobState.FINISHED)
        (message,) = [event.message for event in box.control.events(job.id) if event.kind == "restarting"]
        assert message.startswith(f"crashed: rank {rank} was killed (SIGKILL)"), message
        assert row.restarts == 1
        job.mend()
        job.require_same(like)
        return again


def killed_at_random(root: Path, dice: random.Random, like: Result, n_ranks: int = 2, **train: int) -> float:
    """Kill the supervisor, a rank or all processes of a job at a random time after the launch."""
    with boxed(root) as box:
        job = RealJob(box, n_ranks, **train)
        victims = dice.choice(["supervisor", "all", *range(n_ranks)])
        if victims != "supervisor":
            job.with_ranks(n_ranks)
        _wait_for_some_moment(job, dice)
        has_supervisor = victims in ("supervisor", "all")
        job.kill(*(range(n_ranks) if victims == "all" else [victims]), supervisor=has_supervisor)
        taken = job.mend()
        if job.row.state != JobState.FINISHED:
            # A process killed just before it exits may have saved everything without recording its exit.
            expected = (JobState.LOST, "disappeared") if has_supervisor else (JobState.FAILED, f"rank {victims} ")
            job.require(*expected)
            job.go_on().ended()
        job.require(JobState.FINISHED)
        job.mend()
        job.require_same(like)
        return taken


def rank_raises(root: Path) -> float:
    """Remove a shard before the ranks start, and put it back before they are restarted."""
    with boxed(root) as box:
        shard, away = box.activations / "acts.safetensors", root / "away"
        job = RealJob(box, launch={"max_restarts": 3})
        shard.rename(away)
        began = time.monotonic()
        wait_for(lambda: job.row.restarts, "the failure", 60)
        taken = time.monotonic() - began
        away.rename(shard)
        job.ended()
        job.require(JobState.FINISHED)
        messages = [event.message for event in box.control.events(job.id) if event.kind == "restarting"]
        assert "acts" in messages[0], messages
        job.mend()
        return taken


def rank_finds_nan(root: Path) -> float:
    """Fill a shard with NaN. The job must fail, and must not be restarted, because a restart would not help."""
    with boxed(root) as box:
        (shard,) = box.activations.iterdir()
        content = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        content[start:] = struct.pack("<f", math.nan) * ((len(content) - start) // 4)
        shard.write_bytes(content)
        job = RealJob(box, launch={"max_restarts": 3})
        began = time.monotonic()
        job.ended()
        taken = time.monotonic() - began
        job.require(JobState.FAILED, "contains NaN or infinite values in row ")
        assert job.row.attempt == 1, "the job was restarted unchanged"
        assert remedy(job.row.error).kind == "not-finite"
        job.mend()
        return taken


def rank_out_of_memory(root: Path) -> float:
    """Get rank 1 OOM-killed by a cgroup memory limit; if cgroups are unavailable, limit its address space instead."""
    with boxed(root) as box, _memory_group() as group:
        job = RealJob(box, launch={"max_restarts": 3}).with_ranks()
        (victim,) = [rank for rank in job.ranks if rank.rank == 1]
        if group:
            (group / "cgroup.procs").write_text(str(victim.pid))
        else:
            resource.prlimit(victim.pid, resource.RLIMIT_AS, (256 * 2**20, 256 * 2**20))
        began = time.monotonic()
        job.ended()
        taken = time.monotonic() - began
        job.require(JobState.FAILED, "rank 1")
        if group:
            job.require(JobState.FAILED, "rank 1 was killed by the kernel because the machine ran out of memory")
        kinds = [event.kind for event in box.control.events(job.id)]
        assert "not-restarted" in kinds, kinds
        assert job.row.attempt == 1
        job.mend()
        return taken


def two_at_once(root: Path) -> float:
    """Launch two jobs within two seconds. Each job must use its own ranks."""
    with boxed(root) as box:
        jobs = [RealJob(box, gpus=False, n_steps=60 + 20 * n) for n in range(2)]
        assert jobs[1].began - jobs[0].began < 2
        for n, job in enumerate(jobs):
            job.ended()
            assert job.require(JobState.FINISHED).step == 60 + 20 * n
        return time.monotonic() - jobs[0].began


def _launch_command(box: Box) -> list[str]:
    file = box.activations.parent / "job.toml"
    settings = {name: value for name, value in SHORT.items() if name != "n_steps"}
    file.write_text(dump_job(box.config().replace("train", n_steps=100, **settings).replace("launch", gpus="cpu:2")))
    box.data.create()
    return [sys.executable, "-m", "sae_tui", "--data-dir", str(box.data.root), "launch", str(file)]


def _wait_until_finished(box: Box) -> float:
    """Wait until the launched job, if any, has finished; return how many seconds this takes."""
    began = time.monotonic()
    for row in box.control.jobs():
        while not box.job(row.id).state.is_final:
            reconcile(box.data)
            assert time.monotonic() - began < 90, box.job(row.id).state
            time.sleep(0.1)
        ended = box.job(row.id)
        never_begun = ended.state == JobState.LOST and ended.error == "its supervisor never started"
        assert ended.state == JobState.FINISHED or never_begun, f"{ended.state}: {ended.error}"
    return time.monotonic() - began


def _wait_for_some_moment(job: RealJob, dice: random.Random) -> None:
    """Wait until a random moment while the job starts or trains."""
    if dice.random() < 0.4:
        time.sleep(dice.uniform(0, 5))
    else:
        step = dice.randint(1, 350)
        wait_for(lambda: job.step >= step or job.row.state.is_final, f"step {step}", 90)


@contextlib.contextmanager
def _memory_group(limit_bytes: int = 48 * 2**20) -> Iterator[Path | None]:
    """Create a cgroup with less memory than torch needs; yield None if cgroups are unavailable."""
    group = MEMORY_GROUPS / f"sae-tui-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        yield None
        return
    yield group
    with contextlib.suppress(OSError):
        group.rmdir()
