"""One GPU in the full window."""

from __future__ import annotations

import socket
import time

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal

from sae_tui.format import clock_time, duration
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.window import FIELDS, Window, live_window, stored_window
from sae_tui.panels.gpu_page import GpuDetailsView, GpuHistory
from sae_tui.panels.gpu_row import GpuRow, short_name
from sae_tui.panels.status import StatusLine
from sae_tui.screens.look_back import LookBack, span_keys
from sae_tui.screens.process_list import ProcessList
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, entitle

_FACTS_BESIDE_FROM = 76  # columns


class GpuScreen(FramedScreen):
    """Shows a GPU's histories, details and processes. The details are read only while this screen is shown."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="gpu.back", tooltip="To the previous screen"),
        Binding("right_square_bracket", "next_gpu(1)", "Next GPU", key_display="]", id="gpu.next",
                tooltip="The next GPU"),
        Binding("left_square_bracket", "next_gpu(-1)", "Previous GPU", key_display="[", show=False, id="gpu.before",
                tooltip="The previous GPU"),
        *span_keys("gpu"),
        Binding("left", "read_out(-1)", "Read values", priority=True, id="gpu.back_in_time",
                tooltip="Show the values at an earlier time, and the job that ran then"),
        Binding("right", "read_out(1)", "Later", show=False, priority=True, id="gpu.later",
                tooltip="Show the values at a later time"),
        Binding("shift+left", "read_out(-10)", show=False),
        Binding("shift+right", "read_out(10)", show=False),
    ]  # fmt: skip
    HELP = "One GPU: current and past load, clocks, links, faults and processes."
    DEFAULT_CSS = """
    GpuScreen #gpu-top { height: 1fr; }
    GpuScreen GpuDetailsView { width: 46; height: 1fr; }
    GpuScreen ProcessList { height: 30%; min-height: 4; max-height: 14; }
    GpuScreen.-narrow #gpu-top { layout: vertical; }
    GpuScreen.-narrow GpuDetailsView { width: 1fr; }
    """

    def __init__(self, session: Session, index: int) -> None:
        super().__init__(name="gpu")
        self.session, self.index = session, index
        self._back = LookBack(self, self._read_store)
        # The time of the displayed values, or None for the current values.
        self._cursor_time: float | None = None

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        with Horizontal(id="gpu-top"):
            yield GpuHistory(id="gpu-history", classes="panel")
            yield GpuDetailsView(id="gpu-facts", classes="panel")
        yield ProcessList(self.session, id="gpu-processes").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(ProcessList).table.focus()
        self._arrange()
        self._look()

    def on_unmount(self) -> None:
        self.session.monitor.look_at(None)

    def on_resize(self) -> None:
        self._arrange()
        self.call_after_refresh(self.show_gpus)

    @property
    def sample(self) -> GpuSample | None:
        """The GPU's latest sample, or None if the GPU is no longer present."""
        return next((one for one in self.session.monitor.latest() if one.index == self.index), None)

    def show_gpus(self) -> None:
        """Draw the current state of the GPU."""
        sample = self.sample
        if not self.is_mounted:
            return
        if sample is None:
            self.query_one(GpuHistory).show([])
            self.query_one(GpuDetailsView).show([((" ✗ this GPU is no longer present", "bad"),)])
            return
        # Request the details again, because another GPU's screen cancels the request when it closes.
        self.session.monitor.look_at(self.index)
        details = self.session.monitor.details(self.index)
        (holder,) = self.session.holders([sample])
        row = GpuRow(sample, *holder, lambda *_: (), settings=self.session.settings)
        self.query_one(StatusLine).show_status(self.session.status())
        self._show_history(sample)
        self.query_one(GpuDetailsView).show_gpu(row, details)
        nothing = f"No visible process: {row.holder}." if sample.healthy else row.fault[0]
        self.query_one(ProcessList).show_samples([sample], nothing)

    def _show_history(self, sample: GpuSample) -> None:
        history, window = self.query_one(GpuHistory), self._window(sample)
        cursor = self._cursor_in(window)
        span = duration(window.step_s * len(window.jobs))
        words = f"last {span}"
        if cursor is not None:
            job = window.jobs[cursor]
            words = f"{clock_time(window.time_of(cursor))}{f' · job {job}' if job else ''}"
        history.show_gpu(sample, window, cursor, words, self.session.settings)

    def _window(self, sample: GpuSample) -> Window:
        """Return the window to draw; if a store read is due, start it."""
        n = self.query_one(GpuHistory).n_columns
        span_s = self._back.span_s
        if span_s is None:
            job = self.session.watcher.holders.jobs.get(sample.uuid)
            interval_s = self.session.settings.sampling_interval_s
            return live_window(self.session.monitor.past(n), self.index, n, interval_s, job.id if job else None)
        stored = self._back.stored(sample.uuid, n)
        return stored or Window(time.time() - span_s, span_s, dict.fromkeys(FIELDS, (None,)), (None,))

    def _read_store(self, uuid: str, span_s: float, n: int) -> Window:
        return stored_window(self.session.data.gpu_db, socket.gethostname(), uuid, span_s, n, time.time())

    @on(LookBack.Found)
    def _show_found(self) -> None:
        if sample := self.sample:
            self._show_history(sample)

    def _cursor_in(self, window: Window) -> int | None:
        """Return the column for the cursor's time, or None if that time is outside the window."""
        if self._cursor_time is None:
            return None
        column = int((self._cursor_time - window.begin) // window.step_s)
        return column if 0 <= column < len(window.jobs) else None

    def action_longer(self, by: int) -> None:
        self._back.longer(by)
        self.show_gpus()

    def action_read_out(self, by: int) -> None:
        sample = self.sample
        if sample is None:
            return
        window = self._window(sample)
        column = self._cursor_in(window)
        column = (len(window.jobs) if column is None else column) + by
        # Past the latest column, show the current values.
        self._cursor_time = window.time_of(max(0, column) + 0.5) if column < len(window.jobs) else None
        self.show_gpus()

    def action_next_gpu(self, by: int) -> None:
        indices = [sample.index for sample in self.session.monitor.latest()]
        if self.index in indices:
            self.index = indices[(indices.index(self.index) + by) % len(indices)]
            self._back.forget()
            self._look()

    def _look(self) -> None:
        """Request the details of this GPU only."""
        self.session.monitor.look_at(self.index)
        self._title()
        self.call_after_refresh(self.show_gpus)

    def _arrange(self) -> None:
        self.set_class(self.size.width < _FACTS_BESIDE_FROM, "-narrow")
        self._title()

    def _title(self) -> None:
        sample = self.sample
        name = f"GPU {self.index}" + (f" · {short_name(sample.name)}" if sample else "")
        for panel, title in (("gpu-history", name), ("gpu-facts", "Details"), ("gpu-processes", "Processes")):
            entitle(self.query_one(f"#{panel}"), title)
