"""The line at the top: which box, how many GPUs and jobs, and what is degraded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.events import Resize

from sae_tui.format import fit
from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.view.reader import JobView
from sae_tui.widgets.lines import LineView
from trainer.contract.store.states import JobState

ASKING = "asking the driver…"


@dataclass(frozen=True, slots=True)
class Status:
    """`problem` is empty while all is well."""

    host: str
    summary: str
    problem: str = ""


class StatusLine(LineView):
    """One line; a problem takes the place of the summary."""

    DEFAULT_CSS = "StatusLine { height: 1; background: $panel; }"

    def on_mount(self) -> None:
        self._status = Status("", "")

    def show_status(self, status: Status) -> None:
        self._status = status
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        if not width:
            return
        head = f" sae-tui · {self._status.host} "
        problem = self._status.problem
        text, style = (f"⚠ {problem}", "warn") if problem else (self._status.summary, "dim")
        self.show(
            [
                (
                    (fit(head, min(width, len(head))), "title"),
                    (fit(text, max(0, width - len(head) - 1), right=True), style),
                )
            ]
        )


def summary(samples: Sequence[GpuSample], jobs: Sequence[JobView], *, opening: bool, hidden: str = "") -> str:
    """Return `8 GPUs, 1 lost · 0 running · 2 waiting`; what is held or paused waits as well.

    `hidden` takes the place of the number of GPUs where some are hidden.
    """
    waiting = sum(job.state is JobState.QUEUED for job in jobs)
    running = sum(not job.state.is_final for job in jobs) - waiting
    return f"{ASKING if opening else _gpus(samples, hidden)} · {running} running · {waiting} waiting"


def _gpus(samples: Sequence[GpuSample], hidden: str) -> str:
    reasons = [sample.reason for sample in samples if not sample.healthy and sample.reason != faults.NO_ANSWER_YET]
    lost = reasons.count(faults.LOST)
    parts = [hidden or f"{len(samples)} GPU{'s' * (len(samples) != 1)}"]
    parts += [f"{count} {word}" for count, word in ((lost, "lost"), (len(reasons) - lost, "unreadable")) if count]
    return ", ".join(parts)
