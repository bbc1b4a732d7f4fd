"""The processes on all GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding

from sae_tui.gpu.base import GpuSample
from sae_tui.panels.processes import GpuMeters
from sae_tui.panels.status import StatusLine
from sae_tui.screens.process_list import ProcessList
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, entitle
from trainer.contract.wording import plural

_METERS_SHARE = 6  # the meters take up at most one sixth of the rows


class ProcessesScreen(FramedScreen):
    """Shows the processes on all GPUs, in the full window."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="processes.back", tooltip="To the previous screen"),
    ]
    HELP = (
        "The processes on the GPUs, with their details; ranks are folded under their job. A signal is sent only to "
        "the process that was shown, never to another process with the same pid."
    )

    def __init__(self, session: Session) -> None:
        super().__init__(name="processes")
        self.session = session

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        yield GpuMeters(id="meters")
        yield ProcessList(self.session, id="all-processes").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(ProcessList).table.focus()
        self.show_gpus()

    def on_resize(self) -> None:
        self.show_gpus()

    def show_gpus(self) -> None:
        """Show the processes currently on the GPUs."""
        if not self.is_mounted:
            return
        samples = self.session.monitor.latest()
        processes = self.query_one(ProcessList)
        if not processes.is_covered:
            self.query_one(StatusLine).show_status(self.session.status())
            self.query_one(GpuMeters).show_gpus(samples, self.size.height // _METERS_SHARE)
            entitle(processes, f"Processes on {plural(len(samples), 'GPU')}")
        processes.show_samples(samples, why_none(samples))


def why_none(samples: Sequence[GpuSample]) -> str:
    """Return the text for an empty list of the processes on these GPUs."""
    if unlisted := [sample.index for sample in samples if sample.processes is None]:
        return f"The processes of GPU {', '.join(map(str, unlisted))} cannot be listed."
    return "There are no processes on the GPUs." if samples else "This machine has no GPU; d shows why."
