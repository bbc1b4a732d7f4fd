"""The jobs, newest first: state, progress, loss, speed, time left."""

from __future__ import annotations

from collections.abc import Sequence

from sae_tui.format import bar, count, duration, number, percent
from sae_tui.jobs.reader import JobView
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract.states import JobState

# Word and glyph, since colour is never the only sign.
STATES = {
    JobState.QUEUED: ("◌", "dim"),
    JobState.STARTING: ("◔", "accent"),
    JobState.RUNNING: ("▶", "good"),
    JobState.STALLED: ("!", "warn"),
    JobState.STOPPING: ("◼", "warn"),
    JobState.STOPPED: ("◼", "dim"),
    JobState.FINISHED: ("✓", "good"),
    JobState.FAILED: ("✗", "bad"),
    JobState.LOST: ("?", "bad"),
}
NO_JOBS = "No jobs yet: press n to launch one."
COLUMNS = (
    Column("JOB", 4, right=True),
    Column("NAME", 12, grow=True),
    Column("STATE", 10),
    Column("PROGRESS", 10),
    Column("", 4, right=True),
    Column("STEP", 7, right=True, drop=3),
    Column("LOSS", 8, right=True, drop=2),
    Column("FVU", 7, right=True, drop=1),
    Column("TOK/S", 7, right=True, drop=4),
    Column("ETA", 8, right=True),
    Column("GPUS", 8, drop=5),
)


class JobsPanel(KeyedTable):
    """The table of jobs; its keys are job ids."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(COLUMNS, empty=NO_JOBS, id=id)

    def show_jobs(self, jobs: Sequence[JobView], problem: str = "") -> None:
        """`problem` says why no jobs can be read, where that is so."""
        self.empty = problem or NO_JOBS
        self.show_rows([job_row(job) for job in jobs])

    @property
    def selected(self) -> int | None:
        """The id of the job under the cursor."""
        return int(self.cursor) if self.cursor is not None else None


def job_row(job: JobView) -> Row:
    glyph, style = STATES[job.state]
    return Row(
        key=str(job.id),
        cells=(
            (str(job.id), "label"),
            (job.name, "title"),
            (f"{glyph} {job.state}", style),
            (bar(job.progress, 10), "bar trough"),
            (percent(100 * job.progress), "text"),
            (count(job.step), "text"),
            (number(job.loss), "text"),
            (number(job.fvu), "text"),
            (count(job.tokens_per_s), "text"),
            (duration(job.eta_s) if not job.state.is_final else "", "text"),
            (devices(job), "label"),
        ),
    )


def devices(job: JobView) -> str:
    """`0,1`, `any 2` of a job in line, or `cpu` with the number of processes."""
    if job.any_gpus and not job.gpu_ids:
        return f"any {job.gpus_wanted}"
    if job.gpu_ids:
        return ",".join(map(str, job.gpu_ids))
    return "cpu" if job.world_size == 1 else f"cpu:{job.world_size}"
