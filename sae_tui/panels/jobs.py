"""The jobs table: architecture, state, progress, held-out values, speed, remaining time, and marks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual.binding import Binding
from textual.message import Message

from sae_tui.format import bar, count, duration, measure, number
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.states import describe_state, was_resumed
from sae_tui.jobs.view.arrays import ArrayView, fold
from sae_tui.jobs.view.find import waits
from sae_tui.jobs.view.reader import JobView, is_loading, judged_value
from sae_tui.widgets.lines import Line, Span
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract import wording
from trainer.contract.runs.report_card import PART_TITLES
from trainer.contract.settings.series import OF_BATCH, series_named
from trainer.contract.store.states import JobState

JOBS = Binding.Group("Jobs")
MARK = "●"
# The suffixes of the keys of an evaluation's row and of an array's row, after the job's id and the array's id.
_EVALUATION, _ARRAY = " evaluation", " array"
_STEP_WIDTH = 9
_EMPTY: Span = ("", "text")
_NAME = 1  # index of the column with the name; a command's name extends over the columns for SAEs
COLUMNS = (
    Column("JOB", 5, right=True),
    Column("NAME", 18, grow=True),
    Column("K", 6, right=True, drop=1),
    Column("D_SAE", 8, right=True, drop=5),
    Column("STATE", 10),
    Column("PROGRESS", 10),
    Column("", 4, right=True),
    Column("STEP", 7, right=True, drop=8),
    Column("LOSS", 8, right=True, drop=9),
    Column("FVU", 8, right=True),
    Column("L0", 6, right=True, drop=2),
    Column("DEAD", 6, right=True, drop=6),
    Column("TOK/S", 7, right=True, drop=4),
    Column("ETA", 8, right=True),
    Column("GPUS", 8, drop=3),
)


class JobsPanel(KeyedTable):
    """The jobs table, with job ids as row keys. `marked` contains the jobs that a bulk action applies to.

    The jobs of an array are folded into one row, until the user unfolds it.
    """

    BINDINGS = [
        Binding("right", "unfold", "Unfold", show=False, id="jobs.unfold", group=JOBS,
                tooltip="Show the jobs of the array under the cursor; enter does too"),
        Binding("left", "fold", "Fold", show=False, id="jobs.fold", group=JOBS,
                tooltip="Show the array under the cursor as one row"),
    ]  # fmt: skip

    class Folded(Message):
        """The user has folded or unfolded an array, so the rows must be shown again."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(COLUMNS, id=id)
        self.steps: tuple[Line, ...] = ()
        self.marked: frozenset[int] = frozenset()
        self.arrays: dict[int, ArrayView] = {}
        self._opened: frozenset[int] = frozenset()
        # Each job's row, with the values it was made from.
        self._made: dict[int, tuple[tuple[JobView, bool, bool, str], Row]] = {}

    def show_jobs(
        self,
        jobs: Sequence[JobView],
        nothing: str = "",
        above: Sequence[Row] = (),
        below: Sequence[Row] = (),
        *,
        folds: bool = True,
    ) -> None:
        """Show the jobs. `nothing` explains why the table is empty, and is "" if no job has been launched yet.

        `above` is this host's heading and `below` contains the rows for other hosts, if any. Unless `folds`, show the
        jobs of arrays on their own, as a filter does.
        """
        self.empty = nothing or self.steps
        entries = fold(jobs) if folds else list(jobs)
        self.arrays = {entry.id: entry for entry in entries if isinstance(entry, ArrayView)}
        self._go_to_arrays()
        rows = [row for entry in entries for row in self._rows(entry)]
        self.show_rows([*above, *rows, *below])

    def _go_to_arrays(self) -> None:
        """Move the cursor from the jobs of folded arrays to the arrays."""
        hidden = {
            str(job.id): f"{one.id}{_ARRAY}"
            for one in self.arrays.values()
            if one.id not in self._opened
            for job in one.jobs
        }
        self._awaited = hidden.get(self._awaited or "", self._awaited)
        if self.cursor in hidden:
            self.cursor = hidden[self.cursor]

    def _rows(self, entry: JobView | ArrayView) -> list[Row]:
        if isinstance(entry, JobView):
            return [self._row(entry), *evaluation_rows(entry)]
        is_open = self.is_open(entry)
        marked = self.marked.issuperset(job.id for job in entry.jobs)
        head = array_row(entry, is_open=is_open, marked=marked)
        members = [row for job in entry.jobs for row in (self._row(job, below=True), *evaluation_rows(job))]
        return [head, *(members if is_open else [])]

    def _row(self, job: JobView, *, below: bool = False) -> Row:
        """Reuse the previous row if nothing has changed, since formatting cells for a thousand jobs takes 20 ms."""
        of = job, job.id in self.marked, below, run_time(job)
        made = self._made.get(job.id)
        if made is None or made[0] != of:
            made = self._made[job.id] = (of, job_row(job, marked=of[1], below=below))
        return made[1]

    def action_unfold(self) -> None:
        if array := self.selected_array:
            self._opened |= {array.id}
            self.post_message(self.Folded())

    def action_fold(self) -> None:
        """Fold the array under the cursor, or the array of the job under the cursor."""
        job_id = self.selected
        array = self.selected_array or next(
            (one for one in self.arrays.values() if any(job.id == job_id for job in one.jobs)), None
        )
        if array:
            self._opened -= {array.id}
            self.cursor = f"{array.id}{_ARRAY}"
            self.post_message(self.Folded())

    def toggle(self) -> bool:
        """Unfold or fold the array under the cursor; return False if no array is there."""
        if (array := self.selected_array) is None:
            return False
        if self.is_open(array):
            self.action_fold()
        else:
            self.action_unfold()
        return True

    def is_open(self, array: ArrayView) -> bool:
        """Return whether the array's jobs are shown below its row."""
        return array.id in self._opened

    @property
    def n_folded(self) -> int:
        """How many fewer rows the table has because of arrays."""
        return sum(-1 if one.id in self._opened else len(one.jobs) - 1 for one in self.arrays.values())

    def show_steps(self, steps: Sequence[Line]) -> None:
        """Show these lines while there are no jobs."""
        if tuple(steps) != self.steps:
            if self.empty == self.steps:
                self.empty = tuple(steps)
            self.steps = tuple(steps)
            self._draw()

    @property
    def selected(self) -> int | None:
        """The id of the job under the cursor (for an evaluation, the id of its job), or None for a remote job."""
        job_id = (self.cursor or "").removesuffix(_EVALUATION)
        return int(job_id) if job_id.isdecimal() else None

    @property
    def selected_array(self) -> ArrayView | None:
        """The array under the cursor, or None for a job."""
        array_id, is_array, _ = (self.cursor or "").partition(_ARRAY)
        return self.arrays.get(int(array_id)) if is_array and array_id.isdecimal() else None

    @property
    def previewed(self) -> int | None:
        """The id of the job to show in detail: the job under the cursor, or one of the array under the cursor."""
        array = self.selected_array
        return array.shown.id if array else self.selected


