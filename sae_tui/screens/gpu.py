"""One GPU over the whole window."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen

from sae_tui.gpu.base import GpuSample
from sae_tui.panels.gpu_card import GpuFacts, GpuHistory, GpuProcesses
from sae_tui.panels.gpus import short_name
from sae_tui.panels.status import StatusLine
from sae_tui.screens.dashboard_rows import frame_of
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer

_FACTS_BESIDE_FROM = 76  # columns


class GpuScreen(Screen[None]):
    """Histories, particulars and processes of a card; its particulars are read only while this is shown."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="gpu.back", tooltip="To the dashboard"),
        Binding("left,left_square_bracket", "next_gpu(-1)", "GPU before", key_display="←", id="gpu.before",
                tooltip="The GPU before this one"),
        Binding("right,right_square_bracket", "next_gpu(1)", "Next GPU", key_display="→", id="gpu.next",
                tooltip="The GPU after this one"),
    ]  # fmt: skip
    HELP = "One GPU: what it does and did, its clocks, links and faults, and who computes on it."
    DEFAULT_CSS = """
    GpuScreen #gpu-top { height: 1fr; }
    GpuScreen GpuHistory { height: 1fr; width: 1fr; }
    GpuScreen GpuFacts { width: 46; height: 1fr; }
    GpuScreen GpuProcesses { height: 30%; min-height: 4; max-height: 14; }
    GpuScreen.-narrow #gpu-top { layout: vertical; }
    GpuScreen.-narrow GpuFacts { width: 1fr; }
    """

    def __init__(self, session: Session, index: int) -> None:
        super().__init__(name="gpu")
        self.session, self.index = session, index

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        with Horizontal(id="gpu-top"):
            yield GpuHistory(id="gpu-history", classes="panel")
            yield GpuFacts(id="gpu-facts", classes="panel")
        yield GpuProcesses(id="gpu-processes").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(GpuProcesses).focus()
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
        details = self.session.monitor.details(self.index)
        holder, style = self.session.holder(sample)
        self.query_one(StatusLine).show_status(self.session.status())
        self.query_one(GpuHistory).show_gpu(sample, self.session.monitor.past(self.size.width))
        self.query_one(GpuFacts).show_gpu(sample, details, holder, style)
        nothing = f"No process is seen: {holder}." if details else "reading the card…"
        self.query_one(GpuProcesses).show_processes(details, nothing if sample.healthy else f"✗ {sample.reason}")

    def action_next_gpu(self, by: int) -> None:
        indices = [sample.index for sample in self.session.monitor.latest()]
        if self.index in indices:
            self.index = indices[(indices.index(self.index) + by) % len(indices)]
            self._look()

    def _look(self) -> None:
        """Have this card read, and no other."""
        self.session.monitor.look_at(self.index)
        self._title()
        self.call_after_refresh(self.show_gpus)

    def _arrange(self) -> None:
        frame = frame_of(self.size.width, self.size.height)
        for name in ("framed", "ruled", "bare"):
            self.set_class(name == frame, f"-{name}")
        self.set_class(self.size.width < _FACTS_BESIDE_FROM, "-narrow")
        self._title()

    def _title(self) -> None:
        sample = self.sample
        air = "" if self.has_class("-framed") else " "
        name = f"GPU {self.index}" + (f" · {short_name(sample.name)}" if sample else "")
        for panel, title in (("gpu-history", name), ("gpu-facts", "Particulars"), ("gpu-processes", "Processes")):
            self.query_one(f"#{panel}").border_title = Content(f"{air}{title}{air}")
