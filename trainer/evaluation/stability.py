"""Measures how many latents of an SAE are found again with other seeds.

The cosines compare decoder directions, as in Paulo and Belrose (2025), "Sparse autoencoders trained on the same data
learn different features". PW-MCC is the mean cosine under the best one-to-one matching, as in Song et al. (2025),
"Mechanistic interpretability should prioritize feature consistency in SAEs".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.contract.runs.features import STABILITY
from trainer.contract.runs.report_card import STABLE_COSINE, Card, Stability, read_card
from trainer.contract.store.seeds import by_seeds
from trainer.evaluation.card import write_card
from trainer.evaluation.exported import ExportedSae, read_exported

# The number of latents compared at once with all latents of another SAE.
_AT_ONCE = 2048
# The largest number of latents that are matched one to one. The matching takes 1 s for 4,096 latents, and its time
# grows with the third power.
MOST_MATCHED = 4096


def write_stability(folders: Mapping[str, Path], device: torch.device) -> dict[str, Card]:
    """Add the stability to the report cards of SAEs that differ only in the seed; return these report cards.

    `folders` maps the label of each SAE to its folder. SAEs without a report card, or with another width than the
    others, are left out.
    """
    done = {}
    for labels in by_seeds(folders).values():
        cards = {label: card for label in labels if (card := read_card(folders[label]))}
        saes = {label: read_exported(folders[label], device) for label in cards} if len(cards) > 1 else {}
        if len({sae.directions.shape for sae in saes.values()}) == 1:
            for label, card in cards.items():
                done[label] = _write_one(folders[label], card, label, saes)
    return done


def _write_one(folder: Path, card: Card, label: str, saes: Mapping[str, ExportedSae]) -> Card:
    """Compare an SAE with the others in `saes`, and write its report card."""
    own, others = saes[label], {other: sae for other, sae in saes.items() if other != label}
    found = best_cosines(own.directions, [sae.directions for sae in others.values()])
    stability = Stability(
        others=tuple(others),
        share=float((found > STABLE_COSINE).double().mean()),
        median=float(found.median()),
        encoder_share=_encoder_share(own, list(others.values())),
        pw_mcc=_mean([matched_cosine(own.directions, sae.directions) for sae in others.values()]),
    )
    whole = msgspec.structs.replace(card, stability=stability)
    return write_card(folder, whole, {STABILITY: found.cpu()}, replaces=card)


def _encoder_share(own: ExportedSae, others: Sequence[ExportedSae]) -> float:
    """Return the share of latents whose encoder directions are found again."""
    found = best_cosines(own.encoder_directions, [sae.encoder_directions for sae in others])
    return float((found > STABLE_COSINE).double().mean())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


@torch.no_grad()
def best_cosines(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the mean over the other SAEs of the largest cosine of each direction with any of theirs [d_sae].

    `own` and `others` are directions [d_sae, d]. The cosine with a direction of zeros is 0.
    """
    mine, total = normalize(own.float(), dim=1), torch.zeros(len(own), device=own.device)
    for other in others:
        theirs = normalize(other.float(), dim=1).T
        total += torch.cat([(some @ theirs).amax(dim=1) for some in mine.split(_AT_ONCE)])
    return total / max(1, len(others))


@torch.no_grad()
def matched_cosine(own: Tensor, other: Tensor) -> float | None:
    """Return the mean cosine of the directions under the best one-to-one matching.

    Return None without scipy, or with more than `MOST_MATCHED` latents.
    """
    if len(own) > MOST_MATCHED:
        return None
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return None
    cosines = (normalize(own.float(), dim=1) @ normalize(other.float(), dim=1).T).cpu().numpy()
    return float(cosines[linear_sum_assignment(cosines, maximize=True)].mean())
