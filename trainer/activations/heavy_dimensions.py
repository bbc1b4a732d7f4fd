"""Few dimensions that hold most of the variance: an SAE that learns them alone has a low FVU, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.wording import join_words, plural

# They are few up to this share of all dimensions, or as one alone, and hold most of the variance from here on.
FEW, MOST = 0.01, 0.5
# Below, one of them may hold half of the variance with nothing wrong.
_LEAST_DIMENSIONS = 16
_NAMED = 4
_ROWS_AT_ONCE = 4096


class HeavyDimensions(NamedTuple):
    """The numbers of those dimensions, the heaviest first, of `d_in` in all, and their share of the variance."""

    numbers: list[int]
    d_in: int
    share: float

    def sentence(self) -> str:
        """Write them as `1 dimension of 576 (number 17) holds 99.8 % of the variance`."""
        named = [str(number) for number in self.numbers[:_NAMED]]
        more = [f"{len(self.numbers) - _NAMED} more"] if len(self.numbers) > _NAMED else []
        few, word = ("s", "number") if len(self.numbers) == 1 else ("", "numbers")
        which = f"{plural(len(self.numbers), 'dimension')} of {self.d_in} ({word} {join_words(named + more)})"
        return f"{which} hold{few} {100 * self.share:.1f} % of the variance"


def heavy_dimensions(variance: Tensor) -> HeavyDimensions | None:
    """Return the fewest dimensions that hold most of the variance [d_in], where they are few; else None."""
    d_in, total = len(variance), float(variance.sum())
    if d_in < _LEAST_DIMENSIONS or not total > 0:
        return None
    highest, numbers = variance.topk(max(1, int(FEW * d_in)))
    shares = (highest.cumsum(0) / total).tolist()
    n = next((n for n, share in enumerate(shares, 1) if share > MOST), 0)
    return HeavyDimensions(numbers[:n].tolist(), d_in, shares[n - 1]) if n else None


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each dimension, float64 [d_in] each; zeros where there is no row."""
    n = max(1, len(rows))
    mean, spread = (torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device) for _ in range(2))
    for part in rows.split(_ROWS_AT_ONCE):
        mean += part.double().sum(0) / n
    for part in rows.split(_ROWS_AT_ONCE):
        spread += (part.double() - mean).square().sum(0) / n
    return mean, spread
