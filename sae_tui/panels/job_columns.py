"""The columns of the jobs list, and the dialog that chooses and orders the columns and sorts the jobs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Label

from sae_tui.format import bar, clock_time, count, duration, gibibytes, measure, measured_duration, number
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.states import describe_state, was_resumed
from sae_tui.jobs.view.find import architectures, orders, run_seconds
from sae_tui.jobs.view.reader import JobView, judged_value, spread_of
from sae_tui.settings import Settings
from sae_tui.widgets.dialog import Dialog
from sae_tui.widgets.lines import Span
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract import wording
from trainer.contract.settings.series import CRITERION, OF_BATCH, series_named
from trainer.contract.store.states import JobState

EMPTY: Span = ("", "text")
LEADING = (Column("JOB", 5, right=True), Column("NAME", 18, grow=True, most=30))


@dataclass(frozen=True, slots=True)
class JobColumn:
    """A column that the user can choose: its cell for a job, and its sort order (see `orders`).

    If `is_value`, the column is empty until a job has values, and a sentence takes its place.
    """

    column: Column
    span: Callable[[JobView], Span]
    order: str = ""
    is_value: bool = False


@functools.cache
def columns_of(names: tuple[str, ...]) -> tuple[Column, ...]:
    """Return the table's columns for these names, with their sort orders."""
    orders = ("newest", "name", *(COLUMNS[name].order for name in names))
    columns = (*LEADING, *(COLUMNS[name].column for name in names))
    return tuple(replace(column, order=order) for column, order in zip(columns, orders, strict=True))


def _progress(job: JobView) -> Span:
    """Return the progress bar; for a finished job, the duration, if known, replaces the bar."""
    # For a resumed job, `started` is when it was last started.
    if job.state != JobState.FINISHED or job.started is None or job.ended is None or was_resumed(job):
        return bar(job.progress, 10), "bar rail"
    return measured_duration(max(0.0, job.ended - job.started)), "dim"


def _speed(job: JobView) -> Span:
    """Return the tokens per second or, for a command, the steps per second, like `2/s`."""
    speed = count(job.tokens_per_s)
    is_of_steps = kind_of(job.config).is_program and job.tokens_per_s is not None
    return f"{speed}/s" if is_of_steps else speed, "text"


def _judged(name: str) -> Callable[[JobView], Span]:
    """Return a function that returns the cell for an SAE's metric, which is empty for a command."""
    return lambda job: EMPTY if kind_of(job.config).is_program else judged_span(job, name)


def judged_span(job: JobView, name: str) -> Span:
    """Return a job's held-out metric or, before the first evaluation, its batch value, dim and marked.

    A held-out mean over seeds has its standard deviation in parentheses, like `0.146(2)` for 0.146 ± 0.002.
    """
    value, is_of_batch = judged_value(job, name)
    text = measure(value, series_named(name))
    if is_of_batch:
        return (f"{OF_BATCH}{text}", "dim") if value is not None else (text, "text")
    spread = spread_of(job, name)
    if spread and name == CRITERION and max(abs(spread.mean), spread.sd) < 99:
        text = mean_with_digit(spread.mean, spread.sd)
    return text, "text"


def mean_with_digit(mean: float, sd: float) -> str:
    """Return a mean rounded to the first digit of its standard deviation, with that digit in parentheses: `0.146(2)`.

    The text has at most 9 characters, the width of the column. The digit is 0 only for a standard deviation of 0.
    """
    most = 4 if abs(mean) < 9.99 else 3
    decimals = most if sd < 10**-most else min(most, max(0, -math.floor(math.log10(sd))))
    digit = max(1, round(sd * 10**decimals)) if sd else 0
    if digit == 10 and decimals:
        decimals, digit = decimals - 1, 1
    return f"{mean:.{decimals}f}({digit})"


def devices(job: JobView) -> str:
    """Return the devices as text: `0,1`, `any 2` for a queued job, or `cpu` with the number of processes."""
    if job.any_gpus and not job.gpu_ids:
        return f"any {job.gpus_wanted}"
    if job.gpu_ids:
        return ",".join(map(str, job.gpu_ids))
    return "cpu" if job.world_size == 1 else f"cpu:{job.world_size}"


def _state(job: JobView) -> Span:
    word, sign, style = describe_state(job)
    return f"{sign} {word}", style


