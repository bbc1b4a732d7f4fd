"""Why a job failed, before anything else of it: the first rank that did, its exception, and what to do."""

from __future__ import annotations

from sae_tui.format import fit, wrapped
from sae_tui.jobs.view.postmortem import Postmortem
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line


class CausePanel(DetailPanel, can_focus=True):
    """Nothing at all for a job that has not failed. The log panel has the last lines of the rank that did."""

    DEFAULT_CSS = "CausePanel { height: auto; max-height: 60%; } CausePanel.-none { display: none; }"

    def show_detail(self, detail: JobDetail) -> None:
        self.set_class(detail.postmortem is None, "-none")
        super().show_detail(detail)

    def lines(self, detail: JobDetail) -> list[Line]:
        found = detail.postmortem
        return [] if found is None else cause_lines(found, self.width, self.screen.size.height // 2)

    def _draw(self) -> None:
        # Without lines it has no size yet.
        if self._detail:
            self.show(self.lines(self._detail))


def cause_lines(found: Postmortem, width: int, most: int) -> list[Line]:
    """The error and what to do whole; of the traceback as much as there is room for."""
    lines = _hung("✗", found.error, width, "bad")
    for advice in filter(None, (found.remedy, _resume(found.resume_step))):
        lines += _hung("→", advice, width, "accent")
    for other in found.others[:3]:
        lines += _hung(" ", other, width, "dim")
    if found.stacks:
        lines += _hung(" ", f"where its ranks hung: {found.stacks}", width, "dim")
    room = max(2, most - len(lines) - 1)
    if found.traceback:
        lines.append(((fit(" exception", width), "title"),))
        frames = [row for text in found.traceback for row in _indented(text, width - 3)]
        lines += [((fit(f"   {row}", width), "text"),) for row in frames[-room:]]
    return lines


def _hung(sign: str, text: str, width: int, style: str) -> list[Line]:
    """The text below and beside its sign."""
    lines = wrapped(text, max(10, width - 3))
    return [((fit(f" {sign if row == 0 else ' '} {line}", width), style),) for row, line in enumerate(lines)]


def _indented(text: str, width: int) -> list[str]:
    """A line of a traceback, whole."""
    margin = " " * (len(text) - len(text.lstrip()))
    return [margin + line for line in wrapped(text.strip(), max(10, width - len(margin)))]


def _resume(step: int | None) -> str:
    if step is None:
        return ""
    return f"g resumes it from step {step:,}" if step else "g starts it again: it had saved no checkpoint"
