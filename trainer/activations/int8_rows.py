"""Encodes rows as int8 with one scale per 64 values, and decodes them; each dimension's mean is subtracted before.

Without the mean, a dimension whose mean is large compared with its spread would set the scale of its group. A row of
zeros, such as padding, has the scales -0, so that it stays a row of zeros. An encoded row, uint8 [row_bytes], contains
the int8 values and then the scales. It can be read, sent and copied like any other row, and is decoded only on the
device that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.contract.settings.rows import GROUP, INT8, row_bytes

_LARGEST = 127
# The bits of -0 in fp32.
_NEGATIVE_ZERO = -(2**31)
# The number of means that one byte can distinguish.
MOST_MEANS = 256


def encoded(rows: Tensor, mean: Tensor) -> Tensor:
    """Return rows [n, d] as uint8 [n, row_bytes]; a row with a NaN or an infinity is decoded as a row with NaNs.

    Rows of zeros are decoded exactly.

    Every operation is rounded to nearest in fp32, so the bits do not depend on the device.
    """
    width = rows.shape[1]
    groups = torch.nn.functional.pad(rows.float() - mean, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    scales = _rounded_up(groups.abs().amax(dim=2) / _LARGEST)
    scales.masked_fill_(~rows.any(dim=1, keepdim=True), -0.0)
    # A group of equal values has the scale 0.
    values = (groups / scales.float().unsqueeze(2)).nan_to_num_(0, 0, 0).round_().to(torch.int8)
    return torch.cat([values.flatten(1)[:, :width].view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decoded(rows: Tensor, mean: Tensor) -> Tensor:
    """Return encoded rows in fp32 [n, d]; the mean is a vector [d], or has a row for each of the rows."""
    width = mean.shape[-1]
    whole = width - width % GROUP
    scales = scales_of(rows, width)
    values = rows[:, :width].view(torch.int8).float()
    values[:, :whole].unflatten(1, (whole // GROUP, GROUP)).mul_(scales[:, : whole // GROUP, None])
    if whole < width:
        values[:, whole:].mul_(scales[:, -1:])
    # The mean is multiplied by 0 for rows of zeros, and otherwise by 1, which does not change the sum's bits.
    return values.addcmul_((scales[:, :1].view(torch.int32) != _NEGATIVE_ZERO).float(), mean)


def scales_of(rows: Tensor, width: int) -> Tensor:
    """Return the scales of encoded rows in fp32 [n, n_groups]."""
    # The copy is aligned, unlike the scales in the rows.
    stored = rows[:, width : row_bytes(width, INT8)].clone(memory_format=torch.contiguous_format)
    return stored.view(torch.bfloat16).float()


def noise_of(rows: Tensor, width: int) -> float:
    """Return the expected squared error of encoded rows, summed over all values; steps of s cause s²/12 per value."""
    sizes = torch.full((-(-width // GROUP),), float(GROUP), dtype=torch.float64)
    sizes[-1] -= -width % GROUP
    return float(scales_of(rows, width).double().square().sum(0) @ sizes) / 12


class Int8Code:
    """Decodes rows from shards with the given means [d]; with several means, a row's last byte is its mean's index."""

    def __init__(self, means: Sequence[Tensor]) -> None:
        self._means = torch.stack([*means])
        self._of_device = self._means
        self.row_bytes = row_bytes(self._means.shape[1], INT8) + self.has_index

    @property
    def has_index(self) -> bool:
        """Whether a row ends with the index of its mean."""
        return len(self._means) > 1

    def decode(self, rows: Tensor) -> Tensor:
        """Return encoded rows in fp32 [n, d], on the same device."""
        if self._of_device.device != rows.device:
            self._of_device = self._means.to(rows.device)
        means = self._of_device
        return decoded(rows, means[rows[:, -1].int()] if self.has_index else means[0])


def _rounded_up(scales: Tensor) -> Tensor:
    """Return scales >= 0 in bf16, rounded up, so that no value exceeds 127 steps; NaN for values that are not finite.

    bf16 has the range of fp32. In fp16, the scales of small activations would lose precision.
    """
    bits = (scales.view(torch.int32) + 0xFFFF) >> 16
    return torch.where(scales.isfinite(), bits.to(torch.int16).view(torch.bfloat16), torch.nan)
