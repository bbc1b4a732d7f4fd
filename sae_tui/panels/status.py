"""The line at the top: the host, the numbers of GPUs and jobs, and any problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.events import Resize

from sae_tui.format import fit, gibibytes, percent
from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample
from sae_tui.host import NOT_READ, HostLoad
from sae_tui.jobs.view.reader import JobView
from sae_tui.widgets.lines import LineView, Span
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

if TYPE_CHECKING:
    from sae_tui.hosts.view import HostView

ASKING = "asking the driver…"


@dataclass(frozen=True, slots=True)
class StatusContent:
    """The status line content. `problem` may be empty; `load` is the machine's load.

    `alerts` is the number of active alerts.
    """

    host: str
    summary: str
    problem: str = ""
    load: HostLoad = NOT_READ
    alerts: int = 0


class StatusLine(LineView):
    """Shows the status in one line; a problem replaces the summary."""

    DEFAULT_CSS = "StatusLine { height: 1; background: $panel; }"

    def on_mount(self) -> None:
        self._status = StatusContent("", "")

    def show_status(self, status: StatusContent) -> None:
        self._status = status
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        if not width:
            return
        head = f" sae-tui · {self._status.host} "
        alerts = f"⚠ {plural(self._status.alerts, 'alert')}  " if self._status.alerts else ""
        problem = self._status.problem
        text, style = (f"⚠ {problem}", "warn") if problem else (self._status.summary, "dim")
        space = max(0, width - len(head) - len(alerts) - 1)
        spans = load_spans(self._status.load, space - cell_len(text) - 2)
        taken = sum(cell_len(words) for words, _ in spans)
        first = (fit(head, min(width, len(head))), "title")
        warned: list[Span] = [(alerts, "warn")] if alerts else []
        self.show([(first, *warned, *spans, (fit(text, space - taken, right=True), style))])


def load_spans(load: HostLoad, space: int) -> list[Span]:
    """Return the machine's load as labels and values, limited to `space` cells."""
    memory = f"{gibibytes(load.memory_used_bytes)} of {gibibytes(load.memory_total_bytes)}"
    values = (
        ("CPU", fit(percent(load.cpu_percent), 4, right=True), load.cpu_percent),
        ("RAM", memory, load.memory_used_bytes),
        ("load", "" if load.load is None else f"{load.load:.1f}", load.load),
        ("swap", gibibytes(load.swap_used_bytes), load.swap_used_bytes or None),
        ("disk", rate(load.disk_bytes_s), load.disk_bytes_s),
        ("network", rate(load.network_bytes_s), load.network_bytes_s),
    )
    spans: list[Span] = []
    for name, text, value in values:
        space -= len(name) + len(text) + 3
        if value is not None and space >= 0:
            spans += [(f"  {name} ", "dim"), (text, "text")]
    return spans


def rate(bytes_s: float | None) -> str:
    """Return a transfer rate like `12 MB/s`, right-aligned up to `9999 MB/s`."""
    return "" if bytes_s is None else f"{bytes_s / 1e6:>4.0f} MB/s"


def summary(
    samples: Sequence[GpuSample],
    jobs: Sequence[JobView],
    *,
    opening: bool,
    hidden: str = "",
    others: Sequence[HostView] = (),
) -> str:
    """Return text like `8 GPUs, 1 lost · 0 running · 2 waiting`; held and paused jobs are counted as waiting.

    If some GPUs are hidden, `hidden` replaces the number of GPUs. With other hosts, the counts cover all hosts: `3
    hosts · 12 GPUs · 2 running · 0 waiting`.
    """
    gpus = ASKING if opening else _gpus(samples, hidden)
    if others:
        connected = [view for view in others if view.is_connected]
        count = len(samples) + sum(len(view.gpus) for view in connected)
        gpus = f"{1 + len(others)} hosts · {count} GPUs"
        jobs = [*jobs, *(job for view in connected for job in view.jobs)]
    waiting = sum(job.state is JobState.QUEUED for job in jobs)
    running = sum(not job.state.is_final for job in jobs) - waiting
    evaluated = sum(job.evaluation is not None for job in jobs)
    return f"{gpus} · {running} running{f' · {evaluated} evaluating' if evaluated else ''} · {waiting} waiting"


def _counted(lost: int, unreadable: int, withheld: int) -> tuple[tuple[int, str], ...]:
    return (lost, "lost"), (unreadable, "unreadable"), (withheld, "for others")


def _gpus(samples: Sequence[GpuSample], hidden: str) -> str:
    unread = [sample for sample in samples if not sample.healthy and sample.reason != faults.NO_ANSWER_YET]
    withheld = sum(sample.withheld for sample in unread)
    reasons = [sample.reason for sample in unread if not sample.withheld]
    lost = reasons.count(faults.LOST)
    parts = [hidden or f"{len(samples)} GPU{'s' * (len(samples) != 1)}"]
    parts += [f"{count} {word}" for count, word in _counted(lost, len(reasons) - lost, withheld) if count]
    return ", ".join(parts)
