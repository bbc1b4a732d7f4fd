"""Stops a job at an unfavourable moment. Each function returns the seconds until the job has ended."""

from __future__ import annotations

import random
import time
from pathlib import Path

from faults.real_job import ENDLESS, RealJob, boxed

from trainer.contract.store.states import JobState


def stop_in_start(root: Path, dice: random.Random) -> float:
    """Stop the job within 3 s of the launch: before the ranks exist, or while they load, connect or prepare."""
    with boxed(root) as box:
        job = RealJob(box, **ENDLESS)
        time.sleep(dice.uniform(0, 3))
        return _stop(job)


def stop_in_evaluation(root: Path, dice: random.Random) -> float:
    """Stop the job while it evaluates, which it does after every step."""
    return _stop_while_training(root, dice, eval_every=1, checkpoint_every=0)


def stop_in_checkpoint(root: Path, dice: random.Random) -> float:
    """Stop the job while it saves a checkpoint, which it does after every step."""
    return _stop_while_training(root, dice, checkpoint_every=1)


def stop_while_reading(root: Path, dice: random.Random) -> float:
    """Stop the job while it trains without logging or saving checkpoints."""
    return _stop_while_training(root, dice, log_every=10_000, checkpoint_every=0)


def _stop_while_training(root: Path, dice: random.Random, **train: int) -> float:
    with boxed(root) as box:
        job = RealJob(box, **(ENDLESS | train)).at_step(5)
        time.sleep(dice.uniform(0, 1))
        return _stop(job)


def _stop(job: RealJob) -> float:
    """Stop the job; check that it saved a checkpoint and that all ranks exited by themselves.

    Return the seconds until the job has ended.
    """
    asked = time.monotonic()
    job.stop().ended()
    taken = time.monotonic() - asked
    row = job.require(JobState.STOPPED)
    assert row.error is None, row.error
    codes = [rank.exit_code for rank in job.ranks]
    assert codes in ([], [3, 3]), codes
    if row.step:
        job.require_whole_checkpoints()
    else:
        assert not codes or job.heartbeat is None or job.heartbeat.step == 0, "the row of a trained job has no step"
    job.mend()
    return taken
