"""Computes how many rows each panel of the dashboard gets, so that the panels fill the window."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sae_tui.panels import gpu_cards
from sae_tui.panels.gpu_map import TALLEST
from sae_tui.widgets.frame import FRAMES, Frame, frame_of

# The minimum widths to show the totals as four plots, and to show the preview next to the jobs.
PLOTS_FROM, BESIDE_FROM = 100, 160
_TOTALS = 4  # lines: memory, utilisation, power, heat
_FEWEST_GPUS, _FEWEST_JOBS = 3, 2
_LEAST_JOBS = 5  # including the heading
_LEAST_PLOT, _GOOD_PLOT, _TALLEST_PLOT = 2, 4, 12
_LEAST_PREVIEW, _GOOD_PREVIEW = 5, 14
_MANY_JOBS = 8


@dataclass(frozen=True, slots=True)
class PanelHeights:
    """The number of rows inside each panel's frame, or 0 if the panel is hidden.

    `plot` is the height of each of the four totals plots, or 0 if each total is a single line. `per_gpu` is the number
    of lines per GPU; if not all GPUs fit into `gpus`, they scroll. With `beside`, the preview is next to the jobs.
    """

    frame: Frame
    totals: int
    gpus: int
    jobs: int
    preview: int = 0
    plot: int = 0
    per_gpu: int = 1
    beside: bool = False

    @property
    def chrome(self) -> int:
        """The number of rows taken by a panel's frame."""
        return FRAMES[self.frame]

    @property
    def height(self) -> int:
        """The number of rows taken by all panels, including their frames."""
        stacked = [self.totals, self.gpus, self.jobs, 0 if self.beside else self.preview]
        return sum(rows + self.chrome for rows in stacked if rows)


def arrange(
    width: int,
    height: int,
    *,
    n_gpus: int,
    n_jobs: int,
    is_card_view: bool = False,
    tiles: bool = False,
    previews: bool = False,
    taken: int = 0,
    words: int = 1,
) -> PanelHeights:
    """Return the rows for each panel in a window of `width` x `height` cells; header and footer take one row each.

    `is_card_view` selects the card view; with it or with `tiles`, `n_gpus` is the number of rows of cards or tiles.
    `previews` means that a job can be previewed. If there are no jobs, their panel explains what to do. `taken` is the
    number of rows taken by the panel for other hosts, and `words` is the number taken by the explanation if there are
    no GPUs.
    """
    space = max(2, height - 2 - taken)
    empty = PanelHeights(frame_of(width, height), 0, 0, 0, beside=width >= BESIDE_FROM)
    wanted = n_gpus * (2 if is_card_view else 1) or words
    rows = _least(empty, space, n_gpus, wanted, is_card_view=is_card_view)
    tallest = gpu_cards.TALLEST if is_card_view else TALLEST if tiles else 0
    return _grown(rows, space, width, n_gpus, n_jobs, tallest=tallest, previews=previews)


def _least(rows: PanelHeights, space: int, n_gpus: int, wanted: int, *, is_card_view: bool) -> PanelHeights:
    """Give each panel its minimum height. If the minimums do not fit, drop the totals first, then shrink the jobs."""
    left = space - 2 * rows.chrome
    has_totals = n_gpus > 0 and not (is_card_view and rows.frame != "framed")
    with_totals = left - _TOTALS - rows.chrome
    is_room = with_totals >= min(wanted, _FEWEST_GPUS) + _FEWEST_JOBS
    totals, left = (_TOTALS, with_totals) if has_totals and is_room else (0, left)
    gpus = min(wanted, max(min(wanted, _FEWEST_GPUS), left - _LEAST_JOBS), max(1, left - _FEWEST_JOBS))
    return replace(rows, totals=totals, gpus=gpus, jobs=min(_LEAST_JOBS, left - gpus))


def _grown(
    rows: PanelHeights, space: int, width: int, n_gpus: int, n_jobs: int, *, tallest: int, previews: bool
) -> PanelHeights:
    """Distribute the remaining rows in order of usefulness; each GPU gets up to `tallest` rows if that is not 0."""
    several = bool(rows.totals) and width >= PLOTS_FROM
    preferences = [{"jobs": 1 + min(n_jobs, _MANY_JOBS)}]
    preferences += [_plots(_LEAST_PLOT)] if several else []
    preferences += [{"preview": _LEAST_PREVIEW}] if previews and not rows.beside else []
    preferences += [{"gpus": n_gpus * lines} for lines in range(2, tallest + 1)]
    preferences += [{"gpus": 2 * n_gpus, "per_gpu": 2}] if n_gpus and width >= PLOTS_FROM and not tallest else []
    preferences += [_plots(plot) for plot in range(_LEAST_PLOT + 1, _GOOD_PLOT + 1)] if several else []
    if previews and not rows.beside:
        preferences += [{"preview": preview} for preview in range(_LEAST_PREVIEW + 1, _GOOD_PREVIEW + 1)]
    preferences += [{"jobs": _GOOD_PREVIEW}] if previews and rows.beside else []
    preferences += [{"jobs": 1 + n_jobs}]
    preferences += [_plots(plot) for plot in range(_GOOD_PLOT + 1, _TALLEST_PLOT + 1)] if several else []
    for preference in preferences:
        larger = replace(rows, **{name: max(value, getattr(rows, name)) for name, value in preference.items()})
        rows = larger if larger.height <= space else rows
    spare = max(0, space - rows.height)
    rest = "preview" if rows.preview and not rows.beside else "jobs"
    rows = replace(rows, **{rest: getattr(rows, rest) + spare})
    return replace(rows, preview=rows.jobs) if rows.beside and previews else rows


def _plots(rows: int) -> dict[str, int]:
    """Return the fields for four plots of `rows` rows in a two-by-two grid, each with a heading."""
    return {"plot": rows, "totals": 2 * (rows + 1)}
