"""The jobs with what finds them: a filter, an order, and marks on some of them."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Label

from sae_tui.format import fit
from sae_tui.jobs.view.find import find, orders
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.jobs import MARK, JobsPanel
from sae_tui.widgets.lines import LineView

_FIND = Binding.Group("Find")


class Filter(Input):
    """Enter keeps the text and goes back to the table, Escape takes it away."""

    BINDINGS = [
        Binding("escape", "leave(False)", "Clear", id="filter.clear", tooltip="All jobs again"),
        Binding("enter,down", "leave(True)", "Keep", key_display="⏎", id="filter.keep",
                tooltip="Back to the table, the filter kept"),
    ]  # fmt: skip

    def action_leave(self, keep: bool) -> None:
        self.value = self.value if keep else ""
        self.screen.query_one(JobsPanel).focus()


class Found(LineView):
    """The number of jobs found, the order and the marks, at the right."""

    text = ""

    def say(self, text: str) -> None:
        self.text = text
        self.show([((fit(f"{text} ", self.width, right=True), "label"),)])

    def on_resize(self) -> None:
        self.say(self.text)


class JobsFinder(Vertical):
    """A line with filter, order and marks above the table, while there is any of these."""

    BINDINGS = [
        Binding("slash", "filter", "Filter", key_display="/", id="jobs.filter", group=_FIND,
                tooltip="Show the jobs that all words match: name, #tag, state, architecture, user, note, id"),
        Binding("escape", "clear_filter", "All", show=False, id="jobs.all", group=_FIND, tooltip="Show all jobs again"),
        Binding("o", "next_order", "Order", show=False, id="jobs.order", group=_FIND,
                tooltip="Sort by the next of: " + ", ".join(orders())),
        Binding("space", "mark", "Mark", id="jobs.mark", group=_FIND,
                tooltip="Mark the job, to compare or tag several"),
        Binding("x", "unmark", "Unmark", show=False, id="jobs.unmark", group=_FIND, tooltip="Take all marks away"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    JobsFinder { height: 1fr; min-height: 1; }
    JobsFinder > Horizontal { height: 1; display: none; background: $panel; }
    JobsFinder.-in-use > Horizontal { display: block; }
    JobsFinder.-unfiltered Label, JobsFinder.-unfiltered Input { display: none; }
    JobsFinder Label { color: $text-accent; }
    JobsFinder Input { width: 1fr; background: $panel; }
    JobsFinder Found { width: 1fr; height: 1; background: $panel; }
    """

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.order = next(iter(orders()))
        self._jobs: Sequence[JobView] = ()
        self._problem = ""

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(" /")
            yield Filter(placeholder="words, #tag, state:failed", compact=True, id="filter")
            yield Found(id="found")
        yield JobsPanel(id="jobs")

    @property
    def table(self) -> JobsPanel:
        return self.query_one(JobsPanel)

    @property
    def marked(self) -> list[int]:
        """The marked jobs, also those that the filter hides, oldest first."""
        return sorted(self.table.marked)

    def show_jobs(self, jobs: Sequence[JobView], problem: str = "") -> None:
        """Show the jobs; `problem` says why no jobs can be read, where that is so."""
        self._jobs, self._problem = jobs, problem
        self.table.marked &= {job.id for job in jobs}
        self._draw()

    def action_filter(self) -> None:
        self.add_class("-in-use").remove_class("-unfiltered")
        self.query_one(Filter).focus()

    def action_clear_filter(self) -> None:
        self.query_one(Filter).value = ""

    def action_next_order(self) -> None:
        names = list(orders())
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._draw()
        self.table.action_move(0)

    def action_mark(self) -> None:
        """Mark or unmark the job under the cursor and go to the next one."""
        if self.table.selected is not None:
            self.table.marked ^= {self.table.selected}
            self.table.action_move(1)
            self._draw()

    def action_unmark(self) -> None:
        self.table.marked = frozenset()
        self._draw()

    def on_descendant_blur(self) -> None:
        self._draw()

    @on(Input.Changed)
    def _draw(self) -> None:
        text = self.query_one(Filter).value
        matches = find(self._jobs, text, self.order)
        hidden = len(self._jobs) - len(matches)
        nothing = "No job matches; escape shows all." if hidden else ""
        self.table.show_jobs(matches, self._problem or nothing)
        marked = len(self.table.marked)
        notes = [
            f"{len(matches)} of {len(self._jobs)}" if text else "",
            f"by {self.order}" if self.order != next(iter(orders())) else "",
            f"{marked} marked · c compare · # tag · D delete · x clear" if marked else "",
        ]
        filtering = bool(text) or self.query_one(Filter).has_focus
        if filtering and marked:
            notes[-1] = f"{marked} {MARK}"
        self.set_class(filtering or any(notes), "-in-use")
        # Hide the input while nothing is filtered, since an empty one would look like a filter.
        self.set_class(not filtering, "-unfiltered")
        self.query_one(Found).say(" · ".join(filter(None, notes)))
