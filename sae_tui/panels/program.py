"""The panels for a command: its metrics, which may have any names, and its use of CPU, memory and GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from sae_tui.format import duration, fit, gibibytes, percent, tall_sparkline
from sae_tui.gpu.period import Period
from sae_tui.gpu.window import Window
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.program_use import ProgramUse
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.panels.metric_grid import MetricGrid, metrics_of
from sae_tui.widgets.lines import Line, Span
from trainer.contract.settings.series import own_series
from trainer.contract.wording import plural

_NAME, _UTILISATION, _MEMORY = 7, 5, 9  # widths in cells
_TALLEST = 4


class ProgramCurves(MetricGrid, can_focus=False):
    """The curves of a command that has metrics, as many as fit; hidden for every other job."""

    DEFAULT_CSS = "ProgramCurves { height: 3fr; min-height: 6; display: none; }"

    _shown: JobDetail | None = None

    def on_resize(self) -> None:
        # How many curves fit is known only once the panel has a size.
        if self._shown:
            self.show_detail(self._shown)

    def show_detail(self, detail: JobDetail) -> None:
        self._shown = detail
        self.display = kind_of(detail.view.config).is_program and bool(detail.series)
        columns, rows = self.shape
        own = own_series(name for name, rank in detail.series if rank == 0)
        shown = [one for one in metrics_of(detail, "") if one.name in own and one.rank == 0]
        shown.sort(key=lambda one: own.index(one.name))
        self.show_metrics(shown[: columns * rows], None, None, None)


class ProgramPanel(DetailPanel):
    """What a command's processes use now, and how its GPUs were used while it ran; hidden for every other job."""

    DEFAULT_CSS = "ProgramPanel { height: 1fr; width: 1fr; display: none; }"

    def show_detail(self, detail: JobDetail) -> None:
        self.display = kind_of(detail.view.config).is_program
        super().show_detail(detail)

    def title(self, detail: JobDetail) -> Line:
        windows = detail.use.gpus if detail.use else ()
        span = f" · {duration(windows[0][1].step_s * len(windows[0][1].jobs))}" if windows else ""
        return ((f"Use{span}", "title"),)

    def lines(self, detail: JobDetail) -> list[Line]:
        use, (width, height) = detail.use, self.size
        if use is None:
            return [((fit(" reading its processes…", width), "dim"),)]
        return [_now(use, width, has_ended=detail.view.state.is_final), *gpu_lines(use.gpus, width, height - 1)]


def _now(use: ProgramUse, width: int, *, has_ended: bool) -> Line:
    if not use.n_processes:
        return ((fit(" its processes have ended" if has_ended else " no process here", width), "dim"),)
    text = f" CPU {percent(use.cpu_percent)}  RAM {gibibytes(use.memory_bytes)}  {plural(use.n_processes, 'process')}"
    return ((fit(text, width), "text"),)


def gpu_lines(gpus: Sequence[tuple[int, Window]], width: int, height: int) -> list[Line]:
    """Return each GPU's utilisation and memory over time with the latest values, in up to `height` lines."""
    shown = gpus[: max(1, height)] if len(gpus) <= height else gpus[: max(1, height - 1)]
    tall = max(1, min(_TALLEST, height // max(1, len(shown))))
    lines = [line for index, window in shown for line in _gpu(index, window, width, tall)]
    more = len(gpus) - len(shown)
    return [*lines, *([((fit(f" and {plural(more, 'more GPU')}", width), "dim"),)] if more else [])]


def _gpu(index: int, window: Window, width: int, tall: int) -> list[Line]:
    utilisation, memory = window.columns["utilization"], window.columns["memory_used_bytes"]
    space = max(0, width - _NAME - _UTILISATION - _MEMORY - 1)
    top = max((value for value in memory if value is not None), default=None)
    left = tall_sparkline(Period(utilisation), space - space // 2, tall, 100)
    right = tall_sparkline(Period(memory), space // 2, tall, top)
    words = [f" GPU {index}", f"{percent(_latest(utilisation))} ", f"{gibibytes(_latest(memory))} "]
    lines = []
    for row, (one, other) in enumerate(zip(left, right, strict=True)):
        name, used, held = words if row == tall - 1 else ("", "", "")
        spans: tuple[Span, ...] = (
            (fit(name, _NAME), "label"),
            (one, "spark"),
            (fit(used, _UTILISATION, right=True), "text"),
            (other, "memory"),
            (fit(held, _MEMORY, right=True), "text"),
        )
        lines.append((*spans, (" " * max(0, width - sum(cell_len(text) for text, _ in spans)), "text")))
    return lines


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
