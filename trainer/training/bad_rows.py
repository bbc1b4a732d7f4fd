"""Reports rows left out of training because of NaN or infinite values, and stops the run if there are too many."""

from __future__ import annotations

import math

from trainer.activations.outliers import LeftOut
from trainer.activations.training_data import TrainingData
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.wording import plural
from trainer.reporting.report import Report

# If a larger fraction of the rows is not finite, something is wrong with the data.
MOST_BAD_ROWS = 0.01
CURE = "extract them again, in bf16 or fp32 if they are in fp16"


def too_many(n_bad: int, n_seen: int) -> bool:
    """Return whether `n_bad` bad rows out of `n_seen` show that the fraction of bad rows exceeds `MOST_BAD_ROWS`.

    A small sample may contain more bad rows by chance, so there is a margin of 10 rows plus 4 standard deviations.
    """
    allowed = MOST_BAD_ROWS * n_seen
    return n_bad > allowed + 4 * math.sqrt(allowed) + 10


class BadRows:
    """Reports a run's non-finite rows, and names the first such row at each hook."""

    def __init__(self, data: TrainingData, report: Report, tokens_per_step: int) -> None:
        self._data, self._report, self._tokens_per_step = data, report, tokens_per_step
        # For each hook, a sentence naming its first bad row.
        self._first: dict[str, str] = {}

    def sampled(self, n_bad: int, n_rows: int, first: str, hook: str) -> None:
        """Report the bad rows in a hook's initial sample; `first` is a sentence naming the first bad row."""
        if n_bad:
            self._warn(n_bad, n_rows, "a sample", hook, first)

    def look_at(self, found: LeftOut, since: Position, now: Position, hook: str) -> None:
        """Report the bad rows at a hook up to the position `now`; raise `UserError` if there are too many.

        `found` contains the counts since the start of the run. The rows since the last call were read after the
        position `since`. All ranks training the same SAEs must call this method.
        """
        if not found.not_finite:
            return
        if hook not in self._first:
            first = (
                self._data.bad_row(since.tokens, now.tokens, self._tokens_per_step) or "the first such row is unknown"
            )
            self._warn(found.not_finite, found.n_seen, f"the rows up to step {now.step}", hook, first)
        if too_many(found.not_finite, found.n_seen):
            share = f"{found.not_finite:,} of {plural(found.n_seen, 'row')} read so far are not finite"
            raise UserError(f"data.path: {self._first[hook]} ({share}); {CURE}")

    def _warn(self, n_bad: int, n_rows: int, of_rows: str, hook: str, first: str) -> None:
        self._first[hook] = first
        at = f" at {hook}" if hook else ""
        share = f"{100 * n_bad / n_rows:.2g} % of {of_rows}{at} ({n_bad:,} of {n_rows:,})"
        self._report.warn("not_finite", f"{share} are not finite and are left out: {first}")
