"""Checks a new job against the machine's policy.

A job that the policy never allows produces an error. A job that has to wait produces a warning that gives the reason.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

from sae_tui.jobs.user import user_name
from sae_tui.policy import Limits, Policy
from trainer.contract.errors import Problem
from trainer.contract.settings.job import AnyJob, J
from trainer.contract.settings.typed import as_time_limit, parse_time_limit
from trainer.contract.store.job_store import limit_of_user
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import duration, plural

_TIME, _GPUS = "launch.time_limit", "launch.gpus"


def with_policy_limit(job: J, policy: Policy) -> J:
    """Give a job without a time limit the policy's limit, unless it runs on SLURM, which has its own limits."""
    most_s = policy.usual.max_time_s
    if most_s is None or job.launch.time_limit is not None or job.cluster:
        return job
    return job.replace("launch", time_limit=as_time_limit(most_s))


def problems_with_policy(
    job: AnyJob, n_gpus: int, policy: Policy, past: Iterable[Job], now: float | None = None
) -> list[Problem]:
    """Return an error for each limit that a job can never meet, and a warning for each limit that makes it wait."""
    if policy.path is None or job.cluster:
        return []
    limits = policy.limits(time.time() if now is None else now)
    return _problems_with_time(job, n_gpus, policy, limits) + _problems_with_gpus(n_gpus, policy, limits, past)


def warnings_about(policy: Policy) -> list[Problem]:
    """Return the mistakes in a policy's file as warnings."""
    return [Problem(str(policy.path), str(problem), "warning") for problem in policy.problems]


def _problems_with_time(job: AnyJob, n_gpus: int, policy: Policy, limits: Limits) -> list[Problem]:
    longest_s, now_s = policy.largest.max_time_s, limits.max_time_s
    if job.launch.time_limit is None or longest_s is None or now_s is None:
        return []
    try:
        limit_s = parse_time_limit(job.launch.time_limit)
    except ValueError:
        return []  # the job file's checks report this
    if limit_s > longest_s:
        at_most = f"this machine's policy allows at most {duration(longest_s)}; lower it"
        return [Problem(_TIME, f"is {duration(limit_s)}, but {at_most}")]
    if limit_s <= now_s or not n_gpus:
        return []
    hours = policy.hours_with(lambda each: each.max_time_s is None or each.max_time_s >= limit_s)
    message = f"is {duration(limit_s)}, but the policy allows only {duration(now_s)} now, so the job waits for {hours}"
    return [Problem(_TIME, message, "warning")]


def _problems_with_gpus(n_gpus: int, policy: Policy, limits: Limits, past: Iterable[Job]) -> list[Problem]:
    largest, most = policy.largest.gpus_per_user, limits.gpus_per_user
    if not n_gpus or largest is None or most is None:
        return []
    if n_gpus > largest:
        allowed = f"this machine's policy allows each user only {largest}"
        return [Problem(_GPUS, f"asks for {plural(n_gpus, 'GPU')}, but {allowed}; ask for fewer")]
    if n_gpus > most:
        hours = policy.hours_with(lambda each: each.gpus_per_user is None or each.gpus_per_user >= n_gpus)
        message = (
            f"asks for {plural(n_gpus, 'GPU')}, but the policy allows only {most} now, so the job waits for {hours}"
        )
        return [Problem(_GPUS, message, "warning")]
    user, host = user_name(), socket.gethostname()
    held = {uuid for job in past if (job.user, job.host) == (user, host) and _holds_gpus(job) for uuid in job.gpu_uuids}
    if len(held) + n_gpus > most:
        return [Problem(_GPUS, f"{limit_of_user(user, len(held), most, n_gpus)}, so the job waits", "warning")]
    return []


def _holds_gpus(job: Job) -> bool:
    return job.state != JobState.QUEUED and not job.state.is_final
