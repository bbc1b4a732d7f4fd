"""A table of processes with keys for filtering, sorting, marking, the tree, process details, and signals."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from sae_tui.gpu.base import GpuSample, ProcessShares
from sae_tui.gpu.process_history import ProcessHistory
from sae_tui.gpu.processes import ENDING_SIGNALS, SIGNALS, ProcessDetails, ProcessReader, send_signal, send_signals
from sae_tui.jobs.asking import asked_of
from sae_tui.jobs.view.processes import ORDERS, ProcessRow, arrange
from sae_tui.panels.processes import PROCESSES, ProcessTable, process_name
from sae_tui.session import Session
from sae_tui.widgets.filter import Filtered
from sae_tui.widgets.find import Find
from sae_tui.widgets.old_keys import old_key
from sae_tui.widgets.table import KeyedTable
from trainer.contract.wording import join_words

_READ_EVERY_S = 3.0  # the interval at which the monitor lists the GPUs' processes
# A new process is read again after this time, since its CPU usage is unknown until then. While a process's page is
# open, the processes are read with every sample.
_READ_AGAIN_S = 0.4
# The interval and the number of reads after the list opens, to show the first shares and CPU usage.
_LOOK_S = 0.2
_MOST_LOOKS = 6
_SILENT_AFTER_S = 10.0
_JOB = "job"  # the choice for stopping the rank's job, listed above the signals


class ProcessList(Filtered):
    """Lists the processes on some GPUs, with a filter, a sort order and a tree view."""

    BINDINGS = [
        Binding("s", "signal", "Signal", id="processes.signal", group=PROCESSES,
                tooltip="Interrupt, terminate or halt the marked processes, or this one; asks first"),
        Binding("m", "mark", "Mark", id="processes.mark", group=PROCESSES,
                tooltip="Mark the process under the cursor, to send a signal to several"),
        Binding("U", "unmark", "Unmark", show=False, id="processes.unmark", group=PROCESSES,
                tooltip="Remove all marks"),
        old_key("x", "unmark"),
        Binding("A", "adopt", "Adopt", show=False, id="processes.adopt", group=PROCESSES,
                tooltip="Turn the process under the cursor into a job, if it is yours"),
        Binding("slash", "filter", "Filter", key_display="/", id="processes.filter", group=PROCESSES,
                tooltip="Show processes that match all words: command, user:ada, gpu:1, job:12, type:g, pid"),
        Binding("o", "next_order", "Order", id="processes.order", group=PROCESSES,
                tooltip="Sort by the next column, as a click on its heading does: " + ", ".join(ORDERS)),
        Binding("O", "reverse", "Reverse", show=False, id="processes.reverse", group=PROCESSES,
                tooltip="Sort in the opposite direction"),
        Binding("t", "toggle_tree", "Tree", id="processes.tree", group=PROCESSES,
                tooltip="Show each process below its parent, or processes folded under their job"),
        Binding("space", "fold", "Fold", show=False, id="processes.fold", group=PROCESSES,
                tooltip="Show or hide the processes of the job under the cursor; mark a process without a job"),
    ]  # fmt: skip
    PLACEHOLDER = "words, user:ada, gpu:1, type:g"

    class Read(Message):
        """The processes on some GPUs were reread."""

        def __init__(self, gpus: Sequence[int], processes: Sequence[ProcessDetails]) -> None:
            super().__init__()
            self.gpus, self.processes = gpus, processes

    def __init__(self, session: Session, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.session = session
        self.order = next(iter(ORDERS))
        self.is_reversed = self.as_tree = False
        self._opened: frozenset[str] = frozenset()
        self._processes: Sequence[ProcessDetails] | None = None
        self._marked: Mapping[Hashable, ProcessDetails] = {}
        self._history = ProcessHistory()
        self._samples: Sequence[GpuSample] = ()
        self._nothing = ""
        self._reader = ProcessReader()
        self._one_reading = threading.Lock()
        self._read_at = 0.0
        self._is_due = True
        self._has_shares = self._has_new = False
        self._gpus: list[int] = []
        self._pids: list[int] = []
        self._page: Screen[None] | None = None  # the open page of a process

    def compose(self) -> ComposeResult:
        yield self.filter_line()
        yield ProcessTable(id="processes")

    def on_unmount(self) -> None:
        # The list on the screen below requests the shares before this one is removed, so do not cancel its request.
        if not any(one is not self for screen in self.app.screen_stack[-1:] for one in screen.query(ProcessList)):
            self.session.monitor.want_shares(False)

    @property
    def table(self) -> ProcessTable:
        return self.query_one(ProcessTable)

    def show_samples(self, samples: Sequence[GpuSample], nothing: str) -> None:
        """Show the processes on these GPUs; `nothing` is the text for an empty list."""
        self._nothing, self._samples = nothing, tuple(samples)
        if [sample.index for sample in samples] != self._gpus:
            self._processes = None
            self.set_interval(_LOOK_S, self._look, repeat=_MOST_LOOKS)
        self._look()

    def _look(self) -> None:
        """Read the processes if this is due, and draw them; do nothing while another screen hides the list."""
        if not (self.display and (self.screen.is_active or self.is_covered)):
            return
        gpus = [sample.index for sample in self._samples]
        pids = [process.pid for sample in self._samples for process in sample.processes or ()]
        # Request the shares again, because the previous list cancels its request when it closes.
        self.session.monitor.want_shares(True, every_sample=self.is_covered)
        shares = {index: self.session.monitor.shares(index) for index in gpus}
        # Read immediately if a new process appears or the first shares arrive.
        is_new = (gpus, pids) != (self._gpus, self._pids) or (any(shares.values()) and not self._has_shares)
        self._gpus, self._pids, self._has_shares = gpus, pids, any(shares.values())
        every_s = _READ_AGAIN_S if self._has_new or self.is_covered else _READ_EVERY_S
        self._is_due |= is_new or time.monotonic() - self._read_at >= every_s
        # Reading a hung process can hang too, so never start a second read in the meantime.
        reads = self._is_due and not self._one_reading.locked()
        if reads:
            self._read_at, self._is_due = time.monotonic(), False
            self._read(self._samples, shares)
        # The list is drawn again after the read.
        if not reads or self._processes is None:
            self._draw()

    @work(thread=True, group="processes", exclusive=True, exit_on_error=False)
    def _read(self, samples: Sequence[GpuSample], shares: Mapping[int, Mapping[int, ProcessShares]]) -> None:
        # Two concurrent reads would overwrite each other's state.
        if not self._one_reading.acquire(blocking=False):
            return
        try:
            processes = self._reader.read(samples, shares)
        finally:
            self._one_reading.release()
        self.post_message(self.Read([sample.index for sample in samples], processes))

    @on(Read)
    def _take(self, event: Read) -> None:
        # Ignore processes on GPUs that are no longer shown.
        if event.gpus == self._gpus:
            known = {one.key for one in self._processes or ()}
            self._has_new = any(one.identity and one.key not in known for one in event.processes)
            self._processes = event.processes
            self._marked = {one.key: one for one in event.processes if one.key in self._marked}
            self._history.add(event.processes, time.monotonic())
            self._draw()

    @property
    def is_covered(self) -> bool:
        """Whether a process's page covers the list. Drawing the list would then redraw the entire page."""
        return self._page is not None and self.app.screen is self._page

    @on(Input.Changed)
    def _draw(self) -> None:
        if self.is_covered:
            return
        held, found = self.session.watcher.holders, self._processes
        entries = arrange(
            found or (), held, words=self.words, order=self.order, is_reversed=self.is_reversed, opened=self._opened,
            as_tree=self.as_tree,
        )  # fmt: skip
        self.table.sorted_by = self.order
        self.table.is_falling = ORDERS[self.order].largest_first is not self.is_reversed
        nothing = "No process matches; escape in the filter shows all." if found and self.words else self._nothing
        reads = found is None and not nothing
        self.table.show_entries(entries, "reading the processes…" if reads else nothing, self._marked)
        n_found = sum(not (entry.n_below or entry.is_parent) for entry in entries)
        notes = [
            f"{n_found} of {len(found or ())}" if self.words else "",
            f"{len(self._marked)} marked" if self._marked else "",
            "" if self.table.shows_order else f"by {self.order}",
            self._silence(),
        ]
        self.say(" · ".join(filter(None, notes)))

    def _silence(self) -> str:
        """Return how old the list is if the system has not responded for a while, otherwise ""."""
        silent_s = time.monotonic() - self._read_at
        if not self._one_reading.locked() or silent_s < _SILENT_AFTER_S:
            return ""
        return f"not read for {silent_s:.0f} s: the system does not respond"

    def on_descendant_blur(self) -> None:
        self._draw()

    def action_next_order(self) -> None:
        names = list(ORDERS)
        self._sort(names[(names.index(self.order) + 1) % len(names)], is_reversed=False)

    def action_reverse(self) -> None:
        self._sort(self.order, is_reversed=not self.is_reversed)

    @on(KeyedTable.HeadingChosen)
    def _sort_by_heading(self, event: KeyedTable.HeadingChosen) -> None:
        """Sort by a column or, if the rows are sorted by it, reverse the order."""
        event.stop()
        self._sort(event.order, is_reversed=event.order == self.order and not self.is_reversed)

    def _sort(self, order: str, *, is_reversed: bool) -> None:
        self.order, self.is_reversed = order, is_reversed
        self._draw()
        self.table.action_move(0)

    def action_mark(self) -> None:
        """Mark or unmark the process under the cursor, and go to the next row."""
        entry = self.table.selected
        if entry is None:
            return
        if entry.n_below or entry.is_parent:
            self.notify(
                "Only a process on a GPU can be marked; enter shows the processes of a job.", severity="warning"
            )
            return
        one = entry.process
        others = {key: each for key, each in self._marked.items() if key != one.key}
        self._marked = others if one.key in self._marked else {**others, one.key: one}
        self._draw()
        self.table.action_move(1)

    def action_unmark(self) -> None:
        self._marked = {}
        self._draw()

    def action_toggle_tree(self) -> None:
        self.as_tree = not self.as_tree
        self._draw()

    def action_fold(self) -> None:
        entry = self.table.selected
        if entry and entry.job:
            self._opened ^= {f"job:{entry.job.id}"}
            self._draw()
        elif self.check_action("mark", ()):
            self.action_mark()

    @on(KeyedTable.Chosen)
    def _open(self, event: KeyedTable.Chosen) -> None:
        """Unfold or fold a job's ranks, or show the full page of a process."""
        event.stop()
        entry = self.table.selected
        if entry and entry.n_below:
            self.action_fold()
        elif entry:
            from sae_tui.screens.process_page import ProcessPage

            latest, readings = partial(self._latest, entry), partial(self._history.of, entry.process)
            self._page = ProcessPage(entry.process, latest, readings, may_show=not self.session.readonly)
            self.app.push_screen(self._page, self._page_closed)
            # Start reading at the page's shorter interval at once.
            self._look()

    def _page_closed(self, _: None) -> None:
        """Draw what has changed in the list while the page covered it."""
        self._page = None
        self.call_later(self._draw)

    def _latest(self, entry: ProcessRow) -> ProcessDetails | None:
        """Return a row's process as last read, or None if it is no longer on a GPU; parents are read only once."""
        if entry.is_parent:
            return entry.process
        return next((one for one in self._processes or () if one.key == entry.process.key), None)

    def action_signal(self) -> None:
        """Ask for a signal and a confirmation, then send the signal to the marked processes or the selected one."""
        entries = self._marked_rows() or [entry for entry in [self.table.selected] if entry]
        if not entries or self.session.actions.refused():
            return
        offered = [(number.name.removeprefix("SIG"), words) for number, words in SIGNALS.items()]
        if len(entries) > 1:
            question = f"Send a signal to {len(entries)} marked processes?"
            self.app.push_screen(Find(question, offered), partial(self._confirm_all, entries))
            return
        (entry,) = entries
        if entry.job:
            offered.insert(0, (_JOB, f"stop job {entry.job.id}, which {asked_of(entry.job.config).stops}"))
        if entry.n_below:
            offered = offered[:1]
        self.app.push_screen(Find(f"Send a signal to {_name(entry)}?", offered), partial(self._confirm, entry))

    def _marked_rows(self) -> list[ProcessRow]:
        """Return a row for each marked process, with its job and rank."""
        rows = arrange(self._marked.values(), self.session.watcher.holders, as_tree=True)
        return [row for row in rows if not row.is_parent]

    def action_adopt(self) -> None:
        """Ask for confirmation, then turn the selected process into a job."""
        entry = self.table.selected
        if entry is None or self.session.actions.refused():
            return
        if entry.job:
            self.notify(f"{_name(entry)} is already a job", severity="warning")
            return
        self.session.actions.adopt(entry.process.pid, _name(entry))

    def _confirm(self, entry: ProcessRow, name: str | None) -> None:
        actions = self.session.actions
        if name == _JOB and entry.job:
            actions.stop(entry.job.id)
        elif name:
            number, source = signal.Signals[f"SIG{name}"], self.session.monitor.source_name
            has_others = entry.rank is not None and entry.job is not None and entry.job.world_size > 1
            others = " The job's other ranks will exit too." if has_others and number in ENDING_SIGNALS else ""
            question = f"Send {name} to {_name(entry)}: {SIGNALS[number]}?{others}"
            actions.ask(question, f"Send {name}", partial(send_signal, entry.process, number, source))

    def _confirm_all(self, entries: Sequence[ProcessRow], name: str | None) -> None:
        if not name:
            return
        number, source = signal.Signals[f"SIG{name}"], self.session.monitor.source_name
        others = _others(entries) if number in ENDING_SIGNALS else ""
        question = f"Send {name} ({SIGNALS[number]}) to {len(entries)} processes: {_whose(entries)}?{others}"
        processes = [entry.process for entry in entries]
        self.session.actions.ask(question, f"Send {name}", partial(send_signals, processes, number, source))


