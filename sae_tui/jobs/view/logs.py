"""Follows a job's logs for the screen: reads the existing lines first, then new lines as they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.output import kind_of
from trainer.contract.paths import RunPaths
from trainer.contract.store.rows import Job

POLL_S = 0.25
AGAIN_S = 5.0  # The pause before retrying after an error.
FIRST_LINES = 20_000
EVALUATION = "evaluation"


class LogLine(msgspec.Struct, frozen=True):
    """A log line and its source: "0" for rank 0, "supervisor" or "evaluation".

    An unfinished line, such as a progress bar, is replaced by the next line from its source; "" removes it.
    """

    source: str
    text: str
    is_unfinished: bool = False


def log_sources(paths: RunPaths, world_size: int) -> dict[str, Path]:
    """Return a dict mapping each log's name to its path.

    Logs that do not exist yet are included, except the evaluation log.
    """
    logs = {str(rank): paths.log(rank) for rank in range(world_size)} | {"supervisor": paths.supervisor_log}
    return logs | ({EVALUATION: paths.evaluation_log} if paths.evaluation_log.exists() else {})


def n_logs_of(job: Job) -> int:
    """Return the number of a job's own logs: one per rank; a command has one, however many GPUs it uses."""
    return 1 if kind_of(job.config).is_program else job.world_size


class LogReader:
    """Reads the logs on a separate thread so that an unresponsive file server does not block the app."""

    def __init__(self, sources: dict[str, Path], on_lines: Callable[[Sequence[LogLine]], object]) -> None:
        self._sources, self._on_lines = sources, on_lines
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            except Exception as error:
                # This thread must survive every log or disk error.
                self._on_lines((LogLine("supervisor", f"(the logs cannot be read: {error!r})"),))
                self._stopped.wait(AGAIN_S)

    def _follow(self) -> None:
        """Pass existing and new lines to `on_lines` until the reader is stopped."""
        ends = {name: LogFollower.from_end(path, FIRST_LINES) for name, path in self._sources.items()}
        followers = {name: follower for name, (_, follower) in ends.items()}
        shown = dict.fromkeys(followers, "")
        lines = [LogLine(name, text) for name, (texts, _) in ends.items() for text in texts]
        lines += _unfinished(followers, shown)
        if not lines and not self._stopped.is_set():
            # An empty list of lines reports that the logs are empty.
            self._on_lines(())
        while not self._stopped.is_set():
            if lines:
                self._on_lines(lines)
            self._stopped.wait(POLL_S)
            lines = [LogLine(name, text) for name, follower in followers.items() for text in follower.new_lines()]
            lines += _unfinished(followers, shown)


def _unfinished(followers: Mapping[str, LogFollower], shown: dict[str, str]) -> list[LogLine]:
    """Return the unfinished lines that have changed, and record them in `shown`."""
    now = {name: follower.unfinished for name, follower in followers.items()}
    changed = [LogLine(name, text, is_unfinished=True) for name, text in now.items() if text != shown[name]]
    shown.update(now)
    return changed
