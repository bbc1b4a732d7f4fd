"""Reads k and the width of a job's SAEs without parsing the entire job file."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from trainer.contract.store.rows import Job
from trainer.contract.wording import count

# Finds the SAE section. Parsing an entire job file would take 0.5 ms, and a list may contain a thousand jobs.
_SECTION = re.compile(r"^\[sae\][ \t]*$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)


def k_words(config: str) -> str:
    """Return k as text, like `32`, or like `8…64` for a sweep, or "" if the job's SAE has no k."""
    return _span([str(k) for k in sorted(_numbers(_settings(config).get("k")))])


def largest_k(config: str) -> float | None:
    """Return the k of a job's SAE, or the largest k in a sweep, or None if the SAE has no k."""
    return max(_numbers(_settings(config).get("k")), default=None)


def largest_d_sae(config: str, d_in: int | None) -> float | None:
    """Return the width of a job's SAE, or the largest width in a sweep, or None if it is unknown."""
    return max(_widths(config, d_in), default=None)


def _widths(config: str, d_in: int | None) -> list[Any]:
    """Return the widths of a job's SAEs, or [] if they depend on `d_in` and `d_in` is unknown."""
    settings = _settings(config)
    widths = _numbers(settings.get("d_sae"))
    if any(widths):
        return widths
    return [round(factor * d_in) for factor in _numbers(settings.get("expansion_factor"))] if d_in else []


def d_sae_words(config: str, d_in: int | None) -> str:
    """Return the SAE width as text, like `1,536`, or like `768…3072` for a sweep.

    Return "" if the width depends on `d_in` and `d_in` is unknown.
    """
    widths = _widths(config, d_in)
    return f"{widths[0]:,}" if len(set(widths)) == 1 else _span([count(width) for width in sorted(widths)])


def dead_after_words(job: Job) -> str:
    """Return after how many tokens without firing a latent counts as dead, like `20.0k tokens`.

    Return "" if the number is unknown or differs between SAEs in a sweep.
    """
    # Import this function here because a job list does not need it.
    from trainer.contract.settings.job import dead_after

    asked = _settings(job.config).get("dead_after_tokens", "auto")
    total = round(job.tokens / job.step * job.total_steps) if job.step and job.total_steps else 0
    if not (isinstance(asked, int) or (asked == "auto" and total)):
        return ""
    return f"{count(dead_after(asked, total))} tokens"


def _settings(config: str) -> dict[str, Any]:
    """Return a job file's SAE section, or an empty dict if it is missing or invalid."""
    section = _SECTION.search(config)
    return _parsed(section[1]) if section else {}


# Keep sections rather than job files, because the files of many jobs differ only in other sections.
@functools.lru_cache(maxsize=4096)
def _parsed(section: str) -> dict[str, Any]:
    try:
        return tomllib.loads(section)
    except tomllib.TOMLDecodeError:
        return {}


def _numbers(value: Any) -> list[Any]:
    """Return the finite numbers in a setting's value, which is a list for a sweep."""
    values = value if isinstance(value, list) else [value]
    numbers = (one for one in values if isinstance(one, int | float) and not isinstance(one, bool))
    return [one for one in numbers if math.isfinite(one)]


def _span(words: Sequence[str]) -> str:
    return f"{words[0]}…{words[-1]}" if len(set(words)) > 1 else words[0] if words else ""