def _whose(entries: Sequence[ProcessRow]) -> str:
    """Return the owners of some processes, like `2 of ada (pids 11, 12) and 1 of bob (pid 13)`."""
    pids: dict[str, list[str]] = {}
    for entry in entries:
        pids.setdefault(entry.process.user or "an unknown user", []).append(str(entry.process.pid))
    return join_words(
        [f"{len(own)} of {user} (pid{'s' * (len(own) > 1)} {', '.join(own)})" for user, own in pids.items()]
    )


def _others(entries: Sequence[ProcessRow]) -> str:
    """Return a sentence saying that other ranks of these entries' jobs will exit too, or "" if there are none."""
    n_chosen = Counter(entry.job.id for entry in entries if entry.job and entry.rank is not None)
    sizes = {entry.job.id: entry.job.world_size for entry in entries if entry.job}
    jobs = [f"job {job_id}" for job_id, n in n_chosen.items() if n < sizes[job_id]]
    return f" The other ranks of {join_words(jobs)} will exit too." if jobs else ""


def _name(entry: ProcessRow) -> str:
    if entry.job is None:
        return process_name(entry.process)
    if entry.n_below:
        return f"job {entry.job.id} ({entry.job.name})"
    which = "" if entry.rank is None else f"rank {entry.rank} of "
    return f"{which}job {entry.job.id} ({entry.job.name}), process {entry.process.pid}"
