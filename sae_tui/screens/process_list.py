"""A table of processes with keys for filtering, sorting, the tree, process details, and signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Input

from sae_tui.format import UNKNOWN, clock_time, duration, fit, gibibytes, percent, wrap
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.processes import SIGNALS, ProcessDetails, ProcessReader, Surroundings, send_signal, surroundings
from sae_tui.jobs.asking import asked_of
from sae_tui.jobs.view.processes import ORDERS, ProcessRow, arrange
from sae_tui.panels.processes import ProcessTable, process_name
from sae_tui.session import Session
from sae_tui.widgets.filter import Filtered
from sae_tui.widgets.find import Find
from sae_tui.widgets.lines import Line
from sae_tui.widgets.reading import TextScreen
from sae_tui.widgets.table import KeyedTable

_NAME = 13  # width of the name column, in cells
_MOST_OF_A_PARENT = 160  # in characters; enough to identify what started a process
_AIR: Line = ((" ", "text"),)


def process_lines(process: ProcessDetails, around: Surroundings, width: int, *, whole: bool = False) -> Sequence[Line]:
    """Return the lines for a process's page in `width` cells; with `whole`, include possibly secret values."""
    known = ((name, value) for name, value in _facts(process, around) if value and value != UNKNOWN)
    lines = [line for name, value in known for line in _entry(name, value, width)]
    for place, (name, value) in enumerate(around.shown(whole=whole)):
        lines += [*([] if place else [_AIR]), *_entry("" if place else "environment", f"{name}={value}", width)]
    return lines


def _facts(process: ProcessDetails, around: Surroundings) -> Iterator[tuple[str, str]]:
    runs = None if process.started is None else max(0.0, time.time() - process.started)
    yield "command", process.command or "cannot be seen from here"
    yield "user", process.user or ""
    yield "GPUs", ", ".join(map(str, process.gpus))
    yield "GPU memory", gibibytes(process.memory_used_bytes)
    yield "SM", percent(process.sm_percent)
    yield "CPU", percent(process.cpu_percent)
    yield "host memory", gibibytes(process.host_memory_bytes)
    yield "run time", "" if process.started is None else f"{duration(runs)}, since {clock_time(process.started)}"
    yield "container", process.container
    yield "folder", around.folder
    yield "program", around.program
    for place, parent in enumerate(process.ancestors):
        words = " ".join(filter(None, [str(parent.pid), parent.user, parent.command]))[:_MOST_OF_A_PARENT]
        yield ("its parent" if place else "started by"), words


def _entry(name: str, value: str, width: int) -> Iterator[Line]:
    space = max(8, width - _NAME - 2)
    for row, part in enumerate(wrap(value, space)):
        yield (f" {fit(name if row == 0 else '', _NAME)}", "label"), (fit(part, space), "text")


_GROUP = Binding.Group("Processes")
_READ_EVERY_S = 3.0  # the interval at which the monitor lists the GPUs' processes
_SILENT_AFTER_S = 10.0
_JOB = "job"  # the choice for stopping the rank's job, listed above the signals


class ProcessPage(TextScreen):
    """The full page for a process; if `may_show`, a key reveals possibly secret values."""

    BINDINGS = [
        Binding("v", "show_values", "Values", id="process.values", group=_GROUP,
                tooltip="Show all variables, or hide the values that may be secret"),
    ]  # fmt: skip

    def __init__(self, process: ProcessDetails, *, may_show: bool) -> None:
        super().__init__(f"Process {process.pid}", self._lines)
        self._process, self._around, self._may_show = process, surroundings(process), may_show
        self.shows_all = False

    def _lines(self, width: int) -> Sequence[Line]:
        return process_lines(self._process, self._around, width, whole=self.shows_all)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self._may_show if action == "show_values" else super().check_action(action, parameters)

    def action_show_values(self) -> None:
        self.shows_all = not self.shows_all
        self.draw_again()

    def hide_values(self) -> None:
        """Hide possibly secret values."""
        if self.shows_all:
            self.action_show_values()


