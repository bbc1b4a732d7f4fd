"""One GPU over the whole window."""

from __future__ import annotations

import contextlib
import socket
import time

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message

from sae_tui.format import clock_time, duration
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.window import FIELDS, SPANS_S, Window, live_window, stored_window
from sae_tui.panels.gpu_page import GpuFacts, GpuHistory
from sae_tui.panels.gpu_row import short_name
from sae_tui.panels.status import StatusLine
from sae_tui.screens.process_list import ProcessList
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, entitle
from trainer.contract.errors import UserError

_FACTS_BESIDE_FROM = 76  # columns
_REREAD_S = 5.0  # the store is written as often


class GpuScreen(FramedScreen):
    """Histories, particulars and processes of a card; its particulars are read only while this is shown."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="gpu.back", tooltip="To the dashboard"),
        Binding("right_square_bracket", "next_gpu(1)", "Next GPU", key_display="]", id="gpu.next",
                tooltip="The GPU after this one"),
        Binding("left_square_bracket", "next_gpu(-1)", "GPU before", key_display="[", show=False, id="gpu.before",
                tooltip="The GPU before this one"),
        Binding("plus", "longer(1)", "Longer", key_display="+", id="gpu.longer",
                tooltip="More of the past: minutes, hours, a day, a week"),
        Binding("minus", "longer(-1)", "Shorter", key_display="-", id="gpu.shorter", tooltip="Less of the past"),
        Binding("left", "read_out(-1)", "Read out", priority=True, id="gpu.back_in_time",
                tooltip="Read the values of an earlier time, and which job ran then"),
        Binding("right", "read_out(1)", "Later", show=False, priority=True, id="gpu.later",
                tooltip="Read the values of a later time"),
        Binding("shift+left", "read_out(-10)", show=False),
        Binding("shift+right", "read_out(10)", show=False),
    ]  # fmt: skip
    HELP = "One GPU: what it does and did, its clocks, links and faults, and who computes on it."
    DEFAULT_CSS = """
    GpuScreen #gpu-top { height: 1fr; }
    GpuScreen GpuFacts { width: 46; height: 1fr; }
    GpuScreen ProcessList { height: 30%; min-height: 4; max-height: 14; }
    GpuScreen.-narrow #gpu-top { layout: vertical; }
    GpuScreen.-narrow GpuFacts { width: 1fr; }
    """

    class Found(Message):
        """A span of the store was read, of a card."""

        def __init__(self, uuid: str, span_s: float, window: Window) -> None:
            super().__init__()
            self.uuid, self.span_s, self.window = uuid, span_s, window

    def __init__(self, session: Session, index: int) -> None:
        super().__init__(name="gpu")
        self.session, self.index = session, index
        self._span = 0  # of `SPANS_S`, counted from 1; 0 shows the newest intervals
        self._stored: Window | None = None
        self._read_at = 0.0
        # When the values are read out; None while they are those of now.
        self._cursor_time: float | None = None

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        with Horizontal(id="gpu-top"):
            yield GpuHistory(id="gpu-history", classes="panel")
            yield GpuFacts(id="gpu-facts", classes="panel")
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
        """The newest sample of the card; None where it is not among those shown any more."""
        return next((one for one in self.session.monitor.latest() if one.index == self.index), None)

    def show_gpus(self) -> None:
        """Draw what is known of the card now."""
        sample = self.sample
        if not self.is_mounted or sample is None:
            return
        # Again, since the screen of another card, which was left just before, ends its own look when it is gone.
        self.session.monitor.look_at(self.index)
        details = self.session.monitor.details(self.index)
        ((holder, style),) = self.session.holders([sample])
        self.query_one(StatusLine).show_status(self.session.status())
        self._show_history(sample)
        self.query_one(GpuFacts).show_gpu(sample, details, holder, style)
        nothing = f"No process is seen: {holder}." if sample.healthy else f"✗ {sample.reason}"
        self.query_one(ProcessList).show_samples([sample], nothing)

    def _show_history(self, sample: GpuSample) -> None:
        history, window = self.query_one(GpuHistory), self._window(sample)
        cursor = self._cursor_in(window)
        span = duration(window.step_s * len(window.jobs))
        words = f"last {span}"
        if cursor is not None:
            job = window.jobs[cursor]
            words = f"{clock_time(window.time_of(cursor))}{f' · job {job}' if job else ''}"
        history.show_gpu(sample, window, cursor, words)

    def _window(self, sample: GpuSample) -> Window:
        """Return what is to be drawn; have the store read where that is due."""
        n = self.query_one(GpuHistory).n_columns
        if self._span == 0:
            job = self.session.watcher.holders.jobs.get(sample.uuid)
            interval_s = self.session.settings.sampling_interval_s
            return live_window(self.session.monitor.past(n), self.index, n, interval_s, job.id if job else None)
        span_s = SPANS_S[self._span - 1]
        if n and time.monotonic() - self._read_at >= max(_REREAD_S, span_s / n):
            self._read_at = time.monotonic()
            self._read_store(sample.uuid, span_s, n)
        return self._stored or Window(time.time() - span_s, span_s, dict.fromkeys(FIELDS, (None,)), (None,))

    @work(thread=True, group="history", exclusive=True, exit_on_error=False)
    def _read_store(self, uuid: str, span_s: float, n: int) -> None:
        with contextlib.suppress(UserError):  # told in the status line by those who store it
            found = stored_window(self.session.data.gpu_db, socket.gethostname(), uuid, span_s, n, time.time())
            self.post_message(self.Found(uuid, span_s, found))

    @on(Found)
    def _show_found(self, event: Found) -> None:
        sample = self.sample
        if sample and self._span and (event.uuid, event.span_s) == (sample.uuid, SPANS_S[self._span - 1]):
            self._stored = event.window
            self._show_history(sample)

    def _cursor_in(self, window: Window) -> int | None:
        """Return the column of the time that is read out; None where it is not in the window."""
        if self._cursor_time is None:
            return None
        column = int((self._cursor_time - window.begin) // window.step_s)
        return column if 0 <= column < len(window.jobs) else None

    def action_longer(self, by: int) -> None:
        self._span = max(0, min(len(SPANS_S), self._span + by))
        self._forget()

    def action_read_out(self, by: int) -> None:
        sample = self.sample
        if sample is None:
            return
        window = self._window(sample)
        column = self._cursor_in(window)
        column = (len(window.jobs) if column is None else column) + by
        # Beyond the newest the values are those of now.
        self._cursor_time = window.time_of(max(0, column) + 0.5) if column < len(window.jobs) else None
        self.show_gpus()

    def action_next_gpu(self, by: int) -> None:
        indices = [sample.index for sample in self.session.monitor.latest()]
        if self.index in indices:
            self.index = indices[(indices.index(self.index) + by) % len(indices)]
            self._forget()
            self._look()

    def _forget(self) -> None:
        """Forget what was read of the store, and read it anew."""
        self._stored, self._read_at = None, 0.0
        self.show_gpus()

    def _look(self) -> None:
        """Have this card read, and no other."""
        self.session.monitor.look_at(self.index)
        self._title()
        self.call_after_refresh(self.show_gpus)

    def _arrange(self) -> None:
        self.set_class(self.size.width < _FACTS_BESIDE_FROM, "-narrow")
        self._title()

    def _title(self) -> None:
        sample = self.sample
        name = f"GPU {self.index}" + (f" · {short_name(sample.name)}" if sample else "")
        for panel, title in (("gpu-history", name), ("gpu-facts", "Particulars"), ("gpu-processes", "Processes")):
            entitle(self.query_one(f"#{panel}"), title)
