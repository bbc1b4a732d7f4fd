"""Formats numbers and text for people. Every function returns plain text, never markup."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells, set_cell_size

from sae_tui.gpu.period import Period
from trainer.contract import wording
from trainer.contract.printable import MARK, printable
from trainer.contract.settings.catalog import Series
from trainer.contract.settings.series import measure as series_in_words

UNKNOWN = "–"
BLOCKS = " ▁▂▃▄▅▆▇█"
# Bar characters are thinner than a row, so that stacked bars remain separate. The rail shows a bar's full length.
LINE, HALF, RAIL = "━", "╸", "─"
# Matches the space between a number and its unit or counted noun, and the spaces around a multiplication sign.
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[KMGT]i?B\b|ms\b|s\b|min\b|h\b|d\b|%|°C|W\b|GPUs?\b|×)|(?<=×) (?=\d)")


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return the text padded or truncated (with "…") to exactly `width` cells; make control characters visible."""
    text = visible(text)
    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 1)) + "…" if width > 0 else ""
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


def wrap(text: str, width: int) -> list[str]:
    """Break the text into lines of at most `width` cells, between words if possible."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in visible(paragraph).split(" "):
            if line and cell_len(line) + 1 + cell_len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
            *full, line = chop_cells(line, max(2, width)) or [""]
            lines += full
        lines.append(line)
    return lines


def wrap_quantities(text: str, width: int) -> list[str]:
    """Break the text into lines of at most `width` cells, but never between a number and its unit."""
    joined = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def visible(text: str) -> str:
    """Return the text with every control character, including tabs, replaced by a visible mark."""
    return text if text.isprintable() else printable(text).replace("\t", MARK)


def gibibytes(n_bytes: float | None) -> str:
    """Return a size like `11.2 GiB` or `82 MiB`; return a dash for None."""
    return UNKNOWN if n_bytes is None else wording.gibibytes(n_bytes)


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}%"


def celsius(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}°C"


def watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} W"


def count(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else wording.count(value)


def number(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else wording.number(value)


def measure(value: float | None, series: Series) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else series_in_words(value, series)


def duration(seconds: float | None) -> str:
    """Return a duration like `45 s`, `12 min`, `3 h 05` or `2 d 4 h`; return a dash for None or a non-finite value."""
    return UNKNOWN if seconds is None or not math.isfinite(seconds) else wording.duration(seconds, short=True)


def measured_duration(seconds: float) -> str:
    """Format a duration like `duration`, but include the seconds below ten minutes, as in `2 min 30`."""
    if seconds >= 90 and round(seconds) < 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d}"
    return duration(seconds)


def clock_time(timestamp: float) -> str:
    """Return the local time of day, with the date if it is not today."""
    then, now = time.localtime(timestamp), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%d %b %H:%M", then)


def bar(fraction: float | None, width: int) -> str:
    """Return a horizontal bar of `width` cells with half-cell resolution, or blanks if `fraction` is None."""
    if fraction is None or not math.isfinite(fraction):
        return " " * width
    full, half = divmod(round(max(0.0, min(1.0, fraction)) * width * 2), 2)
    return (LINE * full + HALF * half).ljust(width, RAIL)


def columns(values: Sequence[float | None], width: int) -> Sequence[float | None]:
    """Return at most `width` values to draw, one per column: the latest ones or, for a `Period`, downsampled ones."""
    if width <= 0:
        return ()
    return values.in_columns(width) if isinstance(values, Period) else values[-width:]


def sparkline(values: Sequence[float | None], width: int, top: float | None) -> str:
    """Return a sparkline of `width` columns on an axis from 0 to `top`; columns without a value stay empty."""
    if not top:
        return " " * width
    return "".join(_block(value, top) for value in columns(values, width)).rjust(width)


def _block(value: float | None, top: float) -> str:
    if value is None:
        return " "
    # Draw the lowest block for 0, so that "idle" differs from "no data".
    return BLOCKS[max(1, min(8, math.ceil(value / top * 8)))]


def tall_sparkline(
    values: Sequence[float | None],
    width: int,
    height: int,
    top: float | None,
    others: Sequence[float | None] = (),
) -> list[str]:
    """Return a sparkline of `height` rows, top row first, with the same axis and columns as `sparkline`.

    `others` contains the values of another quantity. From the first column in which either quantity has a value,
    columns without a value show a rail.
    """
    values, rows = columns(values, width), []
    gaps = _gaps(values, columns(others, width))
    for row in range(height - 1, -1, -1):
        share = None if not top else top / height
        above = [None if value is None else value - row * (share or 0) for value in values]
        levels = [value if value is not None and (value > 0 or row == 0) else None for value in above]
        rows.append(sparkline(levels, width, share))
    if rows and top:
        rows[-1] = "".join(RAIL if place in gaps else char for place, char in enumerate(rows[-1], start=-width))
    return rows


def _gaps(values: Sequence[float | None], others: Sequence[float | None]) -> set[int]:
    """Return the negative indices of the columns without a value, starting at the first value in `values` or `others`.

    Return an empty set if all `values` are None.
    """
    known = [value is not None for value in values]
    if not any(known):
        return set()
    also = [other is not None for other in others][-len(known) :]
    first = min(known.index(True), also.index(True) + len(known) - len(also) if any(also) else len(known))
    return {place - len(known) for place in range(first, len(known)) if not known[place]}
