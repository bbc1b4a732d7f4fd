"""Training rows from everywhere: what SAEs start from, and what dead latents are revived by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.activations.base import Source
from trainer.activations.split import Split
from trainer.contract.errors import UserError
from trainer.reporting.report import Report
from trainer.training.learner import Learner
from trainer.training.skipped_steps import bad_row

# OpenAI's number of rows for b_dec; 300 MB at d_in 2304.
SAMPLE_TOKENS = 32_768
# More rows of the sample with a NaN than this share are no accident.
MOST_BAD_ROWS = 0.01


def are_finite(x: Tensor, y: Tensor) -> Tensor:
    """Tell of each row whether its input [n, d_in] and its target [n, d_out] are finite, bool [n]."""
    return x.isfinite().all(dim=1) & y.isfinite().all(dim=1)


class Sampler:
    """Draws training rows by a seed, the same on all ranks."""

    def __init__(self, source: Source, split: Split, device: torch.device) -> None:
        self._source, self._split, self._device = source, split, device

    def sample(self, seed: int) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets (one tensor for an SAE), fp32 on the device, without those that are not finite.

        Raise `UserError` where more than `MOST_BAD_ROWS` of them hold a NaN or an infinity.
        """
        rows = self._split.sample(SAMPLE_TOKENS, seed)
        x, y = self._source.pairs(rows)
        finite = are_finite(x, y)
        if (n_bad := int((~finite).sum())) > MOST_BAD_ROWS * len(rows):
            raise UserError(
                f"data.path: {bad_row(self._source, [rows])} ({n_bad:,} of {len(rows):,} rows); extract them again"
            )
        inputs = self._to_device(x[finite])
        return inputs, inputs if y is x else self._to_device(y[finite])

    def _to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self._device).float()

    def revive(self, due: Mapping[str, Learner], step: int, seed: int, report: Report) -> None:
        """Resample the dead latents of the SAEs that are `due`, alike on all ranks."""
        x, y = self.sample(seed + step)
        revived = {label: learner.resample(step, x, y) for label, learner in due.items()}
        for label, which in revived.items():
            due[label].agree()
            due[label].forget(which)
            if n_revived := int(due[label].latents.whole(which).sum()):
                report.event("resampled", f"{n_revived} dead latents resampled at step {step}", label)