def _eta(job: JobView) -> Span:
    return (duration(job.eta_s) if not job.state.is_final else ""), "text"


def _took(job: JobView) -> Span:
    return duration(run_seconds(job)), "text"


def _started(job: JobView) -> Span:
    return (clock_time(job.started) if job.started else ""), "text"


def _memory(job: JobView) -> Span:
    return (gibibytes(job.peak_memory_bytes) if job.peak_memory_bytes else ""), "text"


# The columns that the user can choose, by the names in the setting `job_columns`. Columns with the highest `drop`
# disappear first in narrow windows.
COLUMNS = {
    "k": JobColumn(Column("K", 6, right=True, drop=1), lambda job: (job.k, "text"), "k"),
    "d_sae": JobColumn(Column("D_SAE", 7, right=True, drop=5), lambda job: (job.d_sae, "text"), "d_sae"),
    "state": JobColumn(Column("STATE", 10), _state, "state"),
    "progress": JobColumn(Column("PROGRESS", 10), _progress, "progress", is_value=True),
    "percent": JobColumn(
        Column("DONE", 4, right=True), lambda job: (wording.done(job.progress), "text"), "progress", is_value=True
    ),
    "step": JobColumn(
        Column("STEP", 7, right=True, drop=8), lambda job: (count(job.step), "text"), "step", is_value=True
    ),
    "tokens": JobColumn(
        Column("TOKENS", 7, right=True, drop=10), lambda job: (count(job.tokens), "text"), "tokens", is_value=True
    ),
    "loss": JobColumn(
        Column("LOSS", 8, right=True, drop=9), lambda job: (number(job.loss), "text"), "loss", is_value=True
    ),
    "fvu": JobColumn(Column("FVU", 9, right=True), _judged("fvu"), "fvu", is_value=True),
    "l0": JobColumn(Column("L0", 6, right=True, drop=2), _judged("l0"), "l0", is_value=True),
    "dead_fraction": JobColumn(
        Column("DEAD", 6, right=True, drop=6), _judged("dead_fraction"), "dead_fraction", is_value=True
    ),
    "tokens_per_s": JobColumn(
        Column("TOK/S", 7, right=True, drop=4), _speed, "tokens_per_s", is_value=True
    ),
    "eta": JobColumn(Column("ETA", 8, right=True), _eta, "eta", is_value=True),
    "took": JobColumn(Column("TOOK", 8, right=True, drop=12), _took, "took", is_value=True),
    "gpus": JobColumn(Column("GPUS", 8, drop=3), lambda job: (devices(job), "label"), "gpus"),
    "memory": JobColumn(Column("MEMORY", 8, right=True, drop=13), _memory, "memory", is_value=True),
    "arch": JobColumn(Column("ARCH", 11, drop=11), lambda job: (architectures(job), "text"), "arch"),
    "started": JobColumn(Column("STARTED", 12, drop=14), _started, "started"),
    "user": JobColumn(Column("USER", 8, drop=15), lambda job: (job.user, "text"), "user"),
    "host": JobColumn(Column("HOST", 10, drop=16), lambda job: (job.host, "text"), "host"),
    "note": JobColumn(Column("NOTE", 12, grow=True, drop=17), lambda job: (job.note, "dim")),
}  # fmt: skip
SHOWN = tuple(Settings().job_columns)
VALUES = frozenset(name for name, one in COLUMNS.items() if one.is_value)
NOT_OF_IMPORTED = VALUES - {"fvu", "l0", "tokens", "memory"}

HELP: Mapping[str, str] = {
    "k": "active latents for each row",
    "d_sae": "number of latents",
    "state": "queued, running, finished, …",
    "progress": "a bar; once finished, the duration",
    "percent": "share of the steps that are done",
    "step": "steps done",
    "tokens": "tokens trained on",
    "loss": "loss of the last batches",
    "fvu": "held-out FVU (~: of the batch; 0.146(2): 0.146 ± 0.002 over seeds)",
    "l0": "held-out L0 (~: of the batch)",
    "dead_fraction": "share of dead latents",
    "tokens_per_s": "training speed",
    "eta": "time left",
    "took": "how long it has run",
    "gpus": "GPUs, or cpu",
    "memory": "peak memory of a rank",
    "arch": "architecture of the SAE",
    "started": "time of the last start",
    "user": "who launched it",
    "host": "where it runs",
    "note": "your note",
}
_KEYS = "space shows or hides · shift+↑ ↓ moves · o sorts · O reverses · ctrl+r defaults · enter saves"