def first_steps(*, has_gpus: bool, has_torch: bool, readonly: bool = False) -> list[Line]:
    """Return the first steps for a new user, each with its key, in lines of at most 78 cells."""
    if has_gpus:
        see = _step("See", "0…9", ": one GPU · ", "t", ": GPU processes · ", "v", ": other views")
    else:
        see = _step("See", "", "no GPU here, so jobs run on the CPU; key ", ",", " adds GPUs of other hosts")
    if readonly:
        return [see, _step("Launch", "", "read-only: the app was started with --readonly")]
    run = _step("Run", "r", ": any program as a job, in the queue for the GPUs")
    if not has_torch:
        remedy = "PyTorch is missing: ", "pip install 'sae-tui[train]'"
        return [see, _step("Extract", "", *remedy), _step("Train", "", *remedy), run]
    return [
        see,
        _step("Extract", "e", ": activations of a language model, to train SAEs on"),
        _step("Train", "n", ", then ", "ctrl+l", ": a first SAE on the sample data (about a minute)"),
        run,
    ]


def _step(name: str, *keys_and_words: str) -> Line:
    """Return a line with a name, then alternating keys and words."""
    styles = ("accent", "dim")
    return ((name.ljust(_STEP_WIDTH), "title"), *((text, styles[at % 2]) for at, text in enumerate(keys_and_words)))


def array_row(array: ArrayView, *, is_open: bool, marked: bool = False) -> Row:
    """Return an array's row: its jobs by state, and the share of them that have finished."""
    sign = "▾" if is_open else "▸"
    words: Span = (f"{sign} {array.words} · {array.name}", "title")
    number: Span = (f"{MARK if marked else ''}{array.id}", "accent" if marked else "label")
    # The bar takes the column of the remaining time, so that the words have space in narrow windows.
    cells = (number, words, *[_EMPTY] * (len(COLUMNS) - 4), (bar(array.progress, 8), "bar rail"), _EMPTY)
    return Row(f"{array.id}{_ARRAY}", cells, spill=(1,))


