"""Measures how many of an SAE's latents are found again by SAEs trained with other seeds.

The cosines compare decoder directions, as in Paulo and Belrose (2025), "Sparse autoencoders trained on the same data
learn different features". PW-MCC is the mean cosine under the best one-to-one matching, as in Song et al. (2025),
"Mechanistic interpretability should prioritize feature consistency in SAEs".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.contract.progress import track
from trainer.contract.runs.features import STABILITY
from trainer.contract.runs.report_card import STABLE_COSINE, Card, Stability, read_card
from trainer.contract.store.seeds import by_seeds
from trainer.contract.store.twins import without_twins
from trainer.evaluation.card import write_card
from trainer.evaluation.exported import ExportedSae, read_exported

# The number of latents to compare at a time with all latents of another SAE.
_AT_ONCE = 2048
# The largest number of latents to compare. On a CPU, comparing two SAEs with 16,384 latents takes 2 s.
MOST_LATENTS = {"cuda": 2**17, "cpu": 2**14}
# The largest number of latents to match one to one. Matching 4,096 latents takes 1 s, and the time grows cubically.
MOST_MATCHED = 4096


class _Found(NamedTuple):
    """One SAE's results: each latent's largest cosine, summed over the other SAEs, and the matched cosine with each."""

    decoder: Tensor
    encoder: Tensor
    matched: list[float]


def write_stability(
    folders: Mapping[str, Path], device: torch.device, most: int | None = None
) -> tuple[dict[str, Card], str]:
    """Add stability figures to the report cards of SAEs that differ only in the seed.

    `folders` maps each SAE's label to its folder. Return the updated report cards, and the reason why other SAEs have
    no stability figures, or "". Random twins, SAEs without a report card and SAEs with non-finite weights are left out,
    as are SAEs with more than `most` latents (by default, `MOST_LATENTS`).
    """
    done, wide = {}, 0
    most = MOST_LATENTS[device.type] if most is None else min(most, MOST_LATENTS[device.type])
    for labels in by_seeds(without_twins(folders)).values():
        cards = {label: card for label in labels if (card := read_card(folders[label]))}
        if len(cards) < 2:
            continue
        if (widest := max(card.figures.d_sae for card in cards.values())) > most:
            wide = max(wide, widest)
            continue
        saes = {label: read_exported(folders[label], device) for label in cards}
        saes = {label: sae for label, sae in saes.items() if bool(sae.directions.isfinite().all())}
        if len(saes) > 1 and len({sae.directions.shape for sae in saes.values()}) == 1:
            for label, found in _compared(saes).items():
                others = tuple(other for other in saes if other != label)
                done[label] = _write(folders[label], cards[label], others, found)
    return done, f"comparing {wide:,} latents with all others takes too long here" if wide else ""


def _compared(saes: Mapping[str, ExportedSae]) -> dict[str, _Found]:
    """Compare each pair of SAEs once."""
    found = {}
    for label, sae in saes.items():
        none = torch.zeros(sae.d_sae, device=sae.directions.device)
        found[label] = _Found(none, none.clone(), [])
    for one, other in track([*itertools.combinations(saes, 2)], "stability across seeds"):
        parts = [(sae.directions, sae.encoder_directions) for sae in (saes[one], saes[other])]
        for place, (mine, theirs) in enumerate(zip(*parts, strict=True)):
            for label, cosines in zip((one, other), nearest(mine, theirs), strict=True):
                (found[label].decoder, found[label].encoder)[place].add_(cosines)
        if (matched := matched_cosine(saes[one].directions, saes[other].directions)) is not None:
            found[one].matched.append(matched)
            found[other].matched.append(matched)
    return found


def _write(folder: Path, card: Card, others: tuple[str, ...], found: _Found) -> Card:
    decoder, encoder = (total.double().cpu() / len(others) for total in (found.decoder, found.encoder))
    stability = Stability(
        others=others,
        share=float((decoder > STABLE_COSINE).double().mean()),
        median=float(decoder.quantile(0.5)),
        encoder_share=float((encoder > STABLE_COSINE).double().mean()),
        pw_mcc=fmean(found.matched) if found.matched else None,
    )
    whole = msgspec.structs.replace(card, stability=stability)
    return write_card(folder, whole, {STABILITY: decoder.float()}, replaces=card)


@torch.no_grad()
def nearest(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """For both SAEs, return each direction's largest cosine with any direction of the other SAE.

    `own` and `other` are directions [d_sae, d]. The cosine with a zero direction is 0.
    """
    mine, theirs = normalize(own.float(), dim=1), normalize(other.float(), dim=1)
    of_own, of_other = [], torch.full((len(theirs),), -1.0, device=theirs.device)
    for some in mine.split(_AT_ONCE):
        cosines = some @ theirs.T
        of_own.append(cosines.amax(dim=1))
        of_other = torch.maximum(of_other, cosines.amax(dim=0))
    return torch.cat(of_own), of_other


@torch.no_grad()
def matched_cosine(own: Tensor, other: Tensor) -> float | None:
    """Return the mean cosine of the directions under the best one-to-one matching.

    Return None if scipy is not installed, or if there are more than `MOST_MATCHED` latents.
    """
    if len(own) > MOST_MATCHED:
        return None
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return None
    cosines = (normalize(own.float(), dim=1) @ normalize(other.float(), dim=1).T).cpu().numpy()
    return float(cosines[linear_sum_assignment(cosines, maximize=True)].mean())
