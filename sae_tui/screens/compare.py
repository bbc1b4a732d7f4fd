"""Compares several runs side by side: curves, settings, results, and FVU against L0, updated live."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.message import Message

from sae_tui.compare.export import refuse_existing, write_picture, write_table
from sae_tui.compare.lines import AXES, SMOOTHING, CurveView
from sae_tui.compare.run import settings_of
from sae_tui.compare.runs import Comparison, CopiedRun, Runs
from sae_tui.format import fit
from sae_tui.panels.differences import DifferencesPanel, ResultsPanel
from sae_tui.panels.overlay import Overlay
from sae_tui.panels.pareto import ParetoPanel
from sae_tui.session import Session
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, entitle
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.old_keys import old_key
from trainer.contract.errors import UserError
from trainer.contract.paths import working_folder
from trainer.contract.store.rows import Job

MOST_RUNS = 8
VIEWS = {"curves": "Curves", "settings": "Settings", "results": "Results", "pareto": "FVU against L0"}
# The actions that change only the curves.
_OF_CURVES = frozenset({"next_metric", "next_axis", "next_smoothing", "toggle_log"})
_ALL_FROM = 100, 35  # minimum width and height to show all views at once


class Compared(Message):
    """The runs were reloaded; if that failed, `problem` explains why."""

    def __init__(self, comparison: Comparison | None, problem: str = "") -> None:
        super().__init__()
        self.comparison = comparison
        self.problem = problem


class CompareScreen(FramedScreen):
    """Shows one view at a time on a small terminal; on a large one, shows all views until a view is chosen twice."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="compare.back", tooltip="To the previous screen"),
        *[
            Binding(str(key), f"view('{name}')", title, show=False, id=f"compare.{name}",
                    tooltip="This view; press again to switch between this view and all views")
            for key, (name, title) in enumerate(VIEWS.items(), 1)
        ],
        Binding("m", "next_metric(1)", "Metric", id="compare.metric", tooltip="Curves of the next metric"),
        Binding("M", "next_metric(-1)", "Previous metric", show=False, id="compare.metric_before",
                tooltip="Curves of the previous metric"),
        Binding("a", "next_axis", "Axis", id="compare.axis", tooltip="Curves over steps, tokens or time"),
        Binding("w", "next_smoothing", "Smooth", id="compare.smooth", tooltip="Smooth the curves: off, 0.6, 0.9, 0.97"),
        Binding("S", "toggle_log", "Scale", id="compare.log", tooltip="Logarithmic or linear scale"),
        Binding("x", "export", "Export", id="compare.export", tooltip="Write the curves as SVG and all values as CSV"),
        old_key("l", "toggle_log"),
        old_key("E", "export"),
    ]  # fmt: skip
    # Otherwise a table that is not shown could have the focus, and its keys would be in the footer.
    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    CompareScreen #tabs { height: 1; background: $panel; }
    CompareScreen #views { height: 1fr; }
    CompareScreen #views > * { height: 1fr; width: 1fr; display: none; }
    CompareScreen.-all #views { layout: grid; grid-size: 2 2; }
    CompareScreen.-all #views { grid-columns: 5fr 4fr; grid-rows: 3fr 2fr; }
    CompareScreen.-all #views > *, CompareScreen #views > .-chosen { display: block; }
    """

    def __init__(
        self,
        session: Session,
        job_ids: Sequence[int],
        *,
        only_curves: bool = False,
        copied: CopiedRun | None = None,
    ) -> None:
        """Prepare to compare the session's jobs and, if given, a copied job from another host."""
        super().__init__(name="compare")
        self.session, self.job_ids, self._copied = session, tuple(job_ids), copied
        # With a single SAE there are no differences to show.
        self._only_curves = only_curves
        self.comparison, self.view = Comparison(), CurveView()
        self.chosen, self.alone = next(iter(VIEWS)), False
        self._runs: Runs | None = None
        self._reading = self._outdated = False
        self._problem = ""

    def compose(self) -> ComposeResult:
        yield LineView(id="tabs")
        with Container(id="views"):
            yield Overlay(id="curves", classes="panel")
            yield ParetoPanel(id="pareto", classes="panel")
            yield DifferencesPanel(empty="All settings are the same.", id="settings").add_class("panel")
            yield ResultsPanel(self.session.settings, empty="No results yet.", id="results").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self._arrange()
        self._read()

    def on_unmount(self) -> None:
        if self._runs:
            # An export may still be reading, so closing the files here could block.
            threading.Thread(target=self._runs.close, daemon=True).start()

    def on_resize(self) -> None:
        self._arrange()

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Reload the runs after a job has changed."""
        if self.is_mounted:
            self._read()

    def _read(self) -> None:
        """Load the runs; if a load is in progress, reload them when it ends."""
        self._outdated = self._reading
        if not self._reading:
            self._reading = True
            self._read_runs(self.view.metric)

    @work(thread=True, group="compare", exit_on_error=False)
    def _read_runs(self, metric: str) -> None:
        try:
            self._runs = self._runs or Runs(self.session.data, self.job_ids, self._copied)
            self.post_message(Compared(self._runs.read(metric)))
        except UserError as error:
            self.post_message(Compared(None, str(error)))
        except Exception as error:
            # Always post a reply, because otherwise the runs would never be reloaded.
            self.post_message(Compared(None, f"the runs cannot be read: {error!r}"))

    @on(Compared)
    def _compared(self, event: Compared) -> None:
        self._reading = False
        self._problem = event.problem
        if event.comparison:
            self.comparison = event.comparison
        self._draw()
        if self._outdated:
            self._read()

    def _draw(self) -> None:
        self.query_one(Overlay).show_comparison(
            self.comparison, msgspec.structs.replace(self.view, metric=self.comparison.metric)
        )
        self.query_one(ParetoPanel).show_comparison(self.comparison)
        self.query_one(DifferencesPanel).show_comparison(self.comparison)
        self.query_one(ResultsPanel).show_comparison(self.comparison)
        self._draw_tabs()

    def _draw_tabs(self) -> None:
        width = self.size.width
        ids = f"job{'s' * (len(self.job_ids) > 1)} {', '.join(map(str, self.job_ids))}"
        if self._only_curves:
            words = (self._problem, "warn") if self._problem else (f" {ids}", "dim")
            self.query_one("#tabs", LineView).show([((fit(words[0], width), words[1]),)])
            return
        tabs = [(f" {key} {title} ", "title swapped" if name == self.chosen else "label")
                for key, (name, title) in enumerate(VIEWS.items(), 1)]  # fmt: skip
        space = width - sum(len(text) for text, _ in tabs)
        corner = (self._problem, "warn") if self._problem else (f"{ids} ", "dim")
        self.query_one("#tabs", LineView).show([(*tabs, (fit(corner[0], max(0, space), right=True), corner[1]))])

    def _arrange(self) -> None:
        """Show the chosen view, or all views if they fit."""
        width, height = self.size
        self.set_class(
            width >= _ALL_FROM[0] and height >= _ALL_FROM[1] and not (self.alone or self._only_curves), "-all"
        )
        for name in VIEWS:
            self.query_one(f"#{name}").set_class(name == self.chosen, "-chosen")
        entitle(self.query_one(DifferencesPanel), "Settings that differ")
        entitle(self.query_one(ResultsPanel), "Results")
        self._draw_tabs()
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys for views only if there are several, and the keys for curves only if curves are shown."""
        if action in _OF_CURVES:
            return self.has_class("-all") or self.chosen == "curves"
        return action != "view" or not self._only_curves

    def action_view(self, name: str) -> None:
        self.alone = name == self.chosen and not self.alone
        self.chosen = name
        self._arrange()
        # A view can take the focus only once it is displayed.
        self.call_after_refresh(self._focus_chosen)

    def _focus_chosen(self) -> None:
        view = self.query_one(f"#{self.chosen}")
        self.set_focus(view if view.focusable else None)

    def action_next_metric(self, by: int) -> None:
        metrics = self.comparison.metrics
        if metrics:
            place = metrics.index(self.comparison.metric) + by
            self.view = msgspec.structs.replace(self.view, metric=metrics[place % len(metrics)])
            self._read()

    def action_next_axis(self) -> None:
        self._change(axis=_next(tuple(AXES), self.view.axis))

    def action_next_smoothing(self) -> None:
        self._change(smoothing=_next(SMOOTHING, self.view.smoothing))

    def action_toggle_log(self) -> None:
        self._change(log=not self.view.log)

    def _change(self, **fields: object) -> None:
        self.view = msgspec.structs.replace(self.view, **fields)
        self._draw()

    def action_export(self) -> None:
        if self.session.actions.refused():
            return
        name = "-".join(["compare", *map(str, self.job_ids), self.comparison.metric])
        question = f"Write the curves (.svg) and all values (.csv) under this name into {working_folder()}"

        def take(name: str | None) -> None:
            if name:
                self.session.actions.do(lambda: self._export(name))

        self.app.push_screen(Ask(question, "file name", name), take)

    def _export(self, name: str) -> str:
        base = working_folder() / os.path.expanduser(name)
        picture, table = Path(f"{base}.svg"), Path(f"{base}.csv")
        assert self._runs is not None
        refuse_existing([picture, table])
        write_picture(picture, self.comparison, msgspec.structs.replace(self.view, metric=self.comparison.metric))
        write_table(table, self._runs)
        return f"Wrote {picture} and {table.name}"


def is_sweep(job: Job) -> bool:
    """Return True if the job has several SAEs to compare."""
    return len(settings_of(job.config)) > 1


def _next(values: Sequence[object], now: object) -> object:
    return values[(values.index(now) + 1) % len(values)]
