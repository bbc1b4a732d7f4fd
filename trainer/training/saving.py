"""Decides when a run saves checkpoints, writes them, and handles failed writes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.training_data import TrainingData
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import NONE_HALVED, Best, BufferPlace, CheckpointState, Position
from trainer.contract.settings.job import Train
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.settings.series import CRITERION, held_out
from trainer.parallel.base import Parallel
from trainer.reporting import rank_log
from trainer.reporting.report import Report
from trainer.training.final_writes import Write
from trainer.training.learner import Learner

# The maximum fraction of a run's time to spend on checkpoints saved at the best held-out FVU, in addition to the
# configured checkpoints.
BEST_SHARE = 0.02
# The assumed duration of the first save, in seconds.
FIRST_SAVE_S = 1.0


class _Whole(NamedTuple):
    """The state to save, gathered from all ranks."""

    tensors: dict[str, Tensor]
    stream: list[BufferPlace] | msgspec.UnsetType


class Saving:
    """Decides when to save, and saves; all ranks make the same calls, and rank 0 writes.

    `saved` is the position of the checkpoint from which the run was resumed, or None.
    """

    def __init__(
        self,
        train: Train,
        checkpoints: Checkpoints,
        parallel: Parallel,
        report: Report,
        data: TrainingData,
        saved: Position | None,
    ) -> None:
        self._train, self._checkpoints, self._data = train, checkpoints, data
        self._parallel, self._report = parallel, report
        self._asked = saved
        self._failures = 0
        self._wants_best, self._save_s = False, FIRST_SAVE_S
        self._timer = Timer(train.saves_every_minutes)
        # Whether the ranks have agreed to a save that rank 0 requested.
        self.granted = False
        # Values stored in checkpoints along with the weights, for resumed runs.
        self.cool_down: CoolDown | None = None
        self.best: Best | None = None
        self.halved = NONE_HALVED
        # Called on rank 0 after each save.
        self.on_saved: Callable[[], object] = lambda: None

    def take_request(self) -> bool:
        """Return and clear the pending save request, if the timer or a new best FVU has caused one on rank 0."""
        wants, self._wants_best = self._wants_best, False
        return self._parallel.is_main and (self._timer.take_due() or wants)

    def measured(self, best: Best, passes: float | None, took_s: float) -> None:
        """Record a held-out FVU; if it is the run's lowest so far and a checkpoint is worthwhile, request a save.

        A checkpoint is worthwhile if the run repeats rows, so that the FVU may rise later, and if the measurement plus
        the save take at most `BEST_SHARE` of the time since the last save.
        """
        if not math.isfinite(best.fvu) or (self.best and self.best.fvu <= best.fvu):
            return
        self.best = best
        is_cheap = took_s + self._save_s <= BEST_SHARE * self._timer.elapsed_s
        self._wants_best = passes is not None and passes > 1 and is_cheap

    def folder(self, position: Position) -> Path:
        """Return the checkpoint folder for a position."""
        return self._checkpoints.folder(position)

    def best_saved(self) -> CheckpointState | None:
        """Return the state of the saved checkpoint with the lowest held-out FVU on rank 0, or None."""
        return self._checkpoints.best()

    def is_due(self, position: Position, before: Position) -> bool:
        """Return whether to save at `position`, one step after `before`; the result is the same on all ranks."""
        steps, tokens = self._train.checkpoint_every, self._train.checkpoint_every_tokens
        by_steps = steps > 0 and position.step % steps == 0
        by_tokens = tokens > 0 and position.tokens // tokens > before.tokens // tokens
        return by_steps or by_tokens or self.granted

    def save(self, learners: Mapping[str, Learner], position: Position) -> None:
        """Save a checkpoint; raise `UserError` on rank 0 if it cannot be written."""
        if (whole := self._gather(learners, position)) is not None:
            self._write(whole, position)

    def last(self, learners: Mapping[str, Learner], position: Position) -> list[Write]:
        """Return the `Write` for the last checkpoint, or [] on ranks other than 0 or if the checkpoint exists."""
        whole = self._gather(learners, position)
        return [] if whole is None else [Write(self.folder(position), partial(self._write, whole, position))]

    def try_save(self, learners: Mapping[str, Learner], position: Position) -> None:
        """Save an intermediate checkpoint; if it cannot be written, report the error and let training continue."""
        if (whole := self._gather(learners, position)) is None:
            return
        try:
            self._write(whole, position)
        except (UserError, OSError) as error:
            self._tell_failure(error)

    def has_failed_anywhere(self) -> bool:
        """Wait until rank 0 has written, and return whether the last save failed; all ranks must call this."""
        failed = torch.full((1,), float(self._failures > 0), device=self._parallel.device)
        self._parallel.world.sum_(failed)
        return bool(failed)

    def _gather(self, learners: Mapping[str, Learner], position: Position) -> _Whole | None:
        """Return the state to write on rank 0; None on other ranks, or if this position has already been saved."""
        self._timer.restart()
        self._wants_best = False
        if self._asked == position:
            return None
        self._asked = position
        tensors = {label: learner.state.collect() or {} for label, learner in learners.items()}
        whole = self._parallel.collect(
            {f"{label}/{name}": one for label, of_sae in tensors.items() for name, one in of_sae.items()}
        )
        places = self._data.stream_places()
        return _Whole(whole, places) if self._parallel.is_main else None

    def _write(self, whole: _Whole, position: Position) -> None:
        criterion, began = self._report.mean(held_out(CRITERION)), time.monotonic()
        key, unset = self._data.held_out_key(), msgspec.UNSET
        folder = self._checkpoints.save(
            whole.tensors,
            position,
            criterion,
            whole.stream,
            key,
            self.cool_down or unset,
            self.best or unset,
            self.halved,
        )
        after = f", the first after {self._failures} that could not be written" if self._failures else ""
        self._failures, self._save_s = 0, time.monotonic() - began
        self._report.event("checkpoint", f"checkpoint saved at step {position.step}{after}")
        rank_log.say(f"checkpoint saved: {folder}")
        self.on_saved()

    def _tell_failure(self, error: Exception) -> None:
        self._failures += 1
        rank_log.say(f"{error}; training continues")
        # Report only the first failure, since later failures would repeat the message.
        if self._failures == 1:
            self._report.event(
                "checkpoint", f"{error}; training continues until the next checkpoint is due", level="error"
            )


class Timer:
    """Signals when `every_minutes` have passed since the last save; 0 disables the timer."""

    def __init__(self, every_minutes: float) -> None:
        self._every_s = 60 * every_minutes
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """The number of seconds since the last save."""
        return time.monotonic() - self._since

    def take_due(self) -> bool:
        """Return whether a save is due; if so, restart the timer, since the ranks may need a step to agree to save."""
        is_due = self._every_s > 0 and self.elapsed_s >= self._every_s
        if is_due:
            self.restart()
        return is_due
