"""The table of processes on GPUs, and the meters of the GPUs above it."""

from __future__ import annotations

import time
from collections.abc import Container, Hashable, Sequence

from textual.binding import Binding

from sae_tui.format import UNKNOWN, duration, fit, gibibytes, percent
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.processes import ProcessDetails
from sae_tui.jobs.view.processes import ProcessRow
from sae_tui.panels.gpu_row import MEMORY, UTILIZATION, GpuRow, fill, fold_withheld, meter_bar
from sae_tui.panels.jobs import MARK
from sae_tui.widgets.lines import Line, LineView, Span
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract.wording import plural, ranges

UNSEEN = "cannot be seen from here"
PROCESSES = Binding.Group("Processes")
COLUMNS = (
    Column("PID", 8, right=True, order="pid"),
    Column("USER", 9, drop=2, order="user"),
    Column("GPU", 5, drop=4, order="GPU"),
    Column("TYPE", 5, drop=8, order="type"),
    Column("MEMORY", 9, right=True, order="memory"),
    Column("SM", 4, right=True, drop=1, order="SM"),
    Column("MEM BW", 7, right=True, drop=9, order="memory bandwidth"),
    Column("ENC", 4, right=True, drop=10, order="encoder"),
    Column("DEC", 4, right=True, drop=10, order="decoder"),
    Column("CPU", 5, right=True, drop=3, order="CPU"),
    Column("HOST MEM", 9, right=True, drop=6, order="host memory"),
    Column("%MEM", 5, right=True, drop=7, order="host memory"),
    Column("TIME", 8, right=True, drop=5, order="run time"),
    Column("COMMAND", 24, grow=True, order="command"),
)
_NARROW, _WIDE = 36, 100  # minimum and maximum cells for a GPU's meters, if there are several GPUs
_NAME_OF_GPU = 7


class ProcessTable(KeyedTable):
    """Shows processes, jobs with their ranks folded, and parent processes; row keys are `ProcessRow.key`."""

    BINDINGS = [
        Binding("right,l", "shift(1)", "More", show=False, id="processes.more", group=PROCESSES,
                tooltip="Show the part of long commands further right"),
        Binding("left,h", "shift(-1)", "Back", show=False, id="processes.less", group=PROCESSES,
                tooltip="Show the part of long commands further left"),
    ]  # fmt: skip
    can_shift = True

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(COLUMNS, id=id)
        self.entries: dict[str, ProcessRow] = {}

    def show_entries(
        self, entries: Sequence[ProcessRow], nothing: str, marked: Container[Hashable] = frozenset()
    ) -> None:
        """Show the rows; `nothing` explains why there are none, and `marked` contains the keys of marked processes."""
        self.empty = nothing
        self.entries = {entry.key: entry for entry in entries}
        now = time.time()
        self.show_rows([_row(entry, now, marked=entry.process.key in marked) for entry in entries])

    @property
    def selected(self) -> ProcessRow | None:
        """The row under the cursor."""
        return self.entries.get(self.cursor) if self.cursor is not None else None


def _row(entry: ProcessRow, now: float, *, marked: bool) -> Row:
    process = entry.process
    text, style = describe(entry)
    values = [""] * (len(COLUMNS) - 3) if entry.is_parent else _values(process, now)
    pid = str(process.pid) if process.pid else ""
    return Row(
        entry.key,
        (
            (f"{MARK if marked else ''}{pid}", "accent" if marked else "label"),
            (process.user or UNKNOWN, "dim" if entry.is_parent else "text"),
            *((value, "text") for value in values),
            (f"{'  ' * entry.depth}{text}", style),
        ),
    )


def _values(process: ProcessDetails, now: float) -> list[str]:
    """Return the cells between user and command."""
    return [
        ranges(process.gpus).replace(" ", ""),
        process.kind or UNKNOWN,
        gibibytes(process.memory_used_bytes),
        percent(process.sm_percent),
        percent(process.bandwidth_percent),
        percent(process.encoder_percent),
        percent(process.decoder_percent),
        percent(process.cpu_percent),
        gibibytes(process.host_memory_bytes),
        percent(process.host_memory_percent),
        duration(None if process.started is None else max(0.0, now - process.started)),
    ]


def describe(entry: ProcessRow) -> tuple[str, str]:
    """Return a description of the row, with its style."""
    process = entry.process
    if entry.job and entry.n_below:
        sign = "▾" if entry.is_open else "▸"
        what = "rank" if entry.groups_ranks else "process"
        return f"{sign} job {entry.job.id}, {plural(entry.n_below, what)}: {entry.job.name}", "good"
    if entry.job and not entry.is_parent:
        if entry.rank is None:
            return f"job {entry.job.id}: {entry.process.command or entry.job.name}", "good"
        # The name comes last because a narrow column truncates the end.
        return f"rank {entry.rank} of job {entry.job.id}: {entry.job.name}", "good"
    text = f"[{process.container}] " if process.container else ""
    if entry.is_parent:
        return f"{text}{process.command or UNKNOWN}", "dim"
    if process.command is None:
        return f"{text}{UNSEEN}", "dim"
    return f"{text}{process.command}", "title"


class GpuMeters(LineView):
    """Shows the utilisation and memory of each GPU on a short line, or of several GPUs side by side."""

    def show_gpus(self, samples: Sequence[GpuSample], most_rows: int) -> None:
        """Draw as many GPUs as fit into `most_rows` rows; the last cell shows how many are left out."""
        rows = fold_withheld([GpuRow(sample, "", "", lambda *_: ()) for sample in samples])
        most_rows = max(1, most_rows)
        wanted = max(-(-len(rows) // most_rows), self.width // _WIDE)
        n_columns = max(1, min(wanted, self.width // _NARROW))
        width, n_cells = self.width // n_columns, n_columns * most_rows
        n_shown = len(rows) if len(rows) <= n_cells else n_cells - 1
        cells = [_meters(row, width) for row in rows[:n_shown]]
        if n_shown < len(rows):
            cells.append(fill(((f" and {plural(len(rows) - n_shown, 'more GPU')}", "dim"),), width))
        # Arrange the cells from top to bottom, then from left to right.
        n_rows = -(-len(cells) // n_columns)
        self.show([tuple(span for cell in cells[row::n_rows] for span in cell) for row in range(n_rows)])


def _meters(row: GpuRow, width: int) -> Line:
    """Return the meters of a GPU in `width` cells."""
    name = (fit(f" GPU {row.sample.index}", _NAME_OF_GPU), "label")
    if not row.sample.healthy:
        fault, style = row.fault
        return (name, (fit(f" {fault}", width - _NAME_OF_GPU), style))
    shown = [(column, column.meter) for column in (UTILIZATION, MEMORY) if column.meter]
    bar_width = max(0, (width - _NAME_OF_GPU - sum(column.width + 2 for column, _ in shown)) // len(shown))
    spans: list[Span] = [name]
    for column, meter in shown:
        text, style = column.cell(row)
        spans += [*meter_bar(row, meter, bar_width), (fit(text, column.width) + " ", style)]
    return fill(tuple(spans), width)


def process_name(process: ProcessDetails) -> str:
    """Return text like `process 4242 of ada (python train.py)`, for a question about the process."""
    owner = f" of {process.user}" if process.user else ""
    command = process.command or ""
    short = command if len(command) <= 60 else f"{command[:59]}…"
    return f"process {process.pid}{owner}{f' ({short})' if short else ''}"