def job_row(job: JobView, *, marked: bool = False, below: bool = False) -> Row:
    """Return a job's row; it is indented if it is `below` its array's row."""
    word, sign, style = describe_state(job)
    indent = "  " if below else ""
    head: tuple[Span, ...] = (
        (f"{MARK if marked else ''}{job.id}", "accent" if marked else "label"),
        (indent + " ".join([job.name, *(f"#{tag}" for tag in job.tags)]), "title"),
        (job.k, "text"),
        (job.d_sae, "text"),
        (f"{sign} {word}", style),
    )
    if job.silent or job.state == JobState.QUEUED:
        return _spread(job, head, (waits(job), "warn" if job.silent else "dim"))
    if is_loading(job):
        return _spread(job, head, (job.phase, "dim"))
    if (words := run_time(job)) or (kind_of(job.config).is_program and job.state.is_final):
        return _spread(job, head, _outcome(job, words))
    if job.state is JobState.IMPORTED:
        figures = (judged_span(job, "fvu"), judged_span(job, "l0"), *[_EMPTY] * 3)
        return Row(str(job.id), (*head, *[_EMPTY] * 4, *figures, (devices(job), "label")))
    return Row(
        key=str(job.id),
        cells=(
            *head,
            *_progress(job),
            (count(job.step), "text"),
            (number(job.loss), "text"),
            *_judged(job),
            (count(job.tokens_per_s), "text"),
            (duration(job.eta_s) if not job.state.is_final else "", "text"),
            (devices(job), "label"),
        ),
        spill=(_NAME,) if kind_of(job.config).is_program else (),
    )


def run_time(job: JobView) -> str:
    """Return how long a running command that reports no steps has run, or "" for any other job."""
    if job.state.is_final or job.state == JobState.QUEUED or job.step or not kind_of(job.config).is_program:
        return ""
    return duration(max(0.0, time.time() - (job.started or time.time())))


def _outcome(job: JobView, ran: str) -> Span:
    """Return a command's run time, and its loss or how it ended, such as `12 min · exit code 3`."""
    took = ran or (duration(max(0.0, job.ended - job.started)) if job.started and job.ended else "")
    failed = job.state in (JobState.FAILED, JobState.LOST)
    error = (job.error or "").partition("; its last log line")[0] if failed else ""
    why = error.removeprefix("its program ").removeprefix("ended with ")
    loss = "" if job.loss is None or failed else f"loss {number(job.loss)}"
    return " · ".join(filter(None, [took, why, loss])), "bad" if failed else "text" if ran else "dim"


def _judged(job: JobView) -> Sequence[Span]:
    """Return an SAE's FVU, L0 and share of dead latents; a command has none of them."""
    if kind_of(job.config).is_program:
        return [_EMPTY] * 3
    return [judged_span(job, name) for name in ("fvu", "l0", "dead_fraction")]


def _spread(job: JobView, head: Sequence[Span], words: Span) -> Row:
    """Return a job's row showing `words` instead of values."""
    cells = (*head, words, *[_EMPTY] * (len(COLUMNS) - len(head) - 2), (devices(job), "label"))
    return Row(str(job.id), cells, spill=(_NAME, len(head)) if kind_of(job.config).is_program else (len(head),))


def _progress(job: JobView) -> tuple[Span, Span]:
    """Return the progress bar and percentage; for a finished job, the duration, if known, replaces the bar."""
    whole: Span = (wording.done(job.progress), "text")
    # For a resumed job, `started` is when it was last started.
    if job.state != JobState.FINISHED or job.started is None or job.ended is None or was_resumed(job):
        return (bar(job.progress, 10), "bar rail"), whole
    return (duration(max(0.0, job.ended - job.started)), "dim"), whole


def judged_span(job: JobView, name: str) -> Span:
    """Return a job's held-out metric or, before the first evaluation, its batch value, dim and marked."""
    value, is_of_batch = judged_value(job, name)
    text = measure(value, series_named(name))
    return (f"{OF_BATCH}{text}", "dim") if is_of_batch and value is not None else (text, "text")


def evaluation_rows(job: JobView) -> list[Row]:
    """Return the row for a job's running evaluation, or [] if none is running."""
    if (now := job.evaluation) is None:
        return []
    words, style = (f"◌ {now.words}", "dim") if now.waits_for else (f"▶ {now.words}", "good")
    what = ", ".join(PART_TITLES[part] for part in now.parts if part in PART_TITLES)
    head = (_EMPTY, (f"  └ {what}", "dim"), _EMPTY, _EMPTY, (words, style))
    cells = (*head, *[_EMPTY] * (len(COLUMNS) - len(head) - 1), (now.where.removeprefix("the "), "label"))
    return [Row(f"{job.id}{_EVALUATION}", cells, spill=(len(head) - 1,))]


def devices(job: JobView) -> str:
    """Return the devices as text: `0,1`, `any 2` for a queued job, or `cpu` with the number of processes."""
    if job.any_gpus and not job.gpu_ids:
        return f"any {job.gpus_wanted}"
    if job.gpu_ids:
        return ",".join(map(str, job.gpu_ids))
    return "cpu" if job.world_size == 1 else f"cpu:{job.world_size}"
