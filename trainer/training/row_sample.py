"""Samples training rows from the entire data set, to initialise SAEs and to resample dead latents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.activations.base import are_finite, norms_of
from trainer.activations.heavy_dimensions import (
    HeavyDimensions,
    changed_scales,
    dimension_scales,
    heavy_dimensions,
    moments,
    scales_sentence,
)
from trainer.activations.outliers import LeftOut, Outliers
from trainer.activations.training_data import HookRows
from trainer.contract.errors import UserError
from trainer.contract.settings.job import JobConfig
from trainer.reporting.report import Report
from trainer.training.bad_rows import CURE, MOST_BAD_ROWS
from trainer.training.learner import Learner


class RowSampler:
    """Samples training rows for a hook with a given seed, identically on all ranks.

    For a stream, the sample is always the same.
    """

    def __init__(self, data: HookRows, device: torch.device) -> None:
        self._data, self._device = data, device
        self._outliers: Outliers | None = None
        # What `find_outliers` found in its sample: the counts of rows to leave out, a sentence about the first
        # non-finite row, the number of zero rows, a sentence about dropped or scaled dimensions, and the dimensions
        # that still account for most of the variance.
        self.left_out = LeftOut(0, 0, 0, 0)
        self.first_bad = ""
        self.n_zero = 0
        self.scaled = ""
        self.heavy: HeavyDimensions | None = None

    def find_outliers(self, job: JobConfig) -> Outliers:
        """Return the job's detector for rows to leave out; later calls to `sample` omit such rows."""
        self._outliers = None
        x, y = self.sample(job.train.seed)
        parts = job.part_widths
        self._outliers = Outliers(x, y, job.data.max_norm, drops_zero=job.data.drop_zero_rows, parts=parts)
        n_bad = self.left_out.not_finite
        found = self._outliers.count(x, y)
        self.left_out = found._replace(not_finite=n_bad, n_seen=len(x) + n_bad)
        self.n_zero = int((norms_of(x) == 0).sum())
        _, ordinary = self._outliers.leave_out(x, y)
        if not len(ordinary):
            raise UserError(f"data.path: all {len(x):,} rows of a sample are left out; run `inspect` on the data")
        scales = dimension_scales(ordinary, job.data, parts)
        self.scaled = scales_sentence(changed_scales(scales), len(scales))
        self.heavy = heavy_dimensions(moments(ordinary)[1] * scales.double().square(), parts)
        return self._outliers

    def sample(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return sampled inputs and targets without outliers, in fp32 on the device.

        All values are finite. Inputs and targets are the same tensor except for a transcoder.

        Raise `UserError` if more than a fraction `MOST_BAD_ROWS` of the rows is not finite.
        """
        x, y = self._data.sample(seed)
        finite = are_finite(x, y)
        if n_bad := int((~finite).sum()):
            first = self._data.bad_in_sample(int((~finite).int().argmax()), seed)
            if n_bad > MOST_BAD_ROWS * len(x):
                raise UserError(f"data.path: {first} ({n_bad:,} of {len(x):,} rows); {CURE}")
            self.left_out, self.first_bad = self.left_out._replace(not_finite=n_bad), first
            kept = x[finite]
            x, y = kept, kept if y is x else y[finite]
        inputs = self._to_device(x)
        targets = inputs if y is x else self._to_device(y)
        return self._outliers.leave_out(inputs, targets) if self._outliers else (inputs, targets)

    def _to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self._device).float()

    def revive(self, due: Mapping[str, Learner], step: int, seed: int, report: Report) -> None:
        """Resample the dead latents of the SAEs in `due`, identically on all ranks."""
        x, y = self.sample(seed + step)
        revived = {label: learner.resample(step, x, y) for label, learner in due.items()}
        for label, which in revived.items():
            due[label].agree()
            due[label].forget(which)
            if n_revived := int(due[label].latents.whole(which).sum()):
                report.event("resampled", f"{n_revived} dead latents resampled at step {step}", label)
