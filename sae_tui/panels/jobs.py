"""The jobs table: architecture, state, progress, held-out values, speed, remaining time, and marks."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from textual.binding import Binding
from textual.message import Message

from sae_tui.format import bar, measured_duration, number
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.arrays import ArrayView, fold
from sae_tui.jobs.view.find import waits
from sae_tui.jobs.view.reader import JobView, is_loading
from sae_tui.jobs.view.sweeps import axes_words
from sae_tui.panels.job_columns import (
    COLUMNS,
    EMPTY,
    LEADING,
    NOT_OF_IMPORTED,
    SHOWN,
    VALUES,
    columns_of,
)
from sae_tui.widgets.lines import Line, Span
from sae_tui.widgets.table import KeyedTable, Row
from trainer.contract.runs.report_card import PART_TITLES
from trainer.contract.store.states import JobState

JOBS = Binding.Group("Jobs")
MARK = "●"
# The suffixes of row keys: after a job's id for its evaluation, and after an array's id for the array.
_EVALUATION, _ARRAY = " evaluation", " array"
_STEP_WIDTH = 9
_NAME = 1  # index of the column with the name; a command's name extends over the columns for SAEs


class JobsPanel(KeyedTable):
    """The jobs table, with job ids as row keys. `marked` contains the jobs that a bulk action applies to.

    An array's jobs are folded into one row until the user unfolds it.
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
        self.chosen: tuple[str, ...] = SHOWN
        super().__init__(columns_of(SHOWN), id=id)
        self.steps: tuple[Line, ...] = ()
        self.marked: frozenset[int] = frozenset()
        self.arrays: dict[int, ArrayView] = {}
        self._opened: frozenset[int] = frozenset()
        # Each job's row, with the values it was made from.
        self._made: dict[int, tuple[tuple[JobView, bool, bool, str], Row]] = {}

    def choose(self, names: Sequence[str], order: str = "", *, falls: bool = False) -> None:
        """Show the columns with these names, and an arrow in the heading of the column that the jobs are sorted by."""
        if self.chosen != (chosen := tuple(dict.fromkeys(names))):
            self.chosen = chosen
            self._made.clear()
        self.columns = columns_of(self.chosen)
        self.sorted_by, self.is_falling = order, falls

    def show_jobs(
        self,
        jobs: Sequence[JobView],
        nothing: str = "",
        above: Sequence[Row] = (),
        below: Sequence[Row] = (),
        *,
        folds: bool = True,
        families: bool = False,
    ) -> None:
        """Show the jobs. `nothing` explains why the table is empty, and is "" if no job has been launched yet.

        `above` is this host's heading and `below` contains the rows for other hosts, if any. Unless `folds`, show each
        job in an array as its own row, as when a filter is set. With `families`, also fold jobs and their clones.
        """
        self.empty = nothing or self.steps
        entries = fold(jobs, families=families) if folds else list(jobs)
        self.arrays = {entry.id: entry for entry in entries if isinstance(entry, ArrayView)}
        self._go_to_arrays()
        rows = [row for entry in entries for row in self._rows(entry)]
        self.show_rows([*above, *rows, *below])

    def _go_to_arrays(self) -> None:
        """If the cursor is on a job in a folded array, move it to the array."""
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
            return [self._row(entry), *evaluation_rows(entry, self.chosen)]
        is_open = self.is_open(entry)
        marked = self.marked.issuperset(job.id for job in entry.jobs)
        head = array_row(entry, self.chosen, is_open=is_open, marked=marked)
        members = [
            row for job in entry.jobs for row in (self._row(job, below=True), *evaluation_rows(job, self.chosen))
        ]
        return [head, *(members if is_open else [])]

    def _row(self, job: JobView, *, below: bool = False) -> Row:
        """Reuse the previous row if nothing has changed, since formatting cells for a thousand jobs takes 20 ms."""
        of = job, job.id in self.marked, below, run_time(job)
        made = self._made.get(job.id)
        if made is None or made[0] != of:
            made = self._made[job.id] = (of, job_row(job, self.chosen, marked=of[1], below=below))
        return made[1]

    def action_unfold(self) -> None:
        if array := self.selected_array:
            self._opened |= {array.id}
            self.post_message(self.Folded())

    def action_fold(self) -> None:
        """Fold the array under the cursor, or the array that contains the job under the cursor."""
        job_id = self.selected
        array = self.selected_array or next(
            (one for one in self.arrays.values() if any(job.id == job_id for job in one.jobs)), None
        )
        if array:
            self._opened -= {array.id}
            self.cursor = f"{array.id}{_ARRAY}"
            self.post_message(self.Folded())

    def toggle(self) -> bool:
        """Unfold or fold the array under the cursor; return False if there is no array under the cursor."""
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
        """The number of table rows saved by folding arrays; an unfolded array needs one additional row."""
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
        """The id of the job to show in detail: the job under the cursor, or one in the array under the cursor."""
        array = self.selected_array
        return array.shown.id if array else self.selected


