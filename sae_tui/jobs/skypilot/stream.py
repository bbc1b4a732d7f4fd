"""Prints a run's progress and log on a rented machine, for the app that launched the machine.

`python -m sae_tui.jobs.skypilot.stream JOB.toml RUN_DIR` prints until its standard input is closed. SkyPilot shows the
machine's output to the app, so that no port and no second connection is needed. Each line for the app's store begins
with a mark; all other lines are the log.
"""

from __future__ import annotations

import contextlib
import math
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.skypilot.task import MARK
from trainer.contract.errors import UserError
from trainer.contract.output import show_text
from trainer.contract.paths import RunPaths
from trainer.contract.planning.stored_extraction import n_stored_rows
from trainer.contract.runs.checkpoint_manifest import newest_whole, position_of
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import load_any
from trainer.contract.store.database import StoreError
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.metrics_store import FINISHED, TRAINING, Heartbeat, MetricRow, SeriesReader
from trainer.contract.store.progress_line import ProgressLine, encode, stored_rows
from trainer.contract.store.rows import Event

EVERY_S = 2.0
# The number of values in a line: SkyPilot passes lines on as text, and long lines are slow.
_MOST_ROWS = 200


class RentedProgress:
    """What a training run has written to its store since the last call."""

    def __init__(self, run_dir: Path) -> None:
        self._paths = RunPaths(run_dir)
        self._follower = StoreFollower(self._paths.metrics_db, SeriesReader)
        self._sent: dict[tuple[str, int], int] = {}
        self._events: set[Event] = set()
        self._restarts: tuple[int, int] | None = None

    def lines(self) -> list[ProgressLine]:
        """Return lines with everything new."""
        found: list[ProgressLine] = []
        with contextlib.suppress(StoreError):
            self._follower.poll(lambda reader: found.extend(self._read(reader)))
        return found

    def _read(self, reader: SeriesReader | None) -> list[ProgressLine]:
        if reader is None:
            return []
        lines, rows = [], []
        if self._restarts != (restarts := reader.restarts()):
            # The app's store may contain later steps, which were lost with an earlier machine.
            self._restarts, self._sent = restarts, {}
            lines.append(ProgressLine(rewind=_begins_at(self._paths)))
        for name, rank in reader.series():
            points = reader.points(name, rank, after=self._sent.get((name, rank), -1))
            rows += [MetricRow(name, at.step, math.nan if at.value is None else at.value, rank) for at in points]
            if points:
                self._sent[name, rank] = points[-1].step
        lines += [ProgressLine(stored_rows(rows[at : at + _MOST_ROWS])) for at in range(0, len(rows), _MOST_ROWS)]
        events = [event for event in reader.events() if event not in self._events]
        self._events |= {*events}
        return [*lines, ProgressLine(heartbeat=reader.heartbeat(), events=tuple(events))]


class Rows:
    """How many rows an extraction has stored."""

    def __init__(self, job: ExtractJob) -> None:
        self._job, self._sent = job, -1

    def lines(self) -> Iterator[ProgressLine]:
        """Yield a line if the number has changed."""
        total, n_rows = self._job.extract.n_tokens, n_stored_rows(self._job)
        if n_rows != self._sent:
            self._sent = n_rows
            phase = FINISHED if n_rows >= total else TRAINING
            yield ProgressLine(heartbeat=Heartbeat(phase, n_rows, total, n_rows, time.time()))


def _begins_at(paths: RunPaths) -> Heartbeat:
    with contextlib.suppress(UserError, OSError):
        if checkpoint := newest_whole(paths.checkpoints):
            at = position_of(checkpoint)
            return Heartbeat("resuming", at.step, 0, at.tokens, time.time())
    return Heartbeat("starting", 0, 0, 0, time.time())


def stream(job: AnyJob, run_dir: Path) -> None:
    """Print progress and the first rank's log until standard input is closed, and then once more."""
    progress = Rows(cast(ExtractJob, job)) if job.writes_rows else RentedProgress(run_dir)
    log = LogFollower(RunPaths(run_dir).log(0), _size(RunPaths(run_dir).log(0)))
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], EVERY_S)[0])
        lines = [*log.new_lines(), *(f"{MARK} {encode(line).decode().strip()}" for line in progress.lines())]
        if lines:
            show_text("\n".join(lines) + "\n")


def _size(file: Path) -> int:
    """Return the size of a log, whose earlier lines were printed before the run was resumed."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def main(arguments: Sequence[str]) -> None:
    job_file, run_dir = map(Path, arguments)
    stream(load_any(job_file), run_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
