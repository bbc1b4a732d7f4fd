"""Computes how many rows each panel of the dashboard gets, so that the panels fill the window."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sae_tui.panels import gpu_cards
from sae_tui.panels.gpu_map import TALLEST
from sae_tui.widgets.frame import FRAMES, Frame, frame_of

# Which panel has the lower part of the window to itself, or "" if the panels share it.
Lower = Literal["", "processes", "jobs", "gpus"]

# The minimum widths to show the totals as four plots, and to show the preview next to the jobs. The jobs list needs 193
# cells for its default columns; the rest is for the preview.
PLOTS_FROM, SIDE_BY_SIDE_FROM = 100, 280
_TOTALS = 4  # lines: memory, utilisation, power, heat
_FEWEST_GPUS, _FEWEST_JOBS = 3, 2
_LEAST_JOBS = 5  # including the heading; the first steps, shown if there are no jobs, have as many lines
_IDLE_JOBS = 3  # job rows while no job runs
_LEAST_PROCESSES = 3  # including the heading
_SOME_PROCESSES, _MORE_PROCESSES = 4, 8
_LEAST_PLOT = 2
_ROWS_PER_PLOT_ROW = 10  # a window of 40 rows gets plots of up to 4 rows, one of 60 rows up to 6
_LEAST_PREVIEW, _FAIR_PREVIEW, _GOOD_PREVIEW = 5, 8, 14
_MANY_JOBS = 8
_STEP = 4  # the processes panel grows in steps, so that a short-lived process does not move all panels


@dataclass(frozen=True, slots=True)
class PanelHeights:
    """The number of rows inside each panel's frame, or 0 if the panel is hidden.

    `plot` is the height of each of the four totals plots, or 0 if each total is a single line. `per_gpu` is the number
    of lines per GPU; if not all GPUs fit into `gpus`, they scroll. With `is_side_by_side`, the preview is next to the
    jobs.
    """

    frame: Frame
    totals: int
    gpus: int
    jobs: int
    preview: int = 0
    processes: int = 0
    plot: int = 0
    per_gpu: int = 1
    is_side_by_side: bool = False

    @property
    def chrome(self) -> int:
        """The number of rows that a panel's frame takes up."""
        return FRAMES[self.frame]

    @property
    def height(self) -> int:
        """The number of rows that all panels take up, including their frames."""
        stacked = [self.totals, self.gpus, self.processes, self.jobs, 0 if self.is_side_by_side else self.preview]
        return sum(rows + self.chrome for rows in stacked if rows)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents to show in the panels, measured in rows.

    `n_active` jobs run or wait, `is_running` is True if any of them runs, and `n_processes` is the number of processes
    on the GPUs. With `is_card_view` or `tiles`, `n_gpus` is the number of rows of tiles. `previews` means that a job
    can be previewed. `taken` is the number of rows that the panel for other hosts takes up, and `words` is the number
    of rows for the explanation if there are no GPUs.
    """

    n_gpus: int
    n_jobs: int
    n_active: int = 0
    is_running: bool = False
    n_processes: int = 0
    is_card_view: bool = False
    tiles: bool = False
    previews: bool = False
    taken: int = 0
    words: int = 1

    @property
    def tallest(self) -> int:
        """The most rows that a GPU can use as a card or tile, or 0 for lines."""
        return gpu_cards.TALLEST if self.is_card_view else TALLEST if self.tiles else 0


_Requests = Iterator[Mapping[str, int]]


@functools.lru_cache(maxsize=16)  # called several times per tick, mostly with the same arguments
def arrange(width: int, height: int, contents: Contents, lower: Lower = "") -> PanelHeights:
    """Return the rows for each panel in a window of `width` x `height` cells; header and footer take up one row each.

    If there are no jobs, their panel explains what to do. `lower` names the panel that has the lower part to itself.
    """
    space = max(2, height - 2 - contents.taken)
    side_by_side = width >= SIDE_BY_SIDE_FROM and lower in ("", "jobs")
    rows = PanelHeights(frame_of(width, height), 0, 0, 0, is_side_by_side=side_by_side)
    rows = _least(rows, space, contents, lower)
    requests = _Layout(width, height, contents, rows).requests(lower)
    for request in requests:
        larger = replace(rows, **{name: max(value, getattr(rows, name)) for name, value in request.items()})
        rows = larger if larger.height <= space else rows
    hides_only_jobs = rows.jobs <= contents.n_jobs and rows.processes > contents.n_processes
    takes_rest = "processes" if rows.processes and not (contents.is_running or hides_only_jobs) else "jobs"
    rest = lower or ("preview" if rows.preview and not rows.is_side_by_side else takes_rest)
    rows = replace(rows, **{rest: getattr(rows, rest) + max(0, space - rows.height)})
    return replace(rows, preview=rows.jobs) if rows.is_side_by_side and contents.previews else rows


def _least(rows: PanelHeights, space: int, contents: Contents, lower: Lower) -> PanelHeights:
    """Give each panel its minimum height. If the minimums do not fit, drop the totals first, then shrink the jobs."""
    wanted = contents.n_gpus * (2 if contents.is_card_view else 1) or contents.words
    least = 0 if lower == "gpus" else _FEWEST_JOBS
    left = space - (2 if least else 1) * rows.chrome
    has_totals = contents.n_gpus > 0 and not (contents.is_card_view and rows.frame != "framed")
    with_totals = left - _TOTALS - rows.chrome
    is_room = with_totals >= min(wanted, _FEWEST_GPUS) + least
    totals, left = (_TOTALS, with_totals) if has_totals and is_room else (0, left)
    if not least:
        return replace(rows, totals=totals, gpus=left)
    few = min(_LEAST_JOBS if contents.is_running else 3, 1 + contents.n_jobs) if contents.n_jobs else _LEAST_JOBS
    gpus = min(wanted, max(min(wanted, _FEWEST_GPUS), left - few), max(1, left - least))
    fewest = min(few, left - gpus)
    rows = replace(rows, totals=totals, gpus=gpus)
    return replace(rows, processes=fewest) if lower == "processes" else replace(rows, jobs=fewest)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Lists the uses for the remaining rows, most useful first."""

    width: int
    height: int
    of: Contents
    least: PanelHeights

    def requests(self, lower: Lower) -> _Requests:
        """Yield the desired heights, each as the `PanelHeights` fields to raise."""
        if lower in ("processes", "gpus"):
            yield from self._gpu_lines(always=True) if lower == "gpus" else ()
        elif lower == "jobs" or not self.of.n_gpus:
            yield from self._of_jobs()
        else:
            yield from self._while_jobs_run() if self.of.is_running else self._without_running_jobs()

    def _of_jobs(self) -> _Requests:
        yield self._jobs(_MANY_JOBS)
        yield from self._previews(_LEAST_PREVIEW, _GOOD_PREVIEW)
        yield self._jobs(self.of.n_jobs)

    def _while_jobs_run(self) -> _Requests:
        """Yield the jobs and the preview before the processes."""
        yield self._jobs(min(self.of.n_active, _MANY_JOBS))
        yield from self._plots(_LEAST_PLOT)
        yield from self._previews(_LEAST_PREVIEW, _LEAST_PREVIEW)
        yield {"processes": _LEAST_PROCESSES}
        yield from self._gpu_lines()
        yield self._processes(_SOME_PROCESSES)
        yield from self._previews(_LEAST_PREVIEW + 1, _FAIR_PREVIEW)
        yield self._jobs(_MANY_JOBS)
        yield from self._previews(_FAIR_PREVIEW + 1, _GOOD_PREVIEW)
        yield self._processes(_MORE_PROCESSES)
        yield self._processes(self.of.n_processes)
        yield self._jobs(self.of.n_jobs)
        yield from self._plots(_LEAST_PLOT + 1)

    def _without_running_jobs(self) -> _Requests:
        """Yield the processes before jobs that wait or have ended."""
        yield {"processes": _LEAST_PROCESSES}
        yield {"jobs": 1 + _IDLE_JOBS}
        yield self._jobs(min(self.of.n_active, _MANY_JOBS))
        yield self._processes(_SOME_PROCESSES)
        yield from self._plots(_LEAST_PLOT)
        yield self._processes(_MORE_PROCESSES)
        yield from self._gpu_lines()
        yield self._processes(self.of.n_processes)
        yield from self._previews(_LEAST_PREVIEW, _LEAST_PREVIEW)
        yield from self._previews(_LEAST_PREVIEW + 1, _FAIR_PREVIEW)
        yield self._jobs(_MANY_JOBS)
        yield from self._plots(_LEAST_PLOT + 1)
        yield from self._previews(_FAIR_PREVIEW + 1, _GOOD_PREVIEW)
        yield self._jobs(self.of.n_jobs)

    def _jobs(self, most: int) -> Mapping[str, int]:
        return {"jobs": 1 + min(self.of.n_jobs, most)}

    def _processes(self, most: int) -> Mapping[str, int]:
        n_rows = -(-self.of.n_processes // _STEP) * _STEP
        return {"processes": 1 + min(n_rows, most)}

    def _plots(self, first: int) -> _Requests:
        """Yield the heights of four plots in a two-by-two grid, each with a heading."""
        if self.least.totals and self.width >= PLOTS_FROM:
            most = max(_LEAST_PLOT, self.height // _ROWS_PER_PLOT_ROW)
            for plot in range(first, (_LEAST_PLOT if first == _LEAST_PLOT else most) + 1):
                yield {"plot": plot, "totals": 2 * (plot + 1)}

    def _gpu_lines(self, *, always: bool = False) -> _Requests:
        """Yield two lines per GPU, in narrow windows only if `always`; tiles grow to their full height."""
        n = self.of.n_gpus
        for lines in range(2, self.of.tallest + 1):
            yield {"gpus": n * lines}
        if n and (always or self.width >= PLOTS_FROM) and not self.of.tallest:
            yield {"gpus": 2 * n, "per_gpu": 2}

    def _previews(self, first: int, last: int) -> _Requests:
        if self.of.previews and self.least.is_side_by_side:
            yield {"jobs": last}
        elif self.of.previews:
            yield from ({"preview": rows} for rows in range(first, last + 1))
