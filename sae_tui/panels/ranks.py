"""Shows the speed of each rank and how its step time is spent, to reveal a slow rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from sae_tui.format import UNKNOWN, count, fit, gibibytes, sparkline
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line
from trainer.contract.planning.plan import LATE
from trainer.contract.store.metrics_store import Point

RATE, OWN, DATA, STEP, MEMORY = "rank_tokens_per_s", "busy_ms", "data_ms", "step_ms", "rank_memory_bytes"
SHARE = "share"
# The columns and their widths. A panel shows only as many columns as leave space for the speed history.
COLUMNS = (
    ("tokens/s", RATE, 10),
    ("busy ms", OWN, 8),
    ("share", SHARE, 7),
    ("data", DATA, 7),
    ("memory", MEMORY, 8),
    ("step", STEP, 8),
)
LEAST_SPARK, SIGN = 3, 5


class RanksPanel(DetailPanel):
    """One line per rank: tokens per second, with a history on a shared axis, and the work time in milliseconds.

    Speed and work time exclude time spent waiting for other ranks, so that a slow rank stands out. A slow rank is also
    marked.
    """

    DEFAULT_CSS = "RanksPanel { height: 1fr; width: 36%; }"

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the current state of the job.

        Hide the panel for a job that does not train, because such a job records no step times.
        """
        self.display = kind_of(detail.view.config).trains
        super().show_detail(detail)

    def title(self, detail: JobDetail) -> Line:
        return (("Ranks, excluding waits", "title"),)

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        ranks = sorted(rank for name, rank in detail.series if name == RATE)
        rates = {rank: [point.value for point in detail.series[RATE, rank]] for rank in ranks}
        top = max((value or 0 for values in rates.values() for value in values), default=None)
        # Leave an eighth of a row free above the fastest rank, to separate the rows.
        top = None if top is None else top * 8 / 7
        late = late_ranks(detail.series, ranks)
        shares = shares_of(detail.series, ranks)
        rank_lines = [
            rank_line(rank, rates[rank], top, width, detail.series, share=shares.get(rank), is_late=rank in late)
            for rank in ranks
        ]
        return [((fit(column_titles(width), width), "label"),), *(rank_lines or [_none(detail, width)])]


def columns(width: int) -> list[tuple[str, str, int]]:
    """Return the title, metric and width of each column that fits into a panel of `width` cells."""
    fitting, left = [], width - SIGN - LEAST_SPARK
    for column in COLUMNS:
        left -= column[2]
        if left >= 0:
            fitting.append(column)
    return fitting


def column_titles(width: int) -> str:
    return " rank" + "".join(fit(name, size, right=True) for name, _, size in columns(width))


def late_ranks(series: Mapping[tuple[str, int], tuple[Point, ...]], ranks: list[int]) -> set[int]:
    """Return the ranks spending more than `LATE` times as long as the median rank on work and waiting for data."""
    times = {rank: (latest(series, OWN, rank) or 0) + (latest(series, DATA, rank) or 0) for rank in ranks}
    if len(times) < 2:
        return set()
    typical = statistics.median_low(times.values())
    return {rank for rank, time in times.items() if typical > 0 and time > LATE * typical}


def shares_of(series: Mapping[tuple[str, int], tuple[Point, ...]], ranks: list[int]) -> dict[int, float]:
    """Return the share of the work that each rank does, from its speed and its work time; {} if any is unknown."""
    work = {rank: (latest(series, RATE, rank) or 0) * (latest(series, OWN, rank) or 0) for rank in ranks}
    return {rank: one / sum(work.values()) for rank, one in work.items()} if all(work.values()) else {}


def latest(series: Mapping[tuple[str, int], tuple[Point, ...]], name: str, rank: int) -> float | None:
    points = series.get((name, rank))
    return points[-1].value if points else None


def _none(detail: JobDetail, width: int) -> Line:
    return ((fit("  no values" if detail.view.state.is_final else "  no values yet", width), "dim"),)


def rank_line(
    rank: int,
    values: list[float | None],
    top: float | None,
    width: int,
    series: Mapping[tuple[str, int], tuple[Point, ...]],
    *,
    share: float | None = None,
    is_late: bool,
) -> Line:
    """Return a line like `▲ 1    7.3k    98.2` with as many columns as fit; the sign marks a slow rank."""
    cells = {name: latest(series, name, rank) for _, name, _ in columns(width)}
    cells |= {RATE: values[-1] if values else None, SHARE: share}
    text = "".join(fit(_cell_text(name, cells[name]), size, right=True) for _, name, size in columns(width)) + " "
    return (
        (f"{'▲' if is_late else ' '}{rank:>3} ", "warn" if is_late else "label"),
        (text, "text"),
        (sparkline(values, max(0, width - SIGN - len(text)), top), "spark"),
    )


def _cell_text(name: str, value: float | None) -> str:
    if name == RATE:
        return count(value)
    if name == MEMORY:
        return gibibytes(value)
    if name == SHARE:
        return UNKNOWN if value is None else f"{value:.0%}"
    return UNKNOWN if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
