"""Reports steps skipped because a gradient is not finite, and stops a run that skips too many steps.

Non-finite rows are replaced before a step, so a non-finite gradient means that training is diverging.
"""

from __future__ import annotations

from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.reporting.report import Report
from trainer.training.learner import Learner, StepState

# The number of consecutive skipped steps after which training is considered to have diverged.
MOST_SKIPPED = 5
# In fp16, some skips only lower the loss scale. The scale starts at 2^15, so halving it more often than this would not
# help.
MOST_SKIPPED_FP16 = 25
OVERFLOWED = "many more latents were active than in earlier steps, more than the buffers hold; training continues"


def is_hopeless(in_a_row: int, learner: Learner) -> bool:
    """Return whether `in_a_row` consecutive skipped steps mean that the SAE's training has diverged."""
    return in_a_row > MOST_SKIPPED_FP16 if learner.has_loss_scale else in_a_row >= MOST_SKIPPED


class Skips:
    """Reports skipped steps; `given_up` contains the labels of diverged SAEs, while other SAEs are still learning."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.given_up: set[str] = set()

    def look_at(self, label: str, learner: Learner, state: StepState, now: Position) -> None:
        """Report the steps skipped up to the position `now`; raise `UserError` if no SAE is still learning."""
        skipped, in_a_row = state.skipped, state.skipped_in_a_row
        ends = is_hopeless(in_a_row, learner)
        if state.overflowed:
            self._report.event(
                "skipped", f"{state.overflowed} steps skipped up to step {now.step}: {OVERFLOWED}", label
            )
        n_bad = skipped - state.overflowed
        if not n_bad or (learner.has_loss_scale and not ends):
            return
        if ends:
            self._give_up(label, learner, f"{in_a_row} steps in a row up to step {now.step}")
        else:
            reason = "the gradient was not finite"
            self._report.event("skipped", f"{n_bad} steps skipped up to step {now.step}: {reason}", label)

    def _give_up(self, label: str, learner: Learner, when: str) -> None:
        """Give up on an SAE; raise `UserError` if no SAE is still learning."""
        narrow = ', or train.precision = "fp32", whose range is wider' if learner.has_loss_scale else ""
        cure = f"choose a lower rate{narrow}"
        where = "train.lr: the gradient is not finite"
        if self._report.values.keys() <= self.given_up | {label}:
            raise UserError(f"{where}, {when}; {cure}")
        if label not in self.given_up:
            self.given_up.add(label)
            self._report.event("given_up", f"{where}, {when}; {cure}", label)

    def end_where_none_learns(self) -> None:
        """Raise `UserError` if all SAEs on all ranks have been given up on."""
        if self._report.values.keys() <= self.given_up:
            raise UserError("train.lr: the gradients of all SAEs are no longer finite; choose a lower rate")
