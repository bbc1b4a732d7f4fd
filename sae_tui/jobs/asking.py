"""Describes how each kind of job reacts to a request to stop, pause or end immediately."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sae_tui.jobs.output import command_of, extracts, kind_of
from trainer.contract.settings.command import Command
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration


class Asked(NamedTuple):
    """How a running job reacts to requests.

    `stops`, `pauses` and `killed` are predicates appended to "job 5". `first` is a sentence about what the job does
    before it stops, `asked` says the same as a clause for an event, and `lost` names what is lost if the job is killed.
    `again` says what `sae-tui resume` does with the job after it ends, and `stored` names the files deleted together
    with it.
    """

    stops: str
    pauses: str
    killed: str
    first: str
    asked: str
    lost: str
    again: str = "resumes it"
    stored: str = "checkpoints, logs and SAEs"


_RANKS = "its ranks agree on a step and save"
_TRAINING = Asked(
    stops="saves a checkpoint and stops at its next step",
    pauses="saves a checkpoint at its next step and is paused; other jobs can then use its GPUs",
    killed="is killed within 5 s, even if it has not saved",
    first="It saves a checkpoint first.",
    asked=_RANKS,
    lost="Steps after its last checkpoint",
)
_EXTRACTION = Asked(
    stops="stops; its complete shards are kept",
    pauses="is paused, so that other jobs can use its GPUs; its complete shards are kept",
    killed="is killed within 5 s; its complete shards are kept",
    first="It keeps its complete shards.",
    asked=_RANKS,
    lost="Rows after its last shard",
)


def asked_of(config: str) -> Asked:
    """Return how the job with this recorded job file reacts to requests."""
    if kind_of(config).is_program:
        return _of_program(command_of(config))
    return _EXTRACTION if extracts(config) else _TRAINING


def stored_with(jobs: Iterable[Job]) -> str:
    """Return a phrase that names the files deleted together with these jobs."""
    return max((asked_of(job.config).stored for job in jobs), key=len, default=_TRAINING.stored)


def _of_program(command: Command | None) -> Asked:
    number = f"SIG{command.stop_signal}" if command else "its stop signal"
    grace = duration(command.grace_s) if command else "its grace time"
    sends = f"sends {number} to its program, and kills it after {grace}"
    return Asked(
        stops=sends,
        pauses=f"{sends}; it is then paused, and other jobs can use its GPUs",
        killed="sends SIGTERM to all its processes, and kills them after 5 s",
        first=f"Its program gets {number}, and is killed after {grace}.",
        asked=f"its program gets {number}, and is killed after {grace}",
        lost="Everything that its program has not saved",
        again="runs it again",
        stored="logs",
    )
