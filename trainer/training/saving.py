"""When a run saves, and what becomes of a checkpoint that cannot be written."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.checkpoints.checkpoint import Checkpoints
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.job import Train
from trainer.parallel.base import Parallel
from trainer.reporting import rank_log
from trainer.reporting.report import Report
from trainer.training.learner import Learner


class Saving:
    """Every rank has one and asks it alike; rank 0 writes. `saved` is where a resumed run was saved before."""

    def __init__(
        self, train: Train, checkpoints: Checkpoints, parallel: Parallel, report: Report, saved: Position | None
    ) -> None:
        self._train, self._checkpoints = train, checkpoints
        self._parallel, self._report = parallel, report
        self._asked = saved
        self._failures = 0
        self._timer = Timer(train.checkpoint_every_minutes)
        # Whether the ranks have agreed on one by rank 0's clock.
        self.granted = False

    def take_wish(self) -> bool:
        """Whether it is time by this rank's clock; only rank 0's counts."""
        return self._parallel.is_main and self._timer.take_due()

    def is_due(self, position: Position, before: Position) -> bool:
        """At the position, where the step before it ended at `before`; the same on all ranks."""
        steps, tokens = self._train.checkpoint_every, self._train.checkpoint_every_tokens
        by_steps = steps > 0 and position.step % steps == 0
        by_tokens = tokens > 0 and position.tokens // tokens > before.tokens // tokens
        return by_steps or by_tokens or self.granted

    def save(self, learners: Mapping[str, Learner], position: Position) -> None:
        """The last one; raises `UserError` on rank 0 where it cannot be written."""
        if (tensors := self._gathered(learners, position)) is not None:
            self._write(tensors, position)

    def try_save(self, learners: Mapping[str, Learner], position: Position) -> None:
        """One of many: where it cannot be written that is told, and training goes on until the next one is due."""
        if (tensors := self._gathered(learners, position)) is None:
            return
        try:
            self._write(tensors, position)
        except (UserError, OSError) as error:
            self._tell_failure(error)

    def has_failed_anywhere(self) -> bool:
        """Whether the newest checkpoint is missing; all ranks have to ask, and wait until rank 0 has written."""
        failed = torch.full((1,), float(self._failures > 0), device=self._parallel.device)
        self._parallel.world.sum_(failed)
        return bool(failed)

    def _gathered(self, learners: Mapping[str, Learner], position: Position) -> dict[str, Tensor] | None:
        """What to write, on rank 0; None elsewhere, and where that was done at this position already."""
        self._timer.restart()
        if self._asked == position:
            return None
        self._asked = position
        tensors = {label: learner.collected() or {} for label, learner in learners.items()}
        whole = self._parallel.collected(
            {f"{label}/{name}": one for label, found in tensors.items() for name, one in found.items()}
        )
        return whole if self._parallel.is_main else None

    def _write(self, tensors: Mapping[str, Tensor], position: Position) -> None:
        folder = self._checkpoints.save(tensors, position, self._report.mean("heldout_fvu"))
        after = f", the first after {self._failures} that could not be written" if self._failures else ""
        self._failures = 0
        self._report.event("checkpoint", f"checkpoint saved at step {position.step}{after}")
        rank_log.say(f"checkpoint saved: {folder}")

    def _tell_failure(self, error: Exception) -> None:
        self._failures += 1
        rank_log.say(f"{error}; training goes on")
        # Those that follow say the same.
        if self._failures == 1:
            self._report.event("checkpoint", f"{error}; training goes on until the next one is due", level="error")


class Timer:
    """Minutes since the last save; 0 for never."""

    def __init__(self, every_minutes: float) -> None:
        self._every_s = 60 * every_minutes
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    def take_due(self) -> bool:
        """Whether it is time; told once, since a wish can take a step to be granted."""
        is_due = self._every_s > 0 and time.monotonic() - self._since >= self._every_s
        if is_due:
            self.restart()
        return is_due
