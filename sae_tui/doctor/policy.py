"""Reports the policy in force on this machine, and the mistakes in its file."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.policy import NAME, Policy, read_policy

_SUBJECT = "policy"


def check_policy(box: CheckedMachine) -> Iterator[Finding]:
    """Report the limits for all users, and which of them apply now."""
    policy = read_policy(box.data, box.root)
    if policy.path is None:
        yield Finding("ok", _SUBJECT, "no policy limits the jobs on this machine")
        return
    for problem in policy.problems:
        sentence, _, remedy = str(problem).partition("; `")
        yield Finding("warning", _SUBJECT, sentence, f"`{remedy}" if remedy else f"correct {policy.path}")
    if policy.owner:
        yield _in_force(box, policy)


def _in_force(box: CheckedMachine, policy: Policy) -> Finding:
    now, lines = policy.limits(time.time()).words or "no limits", policy.sentences
    sentence = f"{'; '.join(lines)} ({policy.path}, owned by {policy.owner})"
    if policy.hours:
        sentence = f"now {now}; usually {sentence}"
    if policy.path != box.data.root / NAME:
        return Finding("ok", _SUBJECT, sentence)
    # Any member can rename a file in a folder that the group may write to.
    remedy = f"any member of the group can remove it there; only root can remove /etc/sae-tui/{NAME}"
    return Finding("note", _SUBJECT, sentence, remedy)
