"""A stop asked for at an awkward moment: each function does it once, and returns the seconds to the end of the job."""

from __future__ import annotations

import random
import time
from pathlib import Path

from faults.real_job import ENDLESS, RealJob, boxed

from trainer.contract.store.states import JobState


def stop_in_start(root: Path, dice: random.Random) -> float:
    """Within 3 s of the launch: before the ranks are there, while they load, meet or prepare."""
    with boxed(root) as box:
        job = RealJob(box, **ENDLESS)
        time.sleep(dice.uniform(0, 3))
        return _stopped(job)


def stop_in_evaluation(root: Path, dice: random.Random) -> float:
    """While it measures, which it does after every step."""
    return _stopped_while_training(root, dice, eval_every=1, checkpoint_every=0)


def stop_in_checkpoint(root: Path, dice: random.Random) -> float:
    """While it saves, which it does after every step."""
    return _stopped_while_training(root, dice, checkpoint_every=1)


def stop_while_reading(root: Path, dice: random.Random) -> float:
    """While it does nothing but read and train."""
    return _stopped_while_training(root, dice, log_every=10_000, checkpoint_every=0)


def _stopped_while_training(root: Path, dice: random.Random, **train: int) -> float:
    with boxed(root) as box:
        job = RealJob(box, **(ENDLESS | train)).at_step(5)
        time.sleep(dice.uniform(0, 1))
        return _stopped(job)


def _stopped(job: RealJob) -> float:
    """Ask for it; what was trained is saved, and every rank has ended of its own accord."""
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
        assert not codes or job.beat is None or job.beat.step == 0, "trained, and nothing is known of it"
    job.mended()
    return taken
