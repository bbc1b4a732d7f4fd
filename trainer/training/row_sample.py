"""Training rows from everywhere: what SAEs start from, and what dead latents are revived by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.activations.heavy_dimensions import HeavyDimensions, heavy_dimensions, moments
from trainer.activations.outliers import Outliers
from trainer.activations.training_data import HookRows, are_finite
from trainer.contract.errors import UserError
from trainer.reporting.report import Report
from trainer.training.learner import Learner

# More rows of the sample with a NaN than this share are no accident.
MOST_BAD_ROWS = 0.01


class Sampler:
    """Draws training rows of a hook by a seed, the same on all ranks; of a stream always the same ones."""

    def __init__(self, data: HookRows, device: torch.device) -> None:
        self._data, self._device = data, device
        self._outliers: Outliers | None = None
        # What of the sample `find_outliers` has told apart.
        self.n_rows = self.n_outliers = 0
        self.heavy: HeavyDimensions | None = None

    def find_outliers(self, seed: int, times: float) -> Outliers:
        """Return what finds rows of more than `times` the median norm; from here on none of them is drawn.

        Count those of the sample, and find the `heavy` dimensions of the others' targets."""
        self._outliers = None
        x, y = self.sample(seed)
        self._outliers = Outliers(x, y, times)
        _, ordinary = self._outliers.leave_out(x, y)
        self.n_rows, self.n_outliers = len(x), len(x) - len(ordinary)
        self.heavy = heavy_dimensions(moments(ordinary)[1])
        return self._outliers

    def sample(self, seed: int) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets (one tensor for an SAE), fp32 on the device, all finite and none an outlier.

        Raise `UserError` where more than `MOST_BAD_ROWS` of them hold a NaN or an infinity.
        """
        x, y = self._data.sample(seed)
        finite = are_finite(x, y)
        if (n_bad := int((~finite).sum())) > MOST_BAD_ROWS * len(x):
            first = self._data.bad_in_sample(int((~finite).int().argmax()), seed)
            raise UserError(f"data.path: {first} ({n_bad:,} of {len(x):,} rows); extract them again")
        inputs = self._to_device(x[finite])
        targets = inputs if y is x else self._to_device(y[finite])
        return self._outliers.leave_out(inputs, targets) if self._outliers else (inputs, targets)

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
