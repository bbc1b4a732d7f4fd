"""Why a job failed, before anything else of it: the first rank that did, its exception, and what to do."""

from __future__ import annotations

from sae_tui.format import fit
from sae_tui.jobs.postmortem import Postmortem
from sae_tui.jobs.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line


class CausePanel(DetailPanel):
    """Nothing at all for a job that has not failed."""

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
    """The error and the remedy always; of traceback and log as much as there is room for."""
    lines: list[Line] = [((fit(f" ✗ {found.error}", width), "bad"),)]
    if found.remedy:
        lines.append(((fit(f" → {found.remedy}", width), "accent"),))
    lines += [((fit(f"   {other}", width), "dim"),) for other in found.others[:3]]
    if found.stacks:
        lines.append(((fit(f"   where its ranks hung: {found.stacks}", width), "dim"),))
    rest: list[Line] = []
    for title, texts in (("exception", found.traceback), (f"last lines of rank {found.rank or 0}", found.log)):
        room = most - len(lines) - len(rest) - 1
        if texts and room > 1:
            rest.append(((fit(f" {title}", width), "title"),))
            rest += [((fit(f"   {text}", width), "text"),) for text in texts[-room:]]
    return lines + rest
