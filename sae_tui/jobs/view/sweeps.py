"""The SAEs of a sweep by their labels, in the order in which the job file names them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

# A TOML parser takes half a millisecond for each of a thousand jobs.
_LIST = re.compile(r"^\s*\w+\s*=\s*\[", re.MULTILINE)


@functools.lru_cache(maxsize=1024)
def labels(config: str) -> tuple[str, ...]:
    """Labels like "k=16" in the order of the job file; none for a run of one, and for a file of another version."""
    if not _LIST.search(config):
        return ()
    # Only now: hardly any job is a sweep.
    from trainer.contract.settings.job_file import members, parse_job
    from trainer.contract.settings.toml import table_of

    job, _ = parse_job(table_of(config))
    return tuple(members(job)) if job and job.sweep else ()


def in_order(found: Iterable[str], config: str) -> list[str]:
    """Labels in the order of the job file; those that it does not name come last, numbers in them by size."""
    known = labels(config)
    return sorted(found, key=lambda label: (known.index(label) if label in known else len(known), _natural(label)))


def _natural(label: str) -> list[tuple[float, str]]:
    """`k=8` before `k=16`."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", label)
    return [(float(part), "") if place % 2 else (0.0, part) for place, part in enumerate(parts)]