def first_steps(*, has_gpus: bool, has_torch: bool, readonly: bool = False) -> list[Line]:
    """Return the first steps for a new user, each with its key, in lines of at most 78 cells."""
    if has_gpus:
        see = _step("See", "0…9", ": one GPU · ", "t", ": GPU processes · ", "V", ": other views")
    else:
        see = _step("See", "", "no GPU here, so jobs run on the CPU; key ", ",", " adds GPUs on other hosts")
    if readonly:
        return [see, _step("Launch", "", "read-only: the app was started with --readonly")]
    run = _step("Run", "r", ": any program as a job, in the queue for the GPUs")
    if not has_torch:
        remedy = "PyTorch is missing: ", "pip install 'sae-tui[train]'"
        return [see, _step("Extract", "", *remedy), _step("Train", "", *remedy), run]
    return [
        see,
        _step("Extract", "X", ": activations of a language model, to train SAEs on"),
        _step("Train", "n", ", then ", "ctrl+l", ": a first SAE on the sample data (about a minute)"),
        run,
    ]


def _step(name: str, *keys_and_words: str) -> Line:
    """Return a line with a name, then alternating keys and words."""
    styles = ("accent", "dim")
    return ((name.ljust(_STEP_WIDTH), "title"), *((text, styles[at % 2]) for at, text in enumerate(keys_and_words)))


def array_row(array: ArrayView, names: Sequence[str], *, is_open: bool, marked: bool = False) -> Row:
    """Return an array's row: its jobs by state, and the share that has finished."""
    sign = "▾" if is_open else "▸"
    words: Span = (f"{sign} {array.words} · {array.name}", "title")
    number: Span = (f"{MARK if marked else ''}{array.id}", "accent" if marked else "label")
    # The bar is in the column for the remaining time, so that the words have space in narrow windows.
    progress: Span = (bar(array.progress, 8), "bar rail")
    cells = (number, words, *(progress if name == "eta" else EMPTY for name in names))
    return Row(f"{array.id}{_ARRAY}", cells, spill=(1,))


def job_row(job: JobView, names: Sequence[str] | None = None, *, marked: bool = False, below: bool = False) -> Row:
    """Return a job's row with the columns `names`; if it is `below` its array's row, indent it."""
    names = SHOWN if names is None else names
    words, empty = _instead_of_values(job)
    cells: list[Span] = [
        (f"{MARK if marked else ''}{job.id}", "accent" if marked else "label"),
        (f"{'  ' * below}{_name(job)}", "title"),
        *(EMPTY if name in empty else COLUMNS[name].span(job) for name in names),
    ]
    spill = [_NAME] if kind_of(job.config).is_program else []
    if words:
        # Columns with a `drop` are missing in narrow windows, so put the words in a column without a `drop`.
        stays = (at for at, name in enumerate(names, len(LEADING)) if name in empty and not COLUMNS[name].column.drop)
        if place := next(stays, None):
            cells[place] = words
            spill.append(place)
        else:
            cells[_NAME] = (f"{cells[_NAME][0]} · {words[0]}", words[1])
            spill = [_NAME]
    return Row(str(job.id), tuple(cells), spill=tuple(spill))


def _name(job: JobView) -> str:
    """Return a job's name with the settings that differ between a sweep's SAEs, and with its tags."""
    name = f"{job.name} · {axes}" if (axes := axes_words(job.config)) else job.name
    return " ".join([name, *(f"#{tag}" for tag in job.tags)])


def _instead_of_values(job: JobView) -> tuple[Span | None, Collection[str]]:
    """Return a sentence to show in place of a job's values, if any, and the columns that are empty."""
    if job.silent or job.state == JobState.QUEUED:
        return (waits(job), "warn" if job.silent else "dim"), VALUES
    if is_loading(job):
        return (job.phase, "dim"), VALUES
    if (words := run_time(job)) or (kind_of(job.config).is_program and job.state.is_final):
        return _outcome(job, words), VALUES
    return None, NOT_OF_IMPORTED if job.state is JobState.IMPORTED else ()


def run_time(job: JobView) -> str:
    """Return how long a running command that reports no steps has run, or "" for any other job."""
    if job.state.is_final or job.state == JobState.QUEUED or job.step or not kind_of(job.config).is_program:
        return ""
    return measured_duration(max(0.0, time.time() - (job.started or time.time())))


def _outcome(job: JobView, ran: str) -> Span:
    """Return a command's run time, and its loss or how it ended, such as `12 min · exit code 3`."""
    took = ran or (measured_duration(max(0.0, job.ended - job.started)) if job.started and job.ended else "")
    failed = job.state in (JobState.FAILED, JobState.LOST)
    error = (job.error or "").partition("; its last log line")[0] if failed else ""
    why = error.removeprefix("its program ").removeprefix("ended with ")
    loss = "" if job.loss is None or failed else f"loss {number(job.loss)}"
    return " · ".join(filter(None, [took, why, loss])), "bad" if failed else "text" if ran else "dim"


def evaluation_rows(job: JobView, names: Sequence[str]) -> list[Row]:
    """Return the row for a job's running evaluation, or [] if none is running."""
    if (now := job.evaluation) is None:
        return []
    words: Span = (f"◌ {now.words}", "dim") if now.waits_for else (f"▶ {now.words}", "good")
    what = ", ".join(PART_TITLES[part] for part in now.parts if part in PART_TITLES)
    where: Span = (now.where.removeprefix("the "), "label")
    place = names.index("state") if "state" in names else 0
    cells = [EMPTY, (f"  └ {what}", "dim"), *(where if name == "gpus" else EMPTY for name in names)]
    if names:
        cells[len(LEADING) + place] = words
    return [Row(f"{job.id}{_EVALUATION}", tuple(cells), spill=(len(LEADING) + place,))]
