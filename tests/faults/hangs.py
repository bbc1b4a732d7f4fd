"""A rank that is halted for good: each function does it once, and raises where a guarantee does not hold."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from faults.real_job import RealJob, Result, boxed
from jobs.conftest import wait_for

from trainer.contract.store.states import JobState

STALLED_AFTER_S, ENDED_AFTER_S = 3.0, 6.0
WATCHED = {"stalled_after_s": STALLED_AFTER_S, "end_stalled_after_s": ENDED_AFTER_S, "max_restarts": 1}
# Both limits, the 5 s that a halted process has to end, and what a busy machine and two dumps of stacks add.
WITHIN_S = ENDED_AFTER_S + 5 + 20


def rank_halted(root: Path, dice: random.Random, rank: int, like: Result | None = None, **train: int) -> float:
    """Halt a rank by SIGSTOP: it has to be reported as stalled with the stacks of all ranks, ended, and started again.

    It goes on from its checkpoint. Return the seconds until the ranks were ended.
    """
    with boxed(root) as box:
        job = RealJob(box, launch=WATCHED, **train).at_step(dice.randint(110, 300))
        job.kill(rank, number=signal.SIGSTOP)
        halted = time.monotonic()
        wait_for(lambda: job.row.state == JobState.STALLED, "its being stalled", WITHIN_S)
        wait_for(lambda: job.row.attempt == 2, "its end", WITHIN_S)
        taken = time.monotonic() - halted
        stacks = (job.paths.attempt(1) / "stacks.txt").read_text()
        assert "rank 0 (pid" in stacks, stacks[:200]
        assert "rank 1 (pid" in stacks, stacks[:200]
        assert "is halted (SIGSTOP)" in stacks, stacks[:200]
        assert "training/loop.py" in stacks or "loop.py:" in stacks, stacks[:2000]
        job.ended()
        job.require(JobState.FINISHED)
        (message,) = [event.message for event in box.control.events(job.id) if event.kind == "restarting"]
        assert f"rank {rank} is halted (SIGSTOP)" in message, message
        assert "resumed from" in job.log()
        job.mend()
        if like is not None:
            job.require_same(like)
        return taken


def rank_halted_after_saving(root: Path, dice: random.Random) -> float:
    """Halt a rank where rank 0 has just saved: a save may take long, the step after it may not."""
    return rank_halted(root, dice, 1, checkpoint_every=1, n_steps=400)
