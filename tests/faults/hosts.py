"""Reboots or renames hosts, or lets hosts share a data folder. Each function injects one fault."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

from faults.real_host import RealHost, require_nothing_left, require_order
from faults.real_job import boxed
from jobs.conftest import Box, wait_for

from trainer.contract.runs.checkpoint_manifest import newest_first, read_state
from trainer.contract.store.states import JobState

ENDLESS, QUICK = "steps=100000 save=5", "steps=20"


def power_cut(root: Path, dice: random.Random) -> float:
    """Cut the power at a random time while jobs wait for one GPU. The first command after the reboot must restart the
    queue.

    Return the seconds from that command until the first job starts.
    """
    with boxed(root) as box, RealHost(box, "gpu1") as host:
        (first,) = host.launch(ENDLESS)
        host.trains(first)
        plain, after = *host.launch(QUICK), *host.launch(QUICK, after=first)
        (held,), (urgent,) = host.launch(QUICK, hold=True), host.launch(QUICK, priority=5)
        indices = {job_id: _place(box, job_id) for job_id in (plain, after, held, urgent)}
        time.sleep(dice.uniform(0, 1.5))
        host.power_off()
        step = box.job(first).step or 0
        host.boot("gpu1")
        began = time.monotonic()
        host.run("jobs")
        wait_for(lambda: box.job(urgent).started, "the queue to continue", 60)
        taken = time.monotonic() - began
        host.require(JobState.LOST, first, error="the machine was restarted")
        require_order(*host.ended(urgent, plain))
        host.require(JobState.QUEUED, after, held)
        assert f"comes after job {first}, which was lost; resume job {first}" in (box.job(after).waits_for or "")
        assert {job_id: _place(box, job_id) for job_id in indices} == indices, "the order of the queue has changed"
        _go_on(host, first, step)
        require_order(*host.ended(first, after))
        host.require(JobState.QUEUED, held)
        host.run("release", held)
        host.ended(held)
        require_nothing_left(box)
        return taken


def renamed_running(root: Path, dice: random.Random) -> float:
    """Rename a host with running and queued jobs. Commands must still work, and all jobs must still wait for its GPU in
    a single queue.

    Return the seconds until the rows contain the new name.
    """
    with boxed(root) as box, RealHost(box, "before") as host:
        (runs,) = host.launch(ENDLESS)
        (waits,) = host.launch(QUICK)
        host.trains(runs)
        time.sleep(dice.uniform(0, 1))
        host.rename("after")
        began = time.monotonic()
        newer = host.launch(QUICK) if dice.random() < 0.5 else []
        wait_for(lambda: box.job(runs).host == box.job(waits).host == "after", "the new name", 15)
        taken = time.monotonic() - began
        assert {lease.host for lease in box.control.leases()} == {"after"}
        newer = newer or host.launch(QUICK)
        assert box.job(runs).state == JobState.RUNNING
        host.run("stop", runs)
        host.require(JobState.STOPPED, box.wait_ended(runs).id)
        require_order(*host.ended(waits, *newer))
        require_nothing_left(box)
        return taken


def made_again(root: Path, dice: random.Random) -> float:
    """Recreate a container on the same volume, with another name and boot id, and without the old processes.

    No command may claim to have done something it did not do. `repair` must end the old container's jobs, which can
    then be resumed in the new container. Return how many seconds `repair` takes.
    """
    with boxed(root) as box, RealHost(box, "container1") as host:
        (runs,) = host.launch(ENDLESS)
        host.trains(runs)
        (waits,) = host.launch(QUICK, after=runs)
        time.sleep(dice.uniform(0, 1))
        host.power_off()
        step = box.job(runs).step or 0
        host.boot("container2")
        acts = [("stop", runs), ("stop", runs, "--kill"), ("stop", waits), ("resume", runs), ("rm", runs, "-y")]
        for words in dice.sample(acts, 3):
            said = host.run(*words, ok=False)
            assert "`sae-tui repair --host container1`" in said, said
        host.require(JobState.QUEUED, waits)
        began = time.monotonic()
        assert f"job {runs} was lost" in host.run("repair")
        taken = time.monotonic() - began
        host.require(JobState.LOST, runs, waits, error="its host container1 has been silent")
        host.run("resume", waits)
        assert box.job(waits).after == (runs,), "the job has lost its dependency"
        _go_on(host, runs, step)
        require_order(*host.ended(runs, waits))
        assert box.job(runs).host == "container2"
        host.run("rm", runs, "-y")
        require_nothing_left(box)
        return taken


def two_on_one_folder(root: Path, dice: random.Random) -> float:
    """Let two hosts share a data folder. Each must use only its own GPU, and neither may end the other's jobs.

    Return the seconds until all jobs have ended.
    """
    with boxed(root) as box, RealHost(box, "gpu1", 1) as one, RealHost(box, "gpu2", 2) as two:
        began = time.monotonic()
        launched: dict[str, list[int]] = {"gpu1": [], "gpu2": []}
        for host in dice.sample([one, two, one, two], 4):
            launched[host.name] += host.launch(QUICK, QUICK)
        for host in (one, two):
            rows = host.ended(*launched[host.name], timeout_s=90)
            require_order(*rows)
            assert {row.host for row in rows} == {host.name}
        taken = time.monotonic() - began
        used = [{uuid for job_id in ids for uuid in box.job(job_id).gpu_uuids} for ids in launched.values()]
        assert [len(uuids) for uuids in used] == [1, 1], f"a job was given a GPU of the other host: {used}"
        assert used[0] != used[1]
        _require_own_end(box, one, two)
        require_nothing_left(box)
        return taken


def _require_own_end(box: Box, one: RealHost, two: RealHost) -> None:
    """Check that one host cannot change the other host's jobs, except that it can stop a running job."""
    (theirs,) = two.launch(ENDLESS)
    two.trains(theirs)
    assert "gpu2" in one.run("stop", theirs)
    assert box.wait_ended(theirs).state == JobState.STOPPED
    two.run("resume", theirs)
    wait_for(lambda: box.job(theirs).state == JobState.RUNNING, "training again", 60)
    two.power_off()
    one.run("jobs")
    assert box.job(theirs).state == JobState.RUNNING, f"the other host has set the state {box.job(theirs).state}"
    step = box.job(theirs).step or 0
    two.boot("gpu2")
    two.run("jobs")
    two.require(JobState.LOST, theirs, error="the machine was restarted")
    _go_on(two, theirs, step)
    two.ended(theirs)


def _place(box: Box, job_id: int) -> tuple[object, ...]:
    job = box.job(job_id)
    return job.queued, job.priority, job.after, job.held


def _go_on(host: RealHost, job_id: int, step: int) -> None:
    """Resume a job that had reached at least this step; check that it continues from its last checkpoint."""
    saved = read_state(newest_first(host.box.data.run(job_id).checkpoints)[0]).position.step
    total = max(step, saved) + 50  # the step in the job's row may be a few seconds old
    host.run("resume", job_id, "--set", f"train.n_steps={total}")
    host.box.wait_ended(job_id)
    host.require(JobState.FINISHED, job_id)
    first, last = map(int, re.findall(r"made the steps (\d+) to (\d+)", host.log(job_id))[-1])
    assert first > step - 5, f"the job had reached step {step} but continued at step {first}"
    assert last == total
