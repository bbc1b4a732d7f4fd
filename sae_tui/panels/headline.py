"""The first lines of a job's screen: name, state, progress, and why it ended."""

from __future__ import annotations

from rich.cells import cell_len

from sae_tui.format import bar, count, duration, fit, gigabytes, number, percent
from sae_tui.jobs.need import COUNTED
from sae_tui.jobs.watcher import JobDetail
from sae_tui.panels.curves import members_of, newest
from sae_tui.panels.detail import DetailPanel
from sae_tui.panels.jobs import STATES, devices
from sae_tui.widgets.lines import Line, Span, cut
from trainer.contract.records import Job


class Headline(DetailPanel):
    """Three lines: what, how far, and the result or the reason."""

    DEFAULT_CSS = """
    Headline { height: 3; background: $panel; }
    Headline > .line--trough { background: $background; }
    """
    # Which SAE of a sweep the curves show.
    member = ""

    def lines(self, detail: JobDetail) -> list[Line]:
        return [cut(line, self.size.width) for line in headline(detail, self.size.width, self.member)]


def headline(detail: JobDetail, width: int, member: str = "") -> list[Line]:
    job, members = detail.view, members_of(detail)
    shown = f"{member} ({members.index(member) + 1} of {len(members)})" if member in members else ""
    glyph, style = STATES[job.state]
    where = f"{'GPU ' if job.gpu_ids else ''}{devices(job)}, {job.mode}"
    first: tuple[Span, ...] = (
        (f" job {job.id} ", "label"),
        (job.name, "title"),
        (f"  {glyph} {job.state}", style),
        (f"  {where}", "label"),
        (f"  {shown}" if shown else "", "accent"),
    )
    first += ((_memory(job, width - sum(cell_len(text) for text, _ in first)), "label"),)
    total = count(job.total_steps) if job.total_steps else "?"
    left = "" if job.eta_s is None else f"  {duration(job.eta_s)} left"
    second: Line = (
        (" ", "text"),
        (bar(job.progress, max(10, width - 72)), "bar trough"),
        (fit(percent(100 * job.progress), 5, right=True), "title"),
        (f"  step {count(job.step)}/{total}", "text"),
        (f"  {count(job.tokens_per_s)} tok/s", "text"),
        (f"  FVU {number(newest(detail, 'fvu', member))}  L0 {number(newest(detail, 'l0', member))}", "text"),
        (left, "text"),
    )
    return [first, second, _ending(detail, width)]


def _memory(job: Job, width: int) -> str:
    """What was estimated for a rank and the most that one took, in as many words as there is room for."""
    peak = f"peak {gigabytes(job.peak_memory_bytes)}" if job.peak_memory_bytes else ""
    estimate = f"estimate {gigabytes(job.estimated_memory_bytes)}" if job.estimated_memory_bytes else ""
    short = ", ".join(filter(None, (estimate, peak)))
    wordings = [f"  {short} ({COUNTED[job.device]})" if peak else "", f"  {short}", f"  {peak or estimate}"]
    return next((words for words in wordings if words.strip() and cell_len(words) <= width), "")


def _ending(detail: JobDetail, width: int) -> Line:
    job = detail.view
    lost = f" {count(job.dropped)} rows of metrics were lost" if job.dropped else ""
    width -= len(lost)
    if job.error:
        return ((fit(f" ✗ {job.error}", width), "bad"), (lost, "warn"))
    if job.output_path and job.state.is_final:
        return ((fit(f" {job.output_path}", width), "accent"), (lost, "warn"))
    return ((fit(f" {detail.phase}" if detail.phase else "", width), "dim"), (lost, "warn"))
