"""Why a job failed: the error and traceback from the rank that failed first, and a remedy."""

from __future__ import annotations

from sae_tui.format import fit, wrap
from sae_tui.jobs.view.postmortem import Postmortem
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line

# The advice for a failure without a known remedy.
_CORRECT = "y opens its settings in a new form, to correct them; g tries again with the same settings"


class CausePanel(DetailPanel, can_focus=True):
    """Shows why a job failed; hidden if it did not fail. The last lines from the failed rank are in the log panel."""

    DEFAULT_CSS = "CausePanel { height: auto; max-height: 60%; } CausePanel.-none { display: none; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes="-none")

    def show_detail(self, detail: JobDetail) -> None:
        self.set_class(detail.postmortem is None, "-none")
        super().show_detail(detail)

    def title(self, detail: JobDetail) -> Line:
        return (("Why it failed", "bad"),) if detail.postmortem else ()

    def lines(self, detail: JobDetail) -> list[Line]:
        postmortem = detail.postmortem
        return [] if postmortem is None else cause_lines(postmortem, self.width, self.screen.size.height // 2)

    def _draw(self) -> None:
        # Draw even without a size, because an empty panel has no size.
        if self._detail:
            self._redraw(self._detail)


def cause_lines(postmortem: Postmortem, width: int, most: int) -> list[Line]:
    """Return the error and the remedy in full, and as much of the traceback as fits into `most` lines."""
    lines = _after_sign("✗", postmortem.error, width, "bad")
    advices = [*filter(None, (postmortem.remedy, postmortem.resumes and f"g {postmortem.resumes}"))]
    for advice in advices or [_CORRECT]:
        lines += _after_sign("→", advice, width, "accent")
    for other in postmortem.others[:3]:
        lines += _after_sign(" ", other, width, "dim")
    if postmortem.stacks:
        lines += _after_sign(" ", f"stack traces of the hung ranks: {postmortem.stacks}", width, "dim")
    space = max(2, most - len(lines) - 1)
    if postmortem.traceback:
        lines.append(((fit(" exception", width), "title"),))
        frames = [row for text in postmortem.traceback for row in _wrap_indented(text, width - 3)]
        lines += [((fit(f"   {row}", width), "text"),) for row in frames[-space:]]
    return lines


def _after_sign(sign: str, text: str, width: int, style: str) -> list[Line]:
    """Return the text as wrapped lines, with the sign before the first line."""
    lines = wrap(text, max(10, width - 3))
    return [((fit(f" {sign if row == 0 else ' '} {line}", width), style),) for row, line in enumerate(lines)]


def _wrap_indented(text: str, width: int) -> list[str]:
    """Wrap a line of a traceback, keeping its indentation."""
    margin = " " * (len(text) - len(text.lstrip()))
    return [margin + line for line in wrap(text.strip(), max(10, width - len(margin)))]
