"""Returns the labels of a sweep's SAEs, and sorts labels in the order of the job file."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

# Matches a setting with a list as its value. Most jobs have no such setting, so few job files have to be parsed.
# Parsing a job file takes 0.5 ms, and a list may contain a thousand jobs.
_LIST = re.compile(r"^\s*\w+\s*=\s*\[", re.MULTILINE)


@functools.lru_cache(maxsize=1024)
def labels(config: str) -> tuple[str, ...]:
    """Return the labels of a sweep's SAEs, like "k=16", in the order of the job file.

    Return () for a single SAE, and for a job file that this version cannot read.
    """
    if not _LIST.search(config):
        return ()
    # Few jobs are sweeps, so import these functions only here.
    from trainer.contract.settings.job_file import members, parse_job
    from trainer.contract.settings.toml import table_of

    job, _ = parse_job(table_of(config))
    return tuple(members(job)) if job and job.sweep else ()


@functools.lru_cache(maxsize=1024)
def axes_words(config: str) -> str:
    """Return what differs between a sweep's SAEs, like `k=8,16,32`, or "" for a single SAE."""
    values: dict[str, dict[str, None]] = {}
    for part in (part for label in labels(config) for part in label.split(",")):
        axis, _, value = part.partition("=")
        values.setdefault(axis, {})[value] = None
    return " ".join(f"{axis}={','.join(each)}" for axis, each in values.items() if len(each) > 1)


def in_order(names: Iterable[str], config: str) -> list[str]:
    """Sort labels in the order of the job file; unknown labels come last, with their numbers sorted by value."""
    order = labels(config)
    return sorted(names, key=lambda label: (order.index(label) if label in order else len(order), _natural(label)))


def _natural(label: str) -> list[tuple[float, str]]:
    """Return a sort key that compares numbers by value, so `k=8` comes before `k=16`."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", label)
    return [(float(part), "") if place % 2 else (0.0, part) for place, part in enumerate(parts)]
