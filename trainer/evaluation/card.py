"""The report card of an SAE: its figures, the data they are of, and how both are told and stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trainer.checkpoints.atomic_folder import write_json
from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.runs.features import CARD
from trainer.contract.wording import bars, plural
from trainer.evaluation.figures import BINS_PER_DECADE, LOWEST_DECADE, Figures
from trainer.evaluation.probing import Probing
from trainer.evaluation.spliced import Spliced
from trainer.sharing.base import CARD_REST, CARD_TITLE, MODEL_CARD


class Data(msgspec.Struct, frozen=True):
    """The rows that were measured: `is_held_out` where they are some of the `n_held_out` that none was trained on.

    Of others `is_trained_on` tells whether the SAE is known to have seen them. `gamma` is ‖mean‖/‖std‖. No figure
    counts the `not_finite` rows, nor those of enormous norm, the `outlier_fraction`. `heavy` tells in a sentence of few
    dimensions that hold most of the variance; "" where there are none.
    """

    place: str
    is_held_out: bool
    gamma: float
    outlier_fraction: float
    not_finite: int
    max_norm: float
    n_held_out: int = 0
    is_trained_on: bool = False
    heavy: str = ""

    def rows(self, n: int) -> str:
        """Write `n` measured rows as `1,024 of 4,096 held-out rows`."""
        if self.is_held_out:
            of_all = f" of {self.n_held_out:,}" if n < self.n_held_out else ""
            return f"{n:,}{of_all} held-out rows"
        return f"{n:,} {'training ' * self.is_trained_on}rows"


class Card(msgspec.Struct, frozen=True):
    """What an SAE is, what it was measured on, and what it is worth; `recovery` is the MMCS with known features."""

    name: str
    label: str
    architecture: str
    step: int
    tokens: int
    origin: dict[str, Any]
    data: Data
    figures: Figures
    recovery: float | None = None
    spliced: Spliced | None = None
    probing: Probing | None = None


def write_card(folder: Path, card: Card) -> None:
    """Write `card.json` and a model card beside an SAE's weights; raise `UserError` where the disk does not take them.

    A README.md that somebody else has written there stays.
    """
    readme = folder / MODEL_CARD
    try:
        if not readme.exists() or readme.read_text(errors="replace").startswith(CARD_TITLE):
            write_whole(readme, model_card(card))
        write_json(folder / CARD, msgspec.to_builtins(card))
    except OSError as error:
        raise UserError(f"{folder}: the card could not be written: {error.strerror or error}") from None


def lines(card: Card) -> list[str]:
    """Return the card in lines for a terminal."""
    figures, data = card.figures, card.data
    head = " ".join(word for word in (card.name, card.label) if word)
    rows = f"{data.rows(figures.n_tokens)} of {data.place}"
    left_out = f", {data.outlier_fraction:.2%} of enormous norm left out" if data.outlier_fraction else ""
    step = f", step {card.step:,}" if card.step else ""
    table = [(title, value) for title, value in facts(card)]
    width = max(len(title) for title, _ in table)
    return [
        f"{head}: {card.architecture}, {figures.d_in} -> {figures.d_sae:,}{step}",
        f"on {rows}{left_out}",
        *(f"  {title:<{width}}  {value}" for title, value in table),
    ]


def summary(card: Card) -> str:
    """Return the card in one line: what matters most, and on how many rows."""
    one = card.figures
    quality = f"FVU {one.fvu:.4f} ± {one.fvu_error:.4f}, L0 {one.l0:.1f}"
    latents = f"{one.dead:.1%} never fire, {one.dense_10:.1%} dense"
    heavy = f"; {card.data.heavy}" if card.data.heavy else ""
    return f"{quality}, {latents}, on {card.data.rows(one.n_tokens)}{heavy}"


def facts(card: Card) -> list[tuple[str, str]]:
    """Return each figure with its name, as people read them."""
    one = card.figures
    low, lower, _, upper, high = one.l0_quantiles
    told = [
        ("FVU", f"{one.fvu:.4f} ± {one.fvu_error:.4f}, median row {one.median_row_fvu:.4f}"),
        ("explained variance", f"{one.explained_variance:.2%}"),
        ("MSE", f"{one.mse:.4g}"),
        ("cosine", f"{one.cosine:.4f}"),
        ("L0", f"{one.l0:.1f} (5 % {low:g}, 25 % {lower:g}, 75 % {upper:g}, 95 % {high:g})"),
        ("shrinkage", f"‖x̂‖/‖x‖ {one.l2_ratio:.4f}, bias {one.relative_reconstruction_bias:.4f}"),
        ("latents", f"{one.dead:.1%} dead, {one.rare:.1%} rare, {one.dense_1:.1%} > 1 %, {one.dense_10:.1%} > 10 %"),
        ("density", f"10^{LOWEST_DECADE} {bars(one.density_histogram)} 1"),
        ("decoder cosine", f"{one.max_decoder_cosine:.3f} with the nearest other latent"),
        ("gamma of the data", f"{card.data.gamma:.2f}"),
    ]
    if card.recovery is not None:
        told.append(("recovery (MMCS)", f"{card.recovery:.3f} of the known features"))
    if card.data.heavy:
        told.append(("read FVU with care", card.data.heavy))
    return told + (_losses(card.spliced) if card.spliced else []) + (_probes(card.probing) if card.probing else [])


def _losses(spliced: Spliced) -> list[tuple[str, str]]:
    mean = "" if spliced.ce_with_mean is None else f", {spliced.ce_with_mean:.3f} with the mean row"
    of_each = (
        f"{spliced.ce_with_sae:.3f} with the SAE, {spliced.ce:.3f} without, {spliced.ce_with_zeros:.3f} with zeros"
    )
    return [
        ("CE score", f"{spliced.ce_score:.4f}: {of_each}{mean}"),
        (
            "KL score",
            f"{spliced.kl_score:.4f}: {spliced.kl_with_sae:.4f} with the SAE, {spliced.kl_with_zeros:.3f} with zeros",
        ),
        ("measured on", f"{spliced.n_tokens:,} {'unseen ' * spliced.is_unseen}tokens of {spliced.text}"),
    ]


def _probes(probing: Probing) -> list[tuple[str, str]]:
    aucs = {f"k = {k}": one for k, one in probing.k.items()} | {"all activations": probing.dense}
    of_each = ", ".join(f"{one.auc:.3f} ± {one.seed_error:.3f} {name}" for name, one in aucs.items())
    texts = f"{probing.n_texts:,} texts of {plural(probing.n_sets, 'set')}, {plural(probing.n_seeds, 'seed')}"
    return [("probing (AUC)", of_each), ("probed on", texts)]


def model_card(card: Card) -> str:
    """Write the card as the Markdown of a model card."""
    origin = {name: value for name, value in card.origin.items() if value is not None}
    rows = "\n".join(f"| {title} | {value} |" for title, value in facts(card))
    where = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in origin.items())
    return f"""{CARD_TITLE}: {" ".join(word for word in (card.name, card.label) if word)}

{card.architecture}, {card.figures.d_in} dimensions, {card.figures.d_sae:,} latents, trained on {card.tokens:,} tokens.
{where}

Measured on {card.data.rows(card.figures.n_tokens)}; rows of more than {card.data.max_norm:g} times the median norm
({card.data.outlier_fraction:.2%}) are left out.

| | |
|---|---|
{rows}

Densities are in {BINS_PER_DECADE} bins for each power of ten.{CARD_REST}
"""
