"""Finds heavy dimensions: a few dimensions that account for most of the variance.

An SAE that learns only the heavy dimensions already has a low FVU. Therefore, a job can multiply each dimension by a
factor: below 1 to scale the dimension down, or 0 to leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.settings.job import DataSettings
from trainer.contract.wording import join_words, plural

# The largest standard deviation of a scaled dimension, as a multiple of the median standard deviation.
WIDEST = 3.0
# A set of dimensions is heavy if it accounts for more than the fraction MOST of the variance, and contains only one
# dimension or at most the fraction FEW of all dimensions.
FEW, MOST = 0.01, 0.5
# With fewer dimensions, it is normal for one of them to account for half of the variance.
_LEAST_DIMENSIONS = 16
_NAMED = 4
_ROWS_AT_ONCE = 4096


class HeavyDimensions(NamedTuple):
    """The indices of the heavy dimensions, out of `d_in`, heaviest first, and their share of the variance."""

    numbers: list[int]
    d_in: int
    share: float

    def sentence(self) -> str:
        """Return a sentence like `1 dimension of 576 (number 17) accounts for 99.8 % of the variance`."""
        verb = "accounts for" if len(self.numbers) == 1 else "account for"
        return f"{named(self.numbers, self.d_in)} {verb} {100 * self.share:.1f} % of the variance"

    @property
    def remedy(self) -> str:
        """Why heavy dimensions matter, and which settings leave them out or scale them down."""
        it, listed = "it" if len(self.numbers) == 1 else "them", ", ".join(map(str, self.numbers))
        return (
            f"FVU mostly measures {it}: leave {it} out with data.drop_dimensions = [{listed}], "
            f'or scale {it} down with data.scale_dimensions = "auto"'
        )


def heavy_dimensions(variance: Tensor, parts: Sequence[int] = ()) -> HeavyDimensions | None:
    """Return the smallest set of dimensions with most of the total `variance` [d_in], or None if it is too large.

    `parts` contains the widths of the parts of a crosscoder's rows, which all count the same.
    """
    if parts:
        each = variance.split(tuple(parts))
        variance = torch.cat([part * len(part) / part.sum().clamp(min=torch.finfo(part.dtype).tiny) for part in each])
    d_in, total = len(variance), float(variance.sum())
    if d_in < _LEAST_DIMENSIONS or not total > 0:
        return None
    highest, numbers = variance.topk(max(1, int(FEW * d_in)))
    shares = (highest.cumsum(0) / total).tolist()
    n = next((n for n, share in enumerate(shares, 1) if share > MOST), 0)
    return HeavyDimensions(numbers[:n].tolist(), d_in, shares[n - 1]) if n else None


def named(numbers: Sequence[int], d: int) -> str:
    """Return a phrase like `2 dimensions of 576 (numbers 17 and 30)`, with at most `_NAMED` numbers."""
    more = [f"{len(numbers) - _NAMED} more"] if len(numbers) > _NAMED else []
    words = join_words([*map(str, numbers[:_NAMED]), *more])
    return f"{plural(len(numbers), 'dimension')} of {d} ({'number' if len(numbers) == 1 else 'numbers'} {words})"


def dimension_scales(rows: Tensor, data: DataSettings, parts: Sequence[int] = ()) -> Tensor:
    """Return the factors, fp32 [d], by which to multiply the dimensions of rows [n, d].

    A factor is at most 1; a factor of 0 leaves its dimension out.

    Scaling limits each standard deviation to `WIDEST` times the median over dimensions with non-zero variance.
    Dimensions within this limit are not scaled, and the factor is continuous at the limit. `parts` contains the widths
    of the parts of a crosscoder's rows; each part has its own median.
    """
    scales = torch.ones(rows.shape[1], dtype=torch.float64, device=rows.device)
    if data.scale_dimensions == "auto":
        scales = torch.cat([_within_limit(part) for part in rows.split(tuple(parts) or rows.shape[1], dim=1)])
    scales[data.drop_dimensions or []] = 0
    return scales.float()


def _within_limit(rows: Tensor) -> Tensor:
    spread = moments(rows)[1].sqrt()
    if not (varies := spread[spread > 0]).numel():
        return torch.ones_like(spread)
    return (WIDEST * varies.median() / spread.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)


def changed_scales(scales: Tensor) -> dict[str, float]:
    """Return a dict mapping dimensions to factors other than 1; the keys are strings, as JSON requires."""
    return {str(number): factor for number, factor in enumerate(scales.tolist()) if factor != 1}


def scales_sentence(changed: Mapping[str, float], d: int) -> str:
    """Return a phrase saying which of the `d` dimensions are left out or scaled down, or "" if none are."""
    dropped = [int(number) for number, factor in changed.items() if factor == 0]
    scaled = {int(number): factor for number, factor in changed.items() if factor}
    parts = [f"{named(dropped, d)} left out"] if dropped else []
    if scaled:
        by = f"{1 / min(scaled.values()):.3g}"
        parts.append(f"{named(sorted(scaled, key=lambda one: scaled[one]), d)} scaled down by up to {by}")
    return ", ".join(parts)


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of each dimension, float64 [d_in]; both are 0 if there are no rows."""
    n = max(1, len(rows))
    mean, spread = (torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device) for _ in range(2))
    # Measuring from a row keeps the squares small if the mean is large, and makes a constant dimension's variance 0.
    origin = rows[0].double() if len(rows) else mean
    for part in rows.split(_ROWS_AT_ONCE):
        shifted = part.double().sub_(origin)
        mean += shifted.sum(0) / n
        spread += shifted.square_().sum(0) / n
    return origin + mean, (spread - mean.square()).clamp(min=0)
