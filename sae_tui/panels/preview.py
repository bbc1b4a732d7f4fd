"""The preview of the job under the cursor: its curve, its settings, and the end of its log."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal

from sae_tui.format import fit, measure, wrap
from sae_tui.jobs.launch.summary import settled, summary
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.reader import JobView, overfitting_words
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.curves import CurvePlot, members_of
from sae_tui.panels.detail import DetailPanel
from sae_tui.panels.metric_grid import MetricPlot, MetricSeries, metrics_of
from sae_tui.widgets.frame import entitle
from sae_tui.widgets.lines import Line, Span
from trainer.contract.settings.series import CRITERION, SPEED, curves, series_named

_ENTRY = 30  # width of a setting with its value, in cells
_NAME = 14
_LEAST_SETTINGS = 1  # number of settings lines kept even if a warning is long
FVU = series_named(CRITERION)


class PreviewPanel(Horizontal):
    """A job preview: the curve on the left, if there is one, settings and log on the right."""

    def compose(self) -> ComposeResult:
        yield CurvePlot(CRITERION, curves()[CRITERION])
        yield CurvePlot(SPEED, curves()[SPEED])
        metric = MetricPlot().remove_class("panel")
        metric.display = False
        yield metric
        yield PreviewText(id="preview-text")

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the current state of the job or, in a sweep, of its best SAE."""
        entitle(self, f"Job {detail.view.id} · {detail.view.name}")
        kind = kind_of(detail.view.config)
        self._show_metric(metrics_of(detail, "")[:1] if kind.is_program else [])
        for plot in self.query(CurvePlot):
            plot.display = not kind.is_program and (plot.series_name == SPEED) != kind.trains
            if plot.display:
                plot.show_detail(detail)
        self.query_one(PreviewText).show_detail(detail)

    def _show_metric(self, metrics: Sequence[MetricSeries]) -> None:
        """Draw the first metric of a command, if it has any."""
        plot = self.query_one(MetricPlot)
        plot.display = bool(metrics)
        for metric in metrics:
            plot.show_metric(metric, None, None)


class PreviewText(DetailPanel):
    """The settings in as many columns as fit, followed by the last log lines."""

    DEFAULT_CSS = "PreviewText { height: 1fr; width: 1fr; padding: 0 1; }"

    def lines(self, detail: JobDetail) -> list[Line]:
        width, height = self.size.width, self.size.height
        job = detail.view
        why = wrap(job.error, width)[: height - 1] if job.error else []
        overfits = _overfitting(job, width, height - len(why) - _LEAST_SETTINGS)
        log = [line for line in detail.log if line.strip()]
        space = height - len(why) - len(overfits)
        settings = _settings(detail, width)[: max(1, space - min(3, len(log)) - 1)]
        end = log[-(space - len(settings) - 1) :] if space > len(settings) + 1 else []
        gap = space - len(settings) - len(end)
        return [
            *(((fit(text, width), "bad"),) for text in why),
            *(((fit(text, width), "warn"),) for text in overfits),
            *settings,
            *[((" " * width, "text"),)] * gap,
            *(((fit(line, width), "dim"),) for line in end),
        ]


def _overfitting(job: JobView, width: int, height: int) -> list[str]:
    """Return the overfitting warning in the most detailed wording that fits into `height` lines."""
    if not job.overfitting:
        return []
    both = f"overfits: FVU {measure(job.fvu, FVU)} in training, {measure(job.heldout_fvu, FVU)} held out"
    wordings = (wrap(words, width) for words in (overfitting_words(job), both, "overfits"))
    return next((lines for lines in wordings if len(lines) <= height), [])


def _settings(detail: JobDetail, width: int) -> list[Line]:
    """Return the changed settings in columns; for a sweep, the first entry names the SAE."""
    entries = [("SAE", detail.member)] if detail.member in members_of(detail) else []
    entries += summary(detail.view.config, settled(detail.plan, detail.view.total_steps))[0]
    whole: list[Line] = []
    if kind_of(detail.view.config).is_program:
        # A command line rarely fits into a column.
        whole, entries = [((fit(entries[0][1], width), "title"),)], entries[1:]
    columns = max(1, width // _ENTRY)
    each = width // columns
    lines = whole
    for start in range(0, len(entries), columns):
        spans: list[Span] = []
        for name, value in entries[start : start + columns]:
            spans += [(fit(name, _NAME) + " ", "label"), (fit(value, each - _NAME - 2) + " ", "text")]
        lines.append(tuple(spans))
    return lines
