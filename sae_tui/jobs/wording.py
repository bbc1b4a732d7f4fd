"""Quantities as the sentences of this package write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # A supervisor that waits has no use for the catalog.
    from trainer.contract.settings.catalog import Series


def gigabytes(n_bytes: float) -> str:
    """Write bytes as `11.2 GB` or `82 MB`; a GPU's memory is counted in units of 2^30 and 2^20."""
    return f"{n_bytes / 2**20:.0f} MB" if 0 < n_bytes < 0.1 * 2**30 else f"{n_bytes / 2**30:.1f} GB"


def duration(seconds: float) -> str:
    """Write a number of seconds as `45 s`, `12 min`, `3 h 05 min` or `58 d 20 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def listed(words: list[str]) -> str:
    """Join words as `a`, `a and b` or `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, word: str) -> str:
    """Write a count with its noun: `1 GPU`, `2 GPUs`, `2 CPU processes`."""
    ending = "es" if word.endswith("s") else "s"
    return f"{count} {word}" if count == 1 else f"{count} {word}{ending}"


def number(value: float) -> str:
    """Write a loss or a ratio in four significant digits."""
    return f"{value:.4g}" if abs(value) < 1e4 else count(value)


def measure(value: float, series: Series) -> str:
    """Write a value of a series, with its unit."""
    text = share(value) if series.is_share else number(value)
    return f"{text} {series.unit}".rstrip()


def count(value: float) -> str:
    """Write a count as `950`, `12.3k` or `4.0M`; three digits are enough to follow it."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.1f}{unit}"
    return f"{value:.0f}"


def share(value: float) -> str:
    """Write a fraction of 1 in percent, as the log has it: `12.5%`, `<0.1%`, `0%`."""
    if 0 < value < 0.0005:
        return "<0.1%"
    return f"{100 * value:.1f}".removesuffix(".0") + "%"
