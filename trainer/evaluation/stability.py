"""Measures how many of an SAE's latents are found again by SAEs trained with other seeds.

The cosines compare decoder directions, as in Paulo and Belrose (2025), "Sparse autoencoders trained on the same data
learn different features". A latent's partner is the latent with the nearest decoder direction; the activations of the
two are correlated. PW-MCC is the mean cosine under the best one-to-one matching, as in Song et al. (2025),
"Mechanistic interpretability should prioritize feature consistency in SAEs".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.contract.progress import track
from trainer.contract.runs.evaluation_time import COSINES, MOST_LATENTS, MOST_MATCHED
from trainer.contract.runs.features import FIRING, STABILITY
from trainer.contract.runs.recipe import Recipe
from trainer.contract.runs.report_card import STABLE_COSINE, Card, Stability, read_card
from trainer.contract.store.seeds import by_seeds, names_seed
from trainer.contract.store.twins import without_twins
from trainer.evaluation.card import write_card
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.evaluation.firing_correlation import NOT_MEASURED, FiringCorrelations, firing_correlations
from trainer.evaluation.rows import EvaluationRows
from trainer.sharing.origins import DATA_NAMES

# The number of latents to compare at a time with all latents of another SAE.
_AT_ONCE = 2048


# Returns the rows on which an SAE, given by its label, is measured.
RowsOf = Callable[[str], EvaluationRows]


class Nearest(NamedTuple):
    """For each direction, the largest cosine with any direction of another SAE, and the latent with that direction."""

    cosine: Tensor
    latent: Tensor


class _Found(NamedTuple):
    """One SAE's results: each latent's values, summed over the other SAEs, and the matched cosine with each."""

    decoder: Tensor
    encoder: Tensor
    firing: Tensor
    matched: list[float]


def write_stability(
    folders: Mapping[str, Path],
    rows_of: RowsOf,
    device: torch.device,
    most: int | None = None,
    *,
    keeps_rows: bool = False,
) -> tuple[dict[str, Card], str]:
    """Add stability figures to the report cards of SAEs that differ only in the seed.

    `folders` maps each SAE's label to its folder. Return the updated report cards, and the reason why other SAEs have
    no stability figures, or "". Random twins, SAEs without a report card and SAEs with non-finite weights are left out,
    as are SAEs with more than `most` latents (by default, `MOST_LATENTS`). With `keeps_rows`, SAEs whose report cards
    have all these figures are not compared again.
    """
    done, wide = {}, 0
    most = MOST_LATENTS[device.type] if most is None else min(most, MOST_LATENTS[device.type])
    measured = {label: card for label in without_twins(folders) if (card := read_card(folders[label]))}
    for labels in _groups(measured):
        cards = {label: measured[label] for label in labels}
        if len(cards) < 2 or (keeps_rows and are_compared(cards)):
            continue
        if (widest := max(card.figures.d_sae for card in cards.values())) > most:
            wide = max(wide, widest)
            continue
        saes = {label: read_exported(folders[label], device) for label in cards}
        saes = {label: sae for label, sae in saes.items() if bool(sae.directions.isfinite().all())}
        if len(saes) > 1 and len({sae.directions.shape for sae in saes.values()}) == 1:
            for label, stability, of_latents in _compared(saes, rows_of(labels[0])):
                whole = msgspec.structs.replace(cards[label], stability=stability)
                done[label] = write_card(folders[label], whole, of_latents, replaces=cards[label])
    return done, f"comparing {wide:,} latents with all others takes too long here" if wide else ""


def _groups(cards: Mapping[str, Card]) -> Iterator[list[str]]:
    """Yield the labels of SAEs that differ only in the seed.

    The labels of a sweep over seeds name the seed. Other labels are the names that someone gave to folders, so these
    SAEs are grouped by their metadata; if two have the same seed, only the first one is in the group. SAEs at different
    hooks or of different data are never in one group.
    """
    for labels in by_seeds(filter(names_seed, cards)).values():
        of_data: dict[bytes, list[str]] = {}
        for label in labels:
            of_data.setdefault(_in_json(cards[label].origin), []).append(label)
        yield from of_data.values()
    by_metadata: dict[bytes, dict[int, str]] = {}
    for label, card in cards.items():
        if not names_seed(label) and card.recipe and (experiment := _experiment(card, card.recipe)):
            by_metadata.setdefault(experiment, {}).setdefault(card.recipe.seed, label)
    yield from ([*by_seed.values()] for by_seed in by_metadata.values())


def _experiment(card: Card, recipe: Recipe) -> bytes:
    """Return what SAEs that differ only in the seed have in common, or b"" if their metadata does not say it.

    The weight of a fixed sparsity penalty is unknown, and random twins are not compared. Older SAEs of data without a
    hook's name do not say which data they were trained on.
    """
    if recipe.target_l0 is None or recipe.freeze != "off" or not {*DATA_NAMES} & card.origin.keys():
        return b""
    without_seed = msgspec.structs.replace(recipe, seed=0)
    facts = (card.architecture, card.origin, card.figures.d_in, card.figures.d_sae, without_seed)
    return _in_json(facts)


def _in_json(facts: Any) -> bytes:
    return msgspec.json.encode(facts, order="deterministic")


def are_compared(cards: Mapping[str, Card]) -> bool:
    """Return whether each report card has all figures of the comparison with the other SAEs."""
    found = [(label, card.stability) for label, card in cards.items()]
    return all(one and one.rows and {label, *one.others} == cards.keys() for label, one in found)


def _compared(
    saes: Mapping[str, ExportedSae], rows: EvaluationRows
) -> Iterator[tuple[str, Stability, dict[str, Tensor]]]:
    """Compare each pair of SAEs once; yield each label with its figures, and each latent's means for its features file.

    If the activations cannot be correlated, yield the other figures, and then raise the error.
    """
    found, partners = {}, {}
    for label, sae in saes.items():
        none = torch.zeros(sae.d_sae, device=sae.directions.device)
        found[label] = _Found(none, none.clone(), none.double(), [])
    for one, other in track([*itertools.combinations(saes, 2)], COSINES):
        mine, theirs = saes[one], saes[other]
        decoders = nearest(mine.directions, theirs.directions)
        encoders = nearest(mine.encoder_directions, theirs.encoder_directions)
        for pair, decoder, encoder in zip(((one, other), (other, one)), decoders, encoders, strict=True):
            found[pair[0]].decoder.add_(decoder.cosine)
            found[pair[0]].encoder.add_(encoder.cosine)
            partners[pair] = decoder.latent
        if (matched := matched_cosine(mine.directions, theirs.directions)) is not None:
            found[one].matched.append(matched)
            found[other].matched.append(matched)
    firing, failure = NOT_MEASURED, None
    try:
        firing = firing_correlations(saes, partners, rows)
    except Exception as error:
        # The cosines are complete even if the rows cannot be read, or if a stop was requested.
        failure = error
    for (label, _), correlation in firing.of_pairs.items():
        found[label].firing.add_(correlation)
    for label, own in found.items():
        others = tuple(other for other in saes if other != label)
        means = {STABILITY: own.decoder / len(others)} | ({FIRING: own.firing / len(others)} if firing.n_rows else {})
        yield label, _figures(own, others, firing), {name: mean.float().cpu() for name, mean in means.items()}
    if failure:
        raise failure


def _figures(found: _Found, others: tuple[str, ...], firing: FiringCorrelations) -> Stability:
    decoder, encoder, correlation = (total.double().cpu() / len(others) for total in found[:3])
    fires = correlation.isfinite()
    return Stability(
        others=others,
        share=float((decoder > STABLE_COSINE).double().mean()),
        median=float(decoder.quantile(0.5)),
        encoder_share=float((encoder > STABLE_COSINE).double().mean()),
        pw_mcc=fmean(found.matched) if found.matched else None,
        firing_correlation=float(correlation[fires].mean()) if firing.n_rows and bool(fires.any()) else None,
        n_rows=firing.n_rows,
        rows=firing.rows,
    )


@torch.no_grad()
def nearest(own: Tensor, other: Tensor) -> tuple[Nearest, Nearest]:
    """For both SAEs, find each direction's nearest direction in the other SAE.

    `own` and `other` are directions [d_sae, d]. The cosine with a zero direction is 0.
    """
    mine, theirs = normalize(own.float(), dim=1), normalize(other.float(), dim=1)
    of_own: list[Nearest] = []
    best = torch.full((len(theirs),), -2.0, device=theirs.device)
    at = torch.zeros(len(theirs), dtype=torch.long, device=theirs.device)
    for first, some in zip(range(0, len(mine), _AT_ONCE), mine.split(_AT_ONCE), strict=True):
        cosines = some @ theirs.T
        of_own.append(Nearest(*cosines.max(dim=1)))
        here = Nearest(*cosines.max(dim=0))
        at = torch.where(here.cosine > best, here.latent + first, at)
        best = torch.maximum(best, here.cosine)
    return Nearest(*map(torch.cat, zip(*of_own, strict=True))), Nearest(best, at)


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
