"""Formats quantities for sentences and tables: memory in powers of 1024, rates in powers of 1000."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def gibibytes(n_bytes: float, digits: int = 1) -> str:
    """Format a number of bytes like `17.9 GiB`, or like `82 MiB` if `digits` is 1 and the size is below 0.1 GiB."""
    small = digits == 1 and 0 < n_bytes < 0.1 * 2**30
    return f"{n_bytes / 2**20:.0f} MiB" if small else f"{n_bytes / 2**30:,.{digits}f} GiB"


def distinct_sizes(first: int, second: int) -> tuple[str, str]:
    """Format two numbers of bytes with enough digits (up to 3) to show which is larger."""
    if max(first, second) < 2**20:
        return f"{first / 2**10:,.1f} KiB", f"{second / 2**10:,.1f} KiB"
    pairs = [(gibibytes(first, digits), gibibytes(second, digits)) for digits in (1, 2, 3)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def rate(bytes_per_s: float) -> str:
    """Format a number of bytes per second like `12.0 GB/s`, in units of 10^9 bytes, as is customary for bandwidths."""
    return f"{bytes_per_s / 1e9:,.1f} GB/s"


def duration(seconds: float, *, short: bool = False) -> str:
    """Format a number of seconds like `45 s`, `12 min`, `3 h 05 min` (or `3 h 05` if `short`) or `58 d 20 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes:02d}" + ("" if short else " min")


def join_words(words: list[str]) -> str:
    """Join words as in `a`, `a and b` or `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers in ascending order with ranges, such as `3-9, 12`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def plural(count: int, word: str) -> str:
    """Format a count with its noun, such as `1 GPU`, `2 CPU processes` or `4,000 rows`."""
    ending = "es" if word.endswith("s") else "s"
    return f"{count} {word}" if count == 1 else f"{count:,} {word}{ending}"


# A share of zero rows above this limit is reported, along with the setting that drops zero rows.
MANY_ZERO, DROP_ZERO_ROWS = 0.01, "data.drop_zero_rows = true"


def zero_rows(fraction: float, of_rows: str) -> str:
    """Return a sentence about the share of all-zero rows: `40.0 % of all rows are zero, like padding`."""
    return f"{100 * fraction:.1f} % of {of_rows} are zero, like padding"


def number(value: float) -> str:
    """Format a loss or a ratio with four significant digits."""
    return f"{value:.4g}" if abs(value) < 1e4 else count(value)


def count(value: float) -> str:
    """Format a count like `950`, `12.3k` or `4.0M`; three digits are enough to follow a growing count."""
    # At or above each of these limits, the smaller unit would be rounded to four digits before the decimal point.
    for limit, one, unit in ((999_950_000, 1e9, "G"), (999_950, 1e6, "M"), (9_999.5, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / one:.1f}{unit}"
    return f"{value:.0f}"


def share(value: float) -> str:
    """Format a fraction as a percentage, as in the log: `12.5%`, `<0.1%`, `>99.9%` or `0%`."""
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < 1:
        return ">99.9%"
    return f"{100 * value:.1f}".removesuffix(".0") + "%"


def done(progress: float) -> str:
    """Format progress as a percentage, with `100%` only if it is complete."""
    return f"{min(round(100 * progress), 100 if progress >= 1 else 99)}%"


def bars(counts: Sequence[int]) -> str:
    """Draw counts as blocks, scaled to the highest count; every count above 0 is visible."""
    highest = max(counts, default=0) or 1
    return "".join(_BLOCKS[-(-(len(_BLOCKS) - 1) * n // highest)] for n in counts)
