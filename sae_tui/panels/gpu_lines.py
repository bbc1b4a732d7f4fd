"""GPUs as lines, one or two per GPU, in columns shared by all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len

from sae_tui.format import celsius, fit, percent, watts, wrap
from sae_tui.panels.gpu_row import (
    NO_CONDITION,
    GpuRow,
    blank,
    fan,
    free,
    heat,
    history,
    memory_share,
    memory_short,
    meter,
    processes,
    share_of,
    short_name,
    speed,
)
from sae_tui.widgets.area import shaded
from sae_tui.widgets.lines import Line, Span

LEAST_HISTORY = 12  # cells; a shorter history shows nothing useful
_ERROR_TOLD_S = 3600.0
_LONG_WORD = 8  # the first of two lines may be up to this much shorter than the second, because words are not split


def gpu_lines(rows: Sequence[GpuRow], of: Sequence[GpuRow], width: int, each: int = 1) -> list[Line]:
    """Return `each` lines, one or two, for each of `rows`.

    The column widths suit all GPUs in `of`, so that nothing shifts while the user scrolls.
    """
    longest = max((cell_len(row.holder) for row in of if row.sample.healthy), default=0)
    if each > 1:
        longest = longest // 2 + _LONG_WORD
    return [line for row in rows for line in gpu_line(row, width, longest, each)]


def gpu_line(row: GpuRow, width: int, longest: int = 0, each: int = 1) -> list[Line]:
    """Return a GPU in one or two lines; on a narrow terminal drop bars and numbers first and the fault last.

    The second line holds the lower half of the histories, the power limit, and the rest of the holder's name. If the
    name fits into the first line, the second shows the processes on the GPU.
    """
    sample = row.sample
    # The figures need 30 cells; the name gets what is left.
    name_width = max(3, min(13, width - 30))
    head: Line = (
        (fit(f"{sample.index}", 2, right=True), f"title{row.mark}"),
        (" " + fit(short_name(sample.name), name_width), f"label{row.mark}"),
    )
    if not sample.healthy:
        words, style = row.fault
        line = (*head, (fit(words, max(0, width - 3 - name_width)), style))
        return [line, *[blank(width)] * (each - 1)]
    bar_width, power_width, sparks, holder_width = _columns(width, longest)
    gap: Span = (" " if any(sparks) or not holder_width else "", "text")
    util = shaded(history(row, "utilization", sparks[0], 100, each), "spark")
    memory = shaded(history(row, "memory_used_bytes", sparks[1], sample.memory_total_bytes, each), "memory")
    first: Line = (
        *head,
        *meter(percent(sample.utilization), 5, share_of(sample.utilization, 100), bar_width, "spark"),
        util[0],
        gap,
        *meter(memory_short(sample), 11, memory_share(sample), bar_width, "memory"),
        memory[0],
        gap,
        (fit(celsius(sample.temperature_c), 5, right=True) + " ", heat(sample)),
        (fit(watts(sample.power_w), 6, right=True) + " " if power_width else "", "text"),
    )
    if each == 1:
        return [(*first, (fit(row.holder, holder_width), row.holder_style))]
    who, *more = wrap(row.holder, holder_width) or [""]
    pad = bar_width + bool(bar_width)
    condition = sample.condition or NO_CONDITION
    below, below_style = _below(row, " ".join(more))
    limit = "" if sample.power_limit_w is None else f"of {watts(sample.power_limit_w)}"
    return [
        (*first, (fit(who, holder_width), row.holder_style)),
        (
            (fit(f"   {speed(condition)}", 16), "dim"),
            (fit(fan(condition), 5 + pad, right=True) + " ", "dim"),
            util[1],
            (gap[0], "text"),
            (fit(free(sample), 11 + pad, right=True) + " ", "dim"),
            memory[1],
            (gap[0], "text"),
            (fit(limit, 5 + power_width, right=True) + " ", "dim"),
            (fit(below, holder_width), below_style),
        ),
    ]


def _below(row: GpuRow, rest: str) -> tuple[str, str]:
    """Return the text below the holder's name, and its style.

    It is an error of the last hour, else what slows the GPU, else the rest of the holder's name, else the processes.
    """
    condition = row.sample.condition
    if condition and condition.xid and time.time() - condition.xid.timestamp < _ERROR_TOLD_S:
        return condition.xid.words, "bad"
    slowed = condition.slowed_by if condition else ()
    if slowed:
        return f"slowed: {'; '.join(slowed)}", "warn"
    return (rest, row.holder_style) if rest else (processes(row.sample), "dim")


def _columns(width: int, longest: int) -> tuple[int, int, tuple[int, int], int]:
    """Return the widths of a bar, the power, the two histories and the holder, which wants `longest` cells."""
    power = 7 if width >= 60 else 0
    if width < 70:
        return 0, power, (max(0, width - 43 - power), 0), 0
    # On a narrow terminal, histories are more useful than bars and the full user name.
    least = 24 if width >= 100 else 13 if width >= 90 else 10
    bars = 10 if width >= 100 and width - 72 - max(least, longest) >= LEAST_HISTORY else 6 if width >= 90 else 0
    left = width - 43 - power - 2 * (bars + bool(bars))
    if left - least < LEAST_HISTORY:
        return bars, power, (0, 0), left + 2
    holder = min(max(least, longest), left - LEAST_HISTORY)
    space = left - holder
    return bars, power, (space // 2, space - space // 2) if space >= 24 else (space, 0), holder
