"""Decides whether two SAEs differ significantly, given their standard errors and the variation between seeds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from sae_tui.compare.run import ComparedSae
from trainer.contract.runs.row_sums import LEAD, paired_error
from trainer.contract.settings.series import CRITERION, held_out

# If there are too few seeds to measure the variation between them, a relative FVU difference is significant only if it
# exceeds this value. The FVU of a TopK SAE on 131,072 rows varied by 0.5 to 1 % between seeds.
SEED_SHARE = 0.01
FEWEST_SEEDS = 3
_FVUS = (held_out(CRITERION), f"card_{CRITERION}")
_SEED = "train.seed"
_OF_SAE = ("data.", "sae.", "train.")


class Lead(msgspec.Struct, frozen=True):
    """A value's distance from the best value, and the distance above which it is significant, with an explanation."""

    lead: float
    least: float
    why: str

    @property
    def is_real(self) -> bool:
        return self.lead > self.least


class SaeResult(msgspec.Struct, frozen=True):
    """An SAE with one of its results and that result's standard error; either is None if unknown."""

    sae: ComparedSae
    value: float | None
    error: float | None = None


def lead_of(name: str, best: SaeResult, other: SaeResult, compared: Sequence[SaeResult]) -> Lead | None:
    """Return the best SAE's lead over another SAE in one result, or None if a value or its uncertainty is unknown.

    The variation between seeds is estimated from all SAEs in `compared`.
    """
    if best.value is None or other.value is None:
        return None
    known = [noise for noise in (_by_errors(name, best, other), _by_seeds(name, compared, best.value)) if noise]
    if not known:
        return None
    least, why = max(known)
    return Lead(abs(other.value - best.value), least, why)


def _by_errors(name: str, best: SaeResult, other: SaeResult) -> tuple[float, str] | None:
    """Return the smallest significant difference, given both standard errors, and an explanation of this threshold."""
    if name in _FVUS and best.sae.sums and other.sae.sums:
        paired = paired_error(best.sae.sums, other.sae.sums)
        if paired is not None:
            degrees = len(best.sae.sums.errors) - 1
            if degrees <= 2:
                return math.inf, f"the rows come from only {degrees + 1} texts, too few to estimate an error"
            # With few texts, the error itself is uncertain, so multiply it by the standard deviation of Student's t.
            of_few = math.sqrt(degrees / (degrees - 2))
            return LEAD * paired * of_few, f"{LEAD:g} standard errors of the difference, paired by text"
    if best.error is None or other.error is None:
        return None
    return LEAD * math.hypot(best.error, other.error), f"{LEAD:g} combined standard errors"


def _by_seeds(name: str, compared: Sequence[SaeResult], top: float) -> tuple[float, str] | None:
    """Return the smallest significant difference in FVU, given the variation between seeds, and an explanation."""
    if name not in _FVUS:
        return None
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for one in compared:
        if one.value is not None:
            groups[_without_seed(one.sae)][repr(one.sae.settings.get(_SEED))] = one.value
    of_seeds = [list(values.values()) for values in groups.values() if len(values) >= FEWEST_SEEDS]
    if not of_seeds:
        few = f"{SEED_SHARE:.0%}, which a different seed alone can cause (compare {FEWEST_SEEDS} seeds to measure this)"
        return SEED_SHARE * abs(top), few
    degrees = sum(len(values) - 1 for values in of_seeds)
    spread = math.sqrt(sum((len(values) - 1) * statistics.variance(values) for values in of_seeds) / degrees)
    return LEAD * math.sqrt(2) * spread, f"{LEAD:g} × the spread between seeds, for two runs"


def _without_seed(sae: ComparedSae) -> str:
    """Return the settings that determine the SAE, except its seed."""
    settings = {path: one for path, one in sae.settings.items() if path.startswith(_OF_SAE) and path != _SEED}
    return repr(sorted(settings.items(), key=str))
