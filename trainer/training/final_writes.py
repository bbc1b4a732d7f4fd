"""Writes a run's last checkpoint and SAEs, and waits for space if the disk is full."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.checkpoints.atomic_folder import NoSpaceError
from trainer.contract.errors import UserError
from trainer.contract.paths import box_file
from trainer.contract.store.metrics_store import WAITING
from trainer.contract.wording import join_words
from trainer.parallel.base import Parallel
from trainer.reporting import rank_log
from trainer.reporting.report import Report

# Seconds between attempts to write to a full disk, and seconds until the run gives up.
RETRY_S = 30.0
GIVE_UP_S = 24 * 3600.0


class Write(NamedTuple):
    """A folder to write at the end of a run, and the function that writes it; `to` writes its SAE to another folder."""

    folder: Path
    write: Callable[[], object]
    to: Callable[[Path], object] | None = None


class FinalWrites:
    """Performs each rank's final writes; all ranks call `write` together and wait for each other.

    While an SAE's disk is full, a copy of the SAE is kept on another disk.
    """

    def __init__(
        self, parallel: Parallel, report: Report, stop: threading.Event, heartbeat: Callable[[str], object]
    ) -> None:
        self._parallel, self._report, self._stop, self._heartbeat = parallel, report, stop, heartbeat
        # Maps an SAE's intended folder to the folder that holds its copy on another disk.
        self._rescued: dict[Path, Path] = {}
        self._failed: list[UserError | OSError] = []
        self._has_reported = False

    def write(self, writes: Sequence[Write]) -> None:
        """Perform all writes; if a disk is full, wait for space for up to a day, or until another stop request.

        Raise `UserError` on each rank with a failed write, after all other writes are done.
        """
        was_stopped = self._stop.is_set()
        # The stop request that ended training has been handled, so only a new request ends the wait.
        self._stop.clear()
        try:
            self._write(writes)
        finally:
            if was_stopped:
                self._stop.set()

    def _write(self, writes: Sequence[Write]) -> None:
        until = time.monotonic() + GIVE_UP_S
        waiting = self._attempt(writes)
        for one in waiting:
            self._rescue(one)
        while self._is_waiting(bool(waiting), is_over=self._stop.is_set() or time.monotonic() > until):
            if waiting:
                self._wait()
                waiting = self._attempt(list(waiting))
        if errors := [*waiting.values(), *self._failed]:
            raise self._failure(errors[0], is_stopped=bool(waiting) and self._stop.is_set())

    def _attempt(self, writes: Sequence[Write]) -> dict[Write, NoSpaceError]:
        """Attempt all writes; return a dict mapping each write that did not fit on the disk to its error."""
        waiting: dict[Write, NoSpaceError] = {}
        for one in writes:
            try:
                one.write()
            except NoSpaceError as error:
                waiting[one] = error
                self._report_wait(error)
            except (UserError, OSError) as error:
                self._failed.append(error)
            else:
                self._forget_rescued(one.folder)
        return waiting

    def _is_waiting(self, is_own: bool, *, is_over: bool) -> bool:
        """Return whether any rank is waiting and no rank must give up; the result is the same on all ranks."""
        counts = torch.tensor([float(is_own), float(is_over)], device=self._parallel.device)
        self._parallel.world.sum_(counts)
        n_waiting, n_over = counts.tolist()
        return n_waiting > 0 and not n_over

    def _wait(self) -> None:
        self._heartbeat(WAITING)
        self._stop.wait(RETRY_S)
        self._heartbeat("saving")

    def _report_wait(self, error: NoSpaceError) -> None:
        message = f"{WAITING}: {error}"
        rank_log.say(message)
        # Report only the first message, since later messages differ only in their numbers.
        if not self._has_reported:
            self._has_reported = True
            self._report.event("space", message, level="warning")

    # Copies of SAEs on another disk

    def _rescue(self, one: Write) -> None:
        """Write an SAE to another disk and report its folder; do nothing if no other disk has space."""
        for place in _other_places(one.folder) if one.to else ():
            if rescued := _written_to(place, one):
                self._rescued[one.folder] = rescued
                message = f"waiting for disk space to write {one.folder}; until then, its SAE is in {rescued}"
                rank_log.say(message)
                self._report.event("space", message, level="warning")
                return

    def _forget_rescued(self, folder: Path) -> None:
        if rescued := self._rescued.pop(folder, None):
            shutil.rmtree(rescued.parent, ignore_errors=True)
            message = f"there is enough disk space again: the SAE is in {folder}, and its copy in {rescued} was removed"
            rank_log.say(message)
            self._report.event("space", message)

    def _failure(self, error: UserError | OSError, *, is_stopped: bool) -> UserError:
        stopped = "stopped before there was enough disk space: " if is_stopped else ""
        places = join_words([str(rescued) for rescued in self._rescued.values()]) if self._rescued else ""
        return UserError(f"{stopped}{error}" + (f"; the trained SAE is in {places}" if places else ""))


def _written_to(place: Path, one: Write) -> Path | None:
    """Write an SAE to a new folder in `place`; return the folder, or None if that fails."""
    assert one.to is not None
    try:
        made = Path(tempfile.mkdtemp(prefix=f"sae-of-{one.folder.parent.name}-", dir=place))
    except OSError:
        return None
    try:
        one.to(made / "sae")
    except (UserError, OSError):
        shutil.rmtree(made, ignore_errors=True)
        return None
    return made / "sae"


def _other_places(folder: Path) -> Iterator[Path]:
    """Yield folders that are not on the disk of `folder`, the most permanent disk first."""
    while not folder.exists():
        folder = folder.parent
    seen = {folder.stat().st_dev}
    box = box_file()
    for place in (*([box.parent] if box else []), Path(tempfile.gettempdir()), Path("/dev/shm")):
        if place.is_dir() and (disk := place.stat().st_dev) not in seen:
            seen.add(disk)
            yield place
