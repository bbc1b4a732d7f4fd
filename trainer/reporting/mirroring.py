"""Sends a run's metrics to other tools, in one thread per tool; a failing tool is reported and dropped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.series import PER_RANK
from trainer.contract.store.metrics_store import MetricRow
from trainer.reporting.backlog import Backlog
from trainer.reporting.mirrors.base import Mirror, MirroredRun, mirrored_run
from trainer.reporting.progress import MOST_ROWS, RunProgress

HAND_OVER_S = 2.0
# The maximum delay, in seconds, that a tool's uploads may cause at the end of a run.
CLOSE_S = 20.0
# Reports a message with the given level.
Tell = Callable[[str, str], None]


class MirroredProgress(RunProgress):
    """Passes all reports to `stored` and also sends metrics to the mirrors."""

    def __init__(self, stored: RunProgress, mirrors: Sequence[MirrorThread]) -> None:
        super().__init__()
        self._stored, self._mirrors = stored, mirrors

    def rows(self, rows: Iterable[MetricRow]) -> None:
        rows = list(rows)
        self._stored.rows(rows)
        for mirror in self._mirrors:
            mirror.add(rows)

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        super().heartbeat(phase, step, tokens)
        self._stored.heartbeat(phase, step, tokens)

    def shorten(self, total_steps: int) -> None:
        self._stored.shorten(total_steps)

    def event(self, kind: str, message: str, level: str = "info") -> None:
        self._stored.event(kind, message, level)

    def settle(self) -> None:
        self._stored.settle()

    def close(self) -> None:
        """Write the remaining reports; take at most `CLOSE_S` longer than the store."""
        until = time.monotonic() + CLOSE_S
        for mirror in self._mirrors:
            mirror.end()
        for mirror in self._mirrors:
            mirror.wait(until)
        self._stored.close()


def with_mirrors(progress: RunProgress, job: JobConfig, folder: Path, first_step: int) -> RunProgress:
    """Return a `RunProgress` that also sends metrics to the job's mirrors, or `progress` itself if there are none."""

    def tell(message: str, level: str) -> None:
        progress.event("mirror", message, level)

    if not job.train.mirrors:
        return progress
    try:
        run = mirrored_run(job, folder, first_step)
    except (OSError, UserError) as error:
        tell(f"the metrics are not sent to other tools: {error}", "warning")
        return progress
    return MirroredProgress(progress, [MirrorThread(name, run, tell) for name in job.train.mirrors])


class MirrorThread:
    """A thread that opens a run's mirror when the first rows arrive and sends all rows to the mirror.

    Before the first rows, the main thread may still be importing modules that the mirror's library also imports.
    """

    def __init__(self, name: str, run: MirroredRun, tell: Tell) -> None:
        self._name, self._run, self._tell = name, run, tell
        self._dealer = Dealer(list(run.settings))
        self._rows: Backlog[MetricRow] = Backlog(MOST_ROWS)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"mirror {name}", daemon=True)
        self._thread.start()

    def add(self, rows: Iterable[MetricRow]) -> None:
        if self._thread.is_alive():
            self._rows.add(rows)

    def end(self) -> None:
        self._is_over.set()

    def wait(self, until: float) -> None:
        """Wait until all rows are sent and the mirror is closed, but not beyond `until`, a `time.monotonic` value."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._tell(
                f"{self._name} may lack some metrics, since it did not accept all of them within {CLOSE_S:g} s after "
                "the end of the run",
                "warning",
            )

    def _live(self) -> None:
        try:
            self._follow()
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._tell(f"{self._name} receives no further metrics: {reason}", "warning")

    def _follow(self) -> None:
        while not self._rows:
            if self._is_over.wait(HAND_OVER_S / 4) and not self._rows:
                return
        chosen: type[Mirror] = catalog.entry(catalog.MIRRORS, self._name, "train.mirror").load()
        mirror = chosen(self._run)
        self._tell(f"the metrics are also sent to {self._name}: {mirror.place}", "info")
        with contextlib.closing(mirror):
            while not self._is_over.wait(HAND_OVER_S):
                self._hand_over(mirror)
            self._hand_over(mirror)

    def _hand_over(self, mirror: Mirror) -> None:
        for (label, step), values in self._dealer.out(self._rows.take(MOST_ROWS)).items():
            mirror.log(label, step, values)
        mirror.flush()


class Dealer:
    """Groups rows by SAE. A run that is not a sweep has one SAE, with the label ""."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._of_saes: set[str] = set()

    def out(self, rows: Iterable[MetricRow]) -> dict[tuple[str, int], dict[str, float]]:
        """Return a dict mapping each (label, step) to its values; values for the entire run are added to every SAE."""
        values: dict[tuple[str, int], dict[str, float]] = {}
        for row in rows:
            name, _, label = row.name.partition("@")
            for owner in self._owners(name, label):
                values.setdefault((owner, row.step), {})[f"{name}/{row.rank}" if name in PER_RANK else name] = row.value
        return values

    def _owners(self, name: str, label: str) -> Sequence[str]:
        if label:
            self._of_saes.add(name)
            return [label]
        # In a sweep, the first SAE's values are also reported without a label, so drop values without a label.
        return [] if name in self._of_saes else self._labels
