"""The table of processes on GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sae_tui.format import UNKNOWN, duration, gibibytes, percent
from sae_tui.gpu.processes import ProcessDetails
from sae_tui.jobs.view.processes import ProcessRow
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract.wording import plural

UNSEEN = "cannot be seen from here"


class ProcessTable(KeyedTable):
    """Shows processes, jobs with their ranks folded, and parent processes; row keys are `ProcessRow.key`."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        columns = (
            Column("PID", 8, right=True),
            Column("USER", 10),
            Column("GPU", 7, drop=4),
            Column("MEMORY", 9, right=True),
            Column("SM", 5, right=True),
            Column("CPU", 6, right=True, drop=1),
            Column("HOST MEM", 9, right=True, drop=2),
            Column("TIME", 8, right=True, drop=3),
            Column("COMMAND", 10, grow=True),
        )
        super().__init__(columns, id=id)
        self.entries: dict[str, ProcessRow] = {}

    def show_entries(self, entries: Sequence[ProcessRow], nothing: str) -> None:
        """Show the rows; `nothing` explains why there are none."""
        self.empty = nothing
        self.entries = {entry.key: entry for entry in entries}
        now = time.time()
        self.show_rows([_row(entry, now) for entry in entries])

    @property
    def selected(self) -> ProcessRow | None:
        """The row under the cursor."""
        return self.entries.get(self.cursor) if self.cursor is not None else None


def _row(entry: ProcessRow, now: float) -> Row:
    process = entry.process
    text, style = describe(entry)
    if entry.is_parent:
        cells = [("", "text")] * 6
    else:
        cells = [
            (",".join(map(str, process.gpus)), "text"),
            (gibibytes(process.memory_used_bytes), "text"),
            (percent(process.sm_percent), "text"),
            (percent(process.cpu_percent), "text"),
            (gibibytes(process.host_memory_bytes), "text"),
            (duration(None if process.started is None else max(0.0, now - process.started)), "text"),
        ]
    pid = str(process.pid) if process.pid else ""
    return Row(
        entry.key,
        (
            (pid, "label"),
            (process.user or UNKNOWN, "dim" if entry.is_parent else "text"),
            *cells,
            (f"{'  ' * entry.depth}{text}", style),
        ),
    )


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


def process_name(process: ProcessDetails) -> str:
    """Return text like `process 4242 of ada (python train.py)`, for a question about the process."""
    owner = f" of {process.user}" if process.user else ""
    command = process.command or ""
    short = command if len(command) <= 60 else f"{command[:59]}…"
    return f"process {process.pid}{owner}{f' ({short})' if short else ''}"
