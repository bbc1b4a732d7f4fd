"""Writes what a run leaves at its end, and waits for space where the disk is full: the weights are whole in memory."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.checkpoints.atomic_folder import NoRoomError
from trainer.contract.errors import UserError
from trainer.contract.paths import data_dir
from trainer.contract.store.metrics_store import WAITING
from trainer.contract.wording import join_words
from trainer.parallel.base import Parallel
from trainer.reporting import rank_log
from trainer.reporting.report import Report

# A failed write is tried again so much later, and given up after a day.
RETRY_S = 30.0
GIVE_UP_S = 24 * 3600.0


class Write(NamedTuple):
    """Something to write at the end of a run: where to, and what does it; an SAE can be written `to` any folder."""

    folder: Path
    write: Callable[[], object]
    to: Callable[[Path], object] | None = None


class FinalWrites:
    """Writes on every rank what is its own to write; all ranks call it alike, and wait for each other.

    An SAE that its own disk does not take is put on another one until then.
    """

    def __init__(
        self, parallel: Parallel, report: Report, stop: threading.Event, beat: Callable[[str], object]
    ) -> None:
        self._parallel, self._report, self._stop, self._beat = parallel, report, stop, beat
        # Folders of SAEs on another disk, by where they belong.
        self._rescued: dict[Path, Path] = {}
        self._failed: list[UserError | OSError] = []
        self._has_told = False

    def write(self, writes: Sequence[Write]) -> None:
        """Write everything; wait up to a day for space, or until a stop is asked for.

        Raise `UserError` on the ranks that could not write something in the end, once all else is written.
        """
        until = time.monotonic() + GIVE_UP_S
        waiting = self._attempt(writes)
        for one in waiting:
            self._rescue(one)
        while self._goes_on(bool(waiting), is_over=self._stop.is_set() or time.monotonic() > until):
            if waiting:
                self._wait()
                waiting = self._attempt(list(waiting))
        if errors := [*waiting.values(), *self._failed]:
            raise self._last_word(errors[0], is_stopped=bool(waiting) and self._stop.is_set())

    def _attempt(self, writes: Sequence[Write]) -> dict[Write, NoRoomError]:
        """Try all writes, and return those for which there was no room."""
        waiting: dict[Write, NoRoomError] = {}
        for one in writes:
            try:
                one.write()
            except NoRoomError as error:
                waiting[one] = error
                self._tell(error)
            except (UserError, OSError) as error:
                self._failed.append(error)
            else:
                self._forget_rescued(one.folder)
        return waiting

    def _goes_on(self, is_waiting: bool, *, is_over: bool) -> bool:
        """Tell on all ranks whether any of them waits, and none has to end."""
        counts = torch.tensor([float(is_waiting), float(is_over)], device=self._parallel.device)
        self._parallel.world.sum_(counts)
        n_waiting, n_over = counts.tolist()
        return n_waiting > 0 and not n_over

    def _wait(self) -> None:
        self._beat(WAITING)
        self._stop.wait(RETRY_S)
        self._beat("saving")

    def _tell(self, error: NoRoomError) -> None:
        message = f"{WAITING}: {error}"
        rank_log.say(message)
        # Later attempts mostly say the same of other numbers.
        if not self._has_told:
            self._has_told = True
            self._report.event("space", message, level="warning")

    # an SAE on another disk

    def _rescue(self, one: Write) -> None:
        """Write an SAE to another disk, and say where it is; do nothing where none takes it."""
        for place in _other_places(one.folder) if one.to else ():
            if rescued := _written_to(place, one):
                self._rescued[one.folder] = rescued
                message = f"{one.folder} waits for space; until then its SAE is in {rescued}"
                rank_log.say(message)
                self._report.event("space", message, level="warning")
                return

    def _forget_rescued(self, folder: Path) -> None:
        if rescued := self._rescued.pop(folder, None):
            shutil.rmtree(rescued.parent, ignore_errors=True)
            message = f"there is space again: the SAE is in {folder}, and its copy in {rescued} is removed"
            rank_log.say(message)
            self._report.event("space", message)

    def _last_word(self, error: UserError | OSError, *, is_stopped: bool) -> UserError:
        stopped = "a stop was asked for before there was space: " if is_stopped else ""
        places = join_words([str(rescued) for rescued in self._rescued.values()]) if self._rescued else ""
        return UserError(f"{stopped}{error}" + (f"; what was trained is in {places}" if places else ""))


def _written_to(place: Path, one: Write) -> Path | None:
    """Write an SAE to a new folder in another place, and return it; None where that does not take it."""
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
    """Yield folders on other disks than this one's, the most lasting first."""
    while not folder.exists():
        folder = folder.parent
    seen = {folder.stat().st_dev}
    for place in (data_dir().root, Path(tempfile.gettempdir()), Path("/dev/shm")):
        if place.is_dir() and (disk := place.stat().st_dev) not in seen:
            seen.add(disk)
            yield place
