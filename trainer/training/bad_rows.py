"""Rows that are not finite: replaced one by one while a run goes on, reported, and too many end it."""

from __future__ import annotations

import math

from trainer.activations.outliers import LeftOut
from trainer.activations.training_data import TrainingData
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.wording import plural
from trainer.reporting.report import Report

# A larger share of rows that are not finite is no accident.
MOST_BAD_ROWS = 0.01
CURE = "extract them again, in bf16 or fp32 if it was fp16"


def too_many(n_bad: int, n_seen: int) -> bool:
    """Tell whether more than `MOST_BAD_ROWS` of all rows must be bad, by those that were read so far.

    Few rows tell little: 4 standard deviations above the share, and 10 rows, are left to chance.
    """
    allowed = MOST_BAD_ROWS * n_seen
    return n_bad > allowed + 4 * math.sqrt(allowed) + 10


class BadRows:
    """Reports the rows of a run that are not finite; the first is named."""

    def __init__(self, data: TrainingData, report: Report, tokens_per_step: int) -> None:
        self._data, self._report, self._tokens_per_step = data, report, tokens_per_step
        # What holds the first one that was read, and in which row; "" before there was one.
        self._first = ""

    def sampled(self, n_bad: int, n_rows: int, first: str, hook: str) -> None:
        """Report those among a first sample of rows, `first` in a sentence; of several hooks, at one."""
        if n_bad:
            self._tell(n_bad, n_rows, "a sample", hook, first)

    def look_at(self, found: LeftOut, since: Position, now: Position, hook: str) -> None:
        """Report those read up to a position, the last between two of them; raise `UserError` where there are too many.

        Ranks that learn the same SAEs call this alike.
        """
        if not found.not_finite:
            return
        if not self._first:
            first = self._data.bad_row(since.tokens, now.tokens, self._tokens_per_step) or "its name is not known"
            self._tell(found.not_finite, found.n_seen, f"the rows up to step {now.step}", hook, first)
        if too_many(found.not_finite, found.n_seen):
            share = f"{found.not_finite:,} of {plural(found.n_seen, 'row')} read so far are not finite"
            raise UserError(f"data.path: {self._first} ({share}); {CURE}")

    def _tell(self, n_bad: int, n_rows: int, of_rows: str, hook: str, first: str) -> None:
        self._first = first
        at = f" at {hook}" if hook else ""
        share = f"{100 * n_bad / n_rows:.2g} % of {of_rows}{at} ({n_bad:,} of {n_rows:,})"
        self._report.warn("not_finite", f"{share} are not finite and are left out: {first}")