class ProcessList(Filtered):
    """Lists the processes on some GPUs, with a filter, a sort order and a tree view."""

    BINDINGS = [
        Binding("s", "signal", "Signal", id="processes.signal", group=_GROUP,
                tooltip="Interrupt, terminate or halt the process under the cursor, after a confirmation"),
        Binding("A", "adopt", "Adopt", show=False, id="processes.adopt", group=_GROUP,
                tooltip="Turn the process under the cursor into a job, if it is yours"),
        Binding("slash", "filter", "Filter", key_display="/", id="processes.filter", group=_GROUP,
                tooltip="Show processes that match all words: command, user:ada, gpu:1, job:12, pid, container"),
        Binding("o", "next_order", "Order", id="processes.order", group=_GROUP,
                tooltip="Next sort order: " + ", ".join(ORDERS)),
        Binding("t", "toggle_tree", "Tree", id="processes.tree", group=_GROUP,
                tooltip="Show each process below its parent, or processes folded under their job"),
        Binding("space", "fold", "Fold", show=False, id="processes.fold", group=_GROUP,
                tooltip="Show or hide the processes of the job under the cursor"),
    ]  # fmt: skip
    PLACEHOLDER = "words, user:ada, gpu:1"

    class Read(Message):
        """The processes on some GPUs were reread."""

        def __init__(self, gpus: Sequence[int], processes: Sequence[ProcessDetails]) -> None:
            super().__init__()
            self.gpus, self.processes = gpus, processes

    def __init__(self, session: Session, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.session = session
        self.order = next(iter(ORDERS))
        self.as_tree = False
        self._opened: frozenset[str] = frozenset()
        self._processes: Sequence[ProcessDetails] | None = None
        self._nothing = ""
        self._reader = ProcessReader()
        self._one_reading = threading.Lock()
        self._read_at = 0.0
        self._is_due = True
        self._has_shares = False
        self._gpus: list[int] = []
        self._pids: list[int] = []

    def compose(self) -> ComposeResult:
        yield self.filter_line()
        yield ProcessTable(id="processes")

    def on_unmount(self) -> None:
        self.session.monitor.want_shares(False)

    @property
    def table(self) -> ProcessTable:
        return self.query_one(ProcessTable)

    def show_samples(self, samples: Sequence[GpuSample], nothing: str) -> None:
        """Show the processes on these GPUs; `nothing` is the text for an empty list."""
        self._nothing = nothing
        gpus = [sample.index for sample in samples]
        pids = [process.pid for sample in samples for process in sample.processes or ()]
        if gpus != self._gpus:
            self._processes = None
        # Request the SM shares again, because the previous list cancels its request when it closes.
        self.session.monitor.want_shares(True)
        shares = {index: self.session.monitor.sm_percents(index) for index in gpus}
        # Read immediately if a new process appears or the first SM shares arrive.
        is_new = (gpus, pids) != (self._gpus, self._pids) or (any(shares.values()) and not self._has_shares)
        self._gpus, self._pids, self._has_shares = gpus, pids, any(shares.values())
        self._is_due |= is_new or time.monotonic() - self._read_at >= _READ_EVERY_S
        # Reading a hung process can hang too, so never start a second read in the meantime.
        if self._is_due and not self._one_reading.locked():
            self._read_at, self._is_due = time.monotonic(), False
            self._read(tuple(samples), shares)
        self._draw()

    @work(thread=True, group="processes", exclusive=True, exit_on_error=False)
    def _read(self, samples: Sequence[GpuSample], sm_percents: Mapping[int, Mapping[int, int]]) -> None:
        # Two concurrent reads would overwrite each other's state.
        if not self._one_reading.acquire(blocking=False):
            return
        try:
            processes = self._reader.read(samples, sm_percents)
        finally:
            self._one_reading.release()
        self.post_message(self.Read([sample.index for sample in samples], processes))

    @on(Read)
    def _take(self, event: Read) -> None:
        # Ignore processes on GPUs that are no longer shown.
        if event.gpus == self._gpus:
            self._processes = event.processes
            self._draw()

    @on(Input.Changed)
    def _draw(self) -> None:
        held, found = self.session.watcher.holders, self._processes
        entries = arrange(
            found or (), held, words=self.words, order=self.order, opened=self._opened, as_tree=self.as_tree
        )
        nothing = "No process matches; escape in the filter shows all." if found and self.words else self._nothing
        self.table.show_entries(entries, "reading the processes…" if found is None and not nothing else nothing)
        n_found = sum(not (entry.n_below or entry.is_parent) for entry in entries)
        notes = [
            f"{n_found} of {len(found or ())}" if self.words else "",
            f"by {self.order}" if self.order != next(iter(ORDERS)) else "",
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
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._draw()
        self.table.action_move(0)

    def action_toggle_tree(self) -> None:
        self.as_tree = not self.as_tree
        self._draw()

    def action_fold(self) -> None:
        entry = self.table.selected
        if entry and entry.job:
            self._opened ^= {f"job:{entry.job.id}"}
            self._draw()

    @on(KeyedTable.Chosen)
    def _open(self, event: KeyedTable.Chosen) -> None:
        """Unfold or fold a job's ranks, or show the full page of a process."""
        event.stop()
        entry = self.table.selected
        if entry and entry.n_below:
            self.action_fold()
        elif entry:
            process = entry.process
            self.app.push_screen(ProcessPage(process, may_show=not self.session.readonly))

    def action_signal(self) -> None:
        """Ask for a signal and a confirmation, then send the signal to the selected process."""
        entry = self.table.selected
        if entry is None or self.session.actions.refused():
            return
        offered = [(number.name.removeprefix("SIG"), words) for number, words in SIGNALS.items()]
        if entry.job:
            offered.insert(0, (_JOB, f"stop job {entry.job.id}, which {asked_of(entry.job.config).stops}"))
        if entry.n_below:
            offered = offered[:1]
        self.app.push_screen(Find(f"Send a signal to {_name(entry)}?", offered), partial(self._confirm, entry))

    def action_adopt(self) -> None:
        """Ask for confirmation, then turn the selected process into a job."""
        entry = self.table.selected
        if entry is None or self.session.actions.refused():
            return
        if entry.job:
            self.notify(f"{_name(entry)} is a job already", severity="warning")
            return
        self.session.actions.adopt(entry.process.pid, _name(entry))

    def _confirm(self, entry: ProcessRow, name: str | None) -> None:
        actions = self.session.actions
        if name == _JOB and entry.job:
            actions.stop(entry.job.id)
        elif name:
            number, source = signal.Signals[f"SIG{name}"], self.session.monitor.source_name
            has_others = entry.rank is not None and entry.job is not None and entry.job.world_size > 1
            others = " The job's other ranks will exit too." if has_others else ""
            question = f"Send {name} to {_name(entry)}: {SIGNALS[number]}?{others}"
            actions.ask(question, f"Send {name}", partial(send_signal, entry.process, number, source))


def _name(entry: ProcessRow) -> str:
    if entry.job is None:
        return process_name(entry.process)
    if entry.n_below:
        return f"job {entry.job.id} ({entry.job.name})"
    which = "" if entry.rank is None else f"rank {entry.rank} of "
    return f"{which}job {entry.job.id} ({entry.job.name}), process {entry.process.pid}"
