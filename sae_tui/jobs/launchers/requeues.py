"""Records of attempts that a cluster ended although the job was not at fault, after which the job is queued again.

A node failed, or a preemption took the job's nodes. The next attempt avoids failed nodes, and the number of such
attempts in a row is limited.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from trainer.contract.json_file import read_json, write_json
from trainer.contract.paths import RunPaths

_NODE = re.compile(r"\w[\w.-]*")


class Interruption(msgspec.Struct, frozen=True):
    """Why a cluster ended an attempt, as a clause, and the nodes that failed, if they are known."""

    reason: str
    failed_nodes: tuple[str, ...] = ()


def record(paths: RunPaths, attempt: int, interruption: Interruption) -> None:
    """Record that the job is queued again after this attempt."""
    write_json(_file(paths, attempt), interruption)


def before(paths: RunPaths, attempt: int) -> list[Interruption]:
    """Return the interruptions directly before an attempt, the latest first; an attempt without one ends the list."""
    found: list[Interruption] = []
    while interruption := read_json(_file(paths, attempt - len(found) - 1), Interruption):
        found.append(interruption)
    return found


def failed_nodes(paths: RunPaths, attempt: int) -> list[str]:
    """Return the nodes that failed in the attempts directly before this one."""
    nodes = {node for one in before(paths, attempt) for node in one.failed_nodes}
    return sorted(node for node in nodes if _NODE.fullmatch(node))


def _file(paths: RunPaths, attempt: int) -> Path:
    return paths.attempt(attempt) / "interrupted.json"
