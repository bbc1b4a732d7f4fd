"""Formats a metric's mean over seeds, with its standard deviation."""

from __future__ import annotations

import math

from trainer.contract.settings.catalog import Series
from trainer.contract.settings.series import measure
from trainer.contract.store.seeds import Spread


def spread_words(spread: Spread, series: Series, between: str = " ± ") -> str:
    """Return a mean and its standard deviation with two significant digits, like `0.1460 ± 0.0015`."""
    if series.is_share or not spread.sd:
        return f"{measure(spread.mean, series)}{between}{measure(spread.sd, series)}"
    decimals = max(0, 1 - math.floor(math.log10(spread.sd)))
    if max(abs(spread.mean), spread.sd) >= 1e6 or decimals > 6:
        return f"{spread.mean:.3g}{between}{spread.sd:.2g}"
    return f"{spread.mean:.{decimals}f}{between}{spread.sd:.{decimals}f}"