class ColumnsDialog(Dialog[tuple[str, ...] | None]):
    """Lists all columns, starting with the shown ones in their order; returns the shown ones, or None if cancelled.

    `sort` is called immediately with a sort order and whether it is reversed.
    """

    BINDINGS = [
        Binding("escape", "dismiss(None)", "Cancel", id="columns.cancel", tooltip="Cancel without changes"),
        Binding("space", "show_or_hide", "Toggle", id="columns.toggle", tooltip="Show or hide the column"),
        Binding("shift+up,K", "shift(-1)", "Earlier", id="columns.earlier", tooltip="Move the column to the left"),
        Binding("shift+down,J", "shift(1)", "Later", id="columns.later", tooltip="Move the column to the right"),
        Binding("o", "sort(False)", "Order", id="columns.sort", tooltip="Sort the jobs by the column"),
        Binding("O", "sort(True)", "Reverse", id="columns.reverse", tooltip="Sort in the opposite direction"),
        Binding("ctrl+r", "reset", "Reset", id="columns.reset", tooltip="Show the default columns"),
    ]
    DEFAULT_CSS = """
    ColumnsDialog { align: center middle; }
    ColumnsDialog > Vertical { width: 64; max-width: 95%; height: 90%; max-height: 27; padding: 0 1; }
    ColumnsDialog > Vertical { border: round $primary; background: $surface; }
    ColumnsDialog Label { width: 1fr; height: auto; color: $text-muted; }
    """

    def __init__(self, shown: Sequence[str], sort: Callable[[str, bool], None], sorted_by: tuple[str, bool]) -> None:
        super().__init__()
        self._sort, self._sorted_by = sort, sorted_by
        self._start(shown)

    def _start(self, shown: Sequence[str]) -> None:
        self.names = [*shown, *(name for name in COLUMNS if name not in shown)]
        self._shown = set(shown)

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of the shown columns, in their order."""
        return tuple(name for name in self.names if name in self._shown)

    def compose(self) -> ComposeResult:
        columns = (Column("", 2), Column("COLUMN", 14), Column("", 1), Column("WHAT IT SHOWS", 20, grow=True))
        with Vertical() as box:
            box.border_title = "Columns of the jobs list"
            yield KeyedTable(columns, id="columns")
            yield Label(_KEYS, markup=False)

    def on_mount(self) -> None:
        self._draw()
        self._table.focus()

    @property
    def _table(self) -> KeyedTable:
        return self.query_one(KeyedTable)

    def _draw(self) -> None:
        self._table.show_rows([self._row(name) for name in self.names])

    def _row(self, name: str) -> Row:
        is_shown = name in self._shown
        style = "text" if is_shown else "dim"
        order, reverse = self._sorted_by
        is_sorted = bool(order) and COLUMNS[name].order == order
        arrow: Span = (("▼" if orders()[order].descends != reverse else "▲") if is_sorted else "", "accent")
        return Row(name, (("■" if is_shown else "□", "accent"), (name, style), arrow, (HELP[name], "dim")))

    def action_show_or_hide(self) -> None:
        if name := self._table.cursor:
            self._shown ^= {name}
            self._draw()

    def action_shift(self, by: int) -> None:
        """Move the column under the cursor, and the cursor with it."""
        if name := self._table.cursor:
            place = self.names.index(name)
            self.names.insert(max(0, place + by), self.names.pop(place))
            self._draw()
            self._table.action_move(0)

    def action_sort(self, reverse: bool) -> None:
        """Sort by the column under the cursor; if the jobs are already sorted by it, reverse their order."""
        order = COLUMNS[self._table.cursor].order if self._table.cursor else ""
        if not order:
            self.notify("The jobs cannot be sorted by this column.", severity="warning")
            return
        is_again = self._sorted_by[0] == order
        self._sorted_by = (order, not self._sorted_by[1] if is_again else reverse)
        self._sort(*self._sorted_by)
        self._draw()

    def action_reset(self) -> None:
        self._start(SHOWN)
        self._draw()

    def on_keyed_table_chosen(self) -> None:
        self.dismiss(self.shown)
