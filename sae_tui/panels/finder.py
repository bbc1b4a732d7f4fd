"""The jobs table with a filter, a sort order, and marks on jobs."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from sae_tui.jobs.view.find import find, orders
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.job_columns import SHOWN
from sae_tui.panels.jobs import MARK, JobsPanel
from sae_tui.widgets.filter import Filtered
from sae_tui.widgets.old_keys import old_key
from sae_tui.widgets.table import KeyedTable, Row
from trainer.contract.settings.series import key_metrics
from trainer.contract.store.states import RUNNING

if TYPE_CHECKING:
    from sae_tui.hosts.view import HostView
    from sae_tui.panels.far_jobs import FarRows

FIND = Binding.Group("Find")
_NEWEST = "newest"


class JobsFinder(Filtered):
    """The jobs table, below a line showing the filter, the order and the number of marks, if any."""

    BINDINGS = [
        Binding("slash", "filter", "Filter", key_display="/", id="jobs.filter", group=FIND,
                tooltip="Show jobs that match all words: name, #tag, state, architecture, user, note, id"),
        Binding("escape", "clear_filter", "All", show=False, id="jobs.all", group=FIND, tooltip="Show all jobs again"),
        Binding("o", "next_order", "Order", show=False, id="jobs.order", group=FIND,
                tooltip="Next sort order; C sorts by any column"),
        Binding("O", "reverse", "Reverse", show=False, id="jobs.reverse", group=FIND,
                tooltip="Sort in the opposite direction"),
        Binding("space", "mark", "Mark", id="jobs.mark", group=FIND,
                tooltip="Mark the job, to compare or tag several"),
        Binding("U", "unmark", "Unmark", show=False, id="jobs.unmark", group=FIND, tooltip="Remove all marks"),
        old_key("x", "unmark"),
    ]  # fmt: skip
    PLACEHOLDER = "words, #tag, state:failed"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes="-unfiltered")
        self.order, self.reverse = _NEWEST, False
        self.columns: Sequence[str] = SHOWN
        self.families = False
        self._jobs: Sequence[JobView] = ()
        self._problem = ""
        self._far: Sequence[HostView] = ()
        self._far_rows: FarRows | None = None

    def compose(self) -> ComposeResult:
        yield self.filter_line()
        yield JobsPanel(id="jobs")

    @property
    def table(self) -> JobsPanel:
        return self.query_one(JobsPanel)

    @property
    def marked(self) -> list[int]:
        """The ids of the marked jobs, including jobs hidden by the filter, oldest first."""
        return sorted(self.table.marked)

    def show_jobs(self, jobs: Sequence[JobView], problem: str = "") -> None:
        """Show the jobs; `problem` explains why they cannot be read, or is empty."""
        if jobs and not self._jobs and not self.table.was_moved:
            # Another host's jobs may have arrived first, in which case the cursor is on one of those jobs.
            first = next((job for job in jobs if job.state in RUNNING), jobs[0])
            self.table.select(str(first.id))
        self._jobs, self._problem = jobs, problem
        self.table.marked &= {job.id for job in jobs}
        self._draw()

    def show_far(self, views: Sequence[HostView]) -> None:
        """Show the jobs on other hosts below the jobs on this host."""
        if self._far_rows is None:
            from sae_tui.panels.far_jobs import FarRows

            self._far_rows = FarRows()
        if views != self._far:
            self._far = views
            self._draw()

    def forget_far(self) -> None:
        """Stop showing other hosts."""
        self._far, self._far_rows = (), None
        self._draw()

    def action_next_order(self) -> None:
        """Sort by the next of the usual orders; `C` and the headings offer the others."""
        names = [name for name in orders() if name in _cycled() or name == self.order]
        self.sort_by(names[(names.index(self.order) + 1) % len(names)])

    def action_reverse(self) -> None:
        self.sort_by(self.order, reverse=not self.reverse)

    def sort_by(self, order: str, *, reverse: bool = False) -> None:
        self.order, self.reverse = order, reverse
        self._draw()
        self.table.action_move(0)

    @on(KeyedTable.HeadingChosen)
    def _sort_by_heading(self, event: KeyedTable.HeadingChosen) -> None:
        self.sort_by(event.order, reverse=event.order == self.order and not self.reverse)

    @property
    def _is_usual(self) -> bool:
        return self.order == _NEWEST and not self.reverse

    def action_mark(self) -> None:
        """Mark or unmark the job or array under the cursor and move to the next row."""
        array, job_id = self.table.selected_array, self.table.selected
        ids = {job.id for job in array.jobs} if array else set[int]() if job_id is None else {job_id}
        if ids:
            marked = self.table.marked
            self.table.marked = marked - ids if ids <= marked else marked | ids
            self.table.action_move(1)
            self._draw()

    def action_unmark(self) -> None:
        self.table.marked = frozenset()
        self._draw()

    def _of_hosts(self, n_matching: int, words: str) -> tuple[Sequence[Row], Sequence[Row]]:
        """Return this host's heading and the rows for other hosts; both are empty if no other hosts are shown."""
        if self._far_rows is None:
            return (), ()
        from sae_tui.panels.far_jobs import heading, local_note

        note = f"{n_matching} of {len(self._jobs)}" if words else local_note(len(self._jobs))
        columns, sort = self.table.chosen, (self.order, self.reverse)
        return [heading(socket.gethostname(), columns, note)], self._far_rows.rows(self._far, words, sort, columns)

    def on_descendant_blur(self) -> None:
        self._draw()

    @on(Input.Changed)
    @on(JobsPanel.Folded)
    def _draw(self) -> None:
        text = self.words
        matches = find(self._jobs, text, self.order, reverse=self.reverse)
        falls = orders()[self.order].descends != self.reverse
        self.table.choose(self.columns, "" if self._is_usual else self.order, falls=falls)
        hidden = len(self._jobs) - len(matches)
        nothing = "No job matches; escape shows all." if hidden else ""
        self.table.show_jobs(
            matches,
            self._problem or nothing,
            *self._of_hosts(len(matches), text),
            folds=not self.filtering,
            families=self.families,
        )
        marked = len(self.table.marked)
        notes = [
            f"{len(matches)} of {len(self._jobs)}" if text else "",
            "" if self._is_usual else f"by {self.order}{', reversed' * self.reverse}",
            f"{marked} marked · c compare · # tag · D delete · U unmark" if marked else "",
        ]
        if self.filtering and marked:
            notes[-1] = f"{marked} {MARK}"
        self.say(" · ".join(filter(None, notes)))


def _cycled() -> Collection[str]:
    """Return the sort orders that the key for the next order cycles through."""
    return {_NEWEST, "name", "state", "loss", "queue", *key_metrics()}
