"""Shows how each rank spends the time of a step, to reveal a slow rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from sae_tui.format import UNKNOWN, fit, gibibytes, sparkline
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line
from trainer.contract.planning.plan import LATE
from trainer.contract.store.metrics_store import Point

RATE, OWN, DATA, STEP, MEMORY = "rank_tokens_per_s", "busy_ms", "data_ms", "step_ms", "rank_memory_bytes"
WAIT, SHARE = "wait_ms", "share"
# The columns and their widths. A panel shows only as many columns as leave space for the speed history. Busy, wait and
# data add up to the step in the title.
COLUMNS = (
    ("busy", OWN, 7),
    ("wait", WAIT, 7),
    ("data", DATA, 7),
    ("share", SHARE, 7),
    ("memory", MEMORY, 9),
)
LEAST_SPARK, SIGN, SPARK_TITLE = 3, 5, " speed"


class RanksPanel(DetailPanel):
    """One line per rank: its times in a step, and the history of its speed while busy, on a shared axis.

    All ranks take the same steps, so a slow rank, which is also marked, is busy while the others wait. The history
    omits waits, too. It has no numbers, because these would add up to more than the speed of the run.
    """

    DEFAULT_CSS = "RanksPanel { height: 1fr; width: 36%; }"

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the current state of the job.

        Hide the panel for a job that does not train, because such a job records no step times.
        """
        self.display = kind_of(detail.view.config).trains
        super().show_detail(detail)

    def title(self, detail: JobDetail) -> Line:
        steps = [step for rank in _ranks(detail.series) if (step := latest(detail.series, STEP, rank)) is not None]
        time = f" · {_cell_text(STEP, statistics.mean(steps))} ms/step" if steps else ""
        return ((f"Ranks{time}", "title"),)

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        ranks = _ranks(detail.series)
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
        return [((column_titles(width), "label"),), *(rank_lines or [_none(detail, width)])]


def columns(width: int) -> list[tuple[str, str, int]]:
    """Return the title, metric and width of each column that fits into a panel of `width` cells."""
    fitting, left = [], width - SIGN - LEAST_SPARK
    for column in COLUMNS:
        left -= column[2]
        if left >= 0:
            fitting.append(column)
    return fitting


def _ranks(series: Mapping[tuple[str, int], tuple[Point, ...]]) -> list[int]:
    return sorted(rank for name, rank in series if name == RATE)


def column_titles(width: int) -> str:
    """Return the headings of the columns and, if it fits, of the speed history."""
    titles = " rank" + "".join(fit(name, size, right=True) for name, _, size in columns(width))
    return fit(titles + SPARK_TITLE * (len(titles + SPARK_TITLE) <= width), width)


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


def _wait_ms(series: Mapping[tuple[str, int], tuple[Point, ...]], rank: int) -> float | None:
    """Return how long a rank waits for other ranks in a step, the remaining time of the step."""
    step, *own = (latest(series, name, rank) for name in (STEP, OWN, DATA))
    return None if step is None else max(0.0, step - sum(one or 0 for one in own))


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
    """Return a line like `▲ 1    98.2    1.1` with as many columns as fit; the sign marks a slow rank."""
    cells = {name: latest(series, name, rank) for _, name, _ in columns(width)}
    cells |= {WAIT: _wait_ms(series, rank), SHARE: share}
    text = "".join(fit(_cell_text(name, cells[name]), size, right=True) for _, name, size in columns(width)) + " "
    return (
        (f"{'▲' if is_late else ' '}{rank:>3} ", "warn" if is_late else "label"),
        (text, "text"),
        (sparkline(values, max(0, width - SIGN - len(text)), top), "spark"),
    )


def _cell_text(name: str, value: float | None) -> str:
    if name == MEMORY:
        return gibibytes(value)
    if name == SHARE:
        return UNKNOWN if value is None else f"{value:.0%}"
    return UNKNOWN if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
