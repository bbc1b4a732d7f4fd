"""Drops the worse SAEs of a sweep while it trains, judged by copies that are cooled down and then discarded.

The copies train on the same batches as the SAEs. They do not affect the SAEs that are kept: these get the same weights
as in a sweep that trains all SAEs to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

from trainer.contract.planning.halving import Contest, Rung, contests_of, rungs_of, survivors
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import Halved
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.store.twins import twins_of
from trainer.contract.wording import join_words
from trainer.training.learner import Learner


class Decision(NamedTuple):
    """A contest's result: the mean FVU of each candidate's copies, lowest first, and the number of candidates kept."""

    fvus: dict[str, float]
    n_kept: int

    @property
    def dropped(self) -> list[str]:
        return [*self.fvus][self.n_kept :]

    @property
    def words(self) -> str:
        """The result in words, like `keeps lr=0.01 (FVU 0.2937), drops lr=0.03 (FVU 0.3139)`."""
        named = [f"{name} (FVU {fvu:.4f})" for name, fvu in self.fvus.items()]
        return f"keeps {join_words(named[: self.n_kept])}, drops {join_words(named[self.n_kept :])}"


class Halving:
    """The contests in a run; without `train.halving`, there are none.

    `done` is stored in checkpoints. `copies` are the learners that are being cooled down, by label.
    """

    def __init__(self, layout: Layout, done: Halved) -> None:
        # The labels name folders, so do not trust a checkpoint's file.
        dropped = {label: step for label, step in done.dropped.items() if label and label in layout.members}
        self.done = Halved(done.n_rungs, dropped)
        self.copies: dict[str, Learner] = {}
        self._total_steps, self._labels = layout.total_steps, [*layout.members]
        self._contests, self._rungs = contests_of(layout), rungs_of(layout)
        self._end = 0

    def stop(self) -> None:
        """Drop no more SAEs."""
        self._contests, self._rungs = [], []
        self.discard()

    def discard(self) -> None:
        """Discard the copies; a comparison that has begun starts again after the next step."""
        self.copies.clear()

    @property
    def competing(self) -> list[str]:
        """The labels of the SAEs whose copies will be compared."""
        return [label for contest in self._open() for labels in contest.values() for label in labels]

    def begins_after(self, step: int) -> bool:
        """Return whether to copy the competing SAEs after `step` steps.

        If a run is resumed during a comparison, the comparison starts again.
        """
        rung = self._next()
        return rung is not None and not self.copies and rung.begin <= step < self._total_steps - rung.length

    def begin(self, step: int, copy_of: Callable[[str], Learner]) -> None:
        """Copy the competing SAEs and start to cool down the copies; `copy_of` returns a copy of an SAE's learner."""
        rung = self._next()
        assert rung is not None
        self._end = step + rung.length
        for label in self.competing:
            self.copies[label] = copy_of(label)
            self.copies[label].cool_down(CoolDown(step, self._end, self._total_steps))

    def ends_after(self, step: int) -> bool:
        """Return whether the copies are cooled down after `step` steps."""
        return bool(self.copies) and step >= self._end

    def decide(self, step: int, fvus: Mapping[str, float]) -> list[Decision]:
        """Discard the copies, note which SAEs are dropped, and return the results; `fvus` are the copies' FVUs."""
        self.copies.clear()
        decisions = [_decision(contest, fvus) for contest in self._open()]
        dropped = dict(self.done.dropped)
        for contest, decision in zip(self._open(), decisions, strict=True):
            for label in (label for name in decision.dropped for label in contest[name]):
                dropped |= dict.fromkeys([label, *twins_of(self._labels, label)], step)
        self.done = Halved(self.done.n_rungs + 1, dropped)
        return decisions

    def _next(self) -> Rung | None:
        """Return the next comparison, or None after the last one."""
        return self._rungs[self.done.n_rungs] if self.done.n_rungs < len(self._rungs) else None

    def _open(self) -> list[Contest]:
        """Return the contests with at least two candidates, without the candidates that have been dropped."""
        left = [
            {name: labels for name, labels in contest.items() if labels[0] not in self.done.dropped}
            for contest in self._contests
        ]
        return [contest for contest in left if len(contest) > 1]


def _decision(contest: Contest, fvus: Mapping[str, float]) -> Decision:
    """Compare the candidates by the mean FVU over their seeds; an FVU that is not finite comes last."""
    means = {name: fmean(fvus[label] for label in labels) for name, labels in contest.items()}
    in_order = sorted(means, key=lambda name: means[name] if math.isfinite(means[name]) else math.inf)
    return Decision({name: means[name] for name in in_order}, survivors(len(contest)))
