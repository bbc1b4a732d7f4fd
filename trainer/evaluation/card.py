"""Writes the report card of an SAE beside its weights, as JSON and as a model card."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.runs.card_versions import archive, locked, of_weights, weights_of
from trainer.contract.runs.features import CARD, FEATURES, is_of_weights
from trainer.contract.runs.report_card import (
    BINS_PER_DECADE,
    Card,
    Data,
    Figures,
    Part,
    SampledLatent,
    facts,
    marked,
    sample_latents,
)
from trainer.contract.runs.row_sums import SUMS
from trainer.contract.wording import join_words, plural
from trainer.evaluation.contexts import with_older, write_features
from trainer.sharing.base import CARD_REST, CARD_TITLE, MODEL_CARD, public_name

# What Markdown would take for more than text.
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~$])")


def write_card(folder: Path, card: Card, tensors: Mapping[str, Tensor] | None = None) -> Card:
    """Add what was measured to the card next to an SAE's weights, and return the card as it then is.

    What was measured before of the same weights and not again stays; so it is with `tensors`, what latents fire on and
    the tokens that they promote. The card before becomes an older version. All is written whole, or nothing, by one
    process at a time; raise `UserError` where the disk does not take it. A README.md of somebody else stays.
    """
    try:
        with locked(folder):
            weights = weights_of(folder)
            if card.weights not in ("", weights):
                raise UserError(f"{folder}: another SAE was written there while this one was evaluated; evaluate again")
            return _add(folder, msgspec.structs.replace(card, weights=weights), tensors or {})
    except OSError as error:
        raise UserError(f"{folder}: the card could not be written: {error.strerror or error}") from None


def _add(folder: Path, card: Card, tensors: Mapping[str, Tensor]) -> Card:
    before = of_weights(folder, card.weights, card.tokens, card.step)
    archive(folder)
    features = before.features if before and is_of_weights(before.features, card.weights) else None
    if tensors or (features and not _is_current(features, folder)):
        write_features(folder, with_older(tensors, features), card.weights)
    elif not features:
        # What is there is of other weights, and archived.
        with contextlib.suppress(OSError):
            (folder / FEATURES).unlink(missing_ok=True)
    card = with_latents(card.with_older(before.card if before else None), folder)
    readme = folder / MODEL_CARD
    if not readme.exists() or readme.read_text(errors="replace").startswith(CARD_TITLE):
        write_whole(readme, model_card(card))
    write_whole(folder / CARD, card.as_json())
    if card.sums:
        write_whole(folder / SUMS, msgspec.json.encode(card.sums))
    return card


def _is_current(features: Path, folder: Path) -> bool:
    return features == folder / FEATURES


def timer(step: int, device: torch.device) -> Callable[..., Part]:
    """Return what makes the entry of a part whose measurement begins now; it takes the fields of `Part` from `n` on."""
    began = time.monotonic()

    def part(n: int, unit: str, **fields: Any) -> Part:
        took = time.monotonic() - began
        return Part(measured=time.time(), step=step, n=n, unit=unit, device=device.type, seconds=took, **fields)

    return part


def rows_part(timed: Callable[..., Part], figures: Figures, data: Data) -> Part:
    settings = {"held_out": data.is_held_out, "max_norm": data.max_norm}
    return timed(figures.n_tokens, "rows", text=data.place, settings=settings)


def with_latents(card: Card, folder: Path) -> Card:
    """Return the card with some latents and what they fire on, where that is known of the SAE in a folder."""
    with contextlib.suppress(UserError):
        return msgspec.structs.replace(card, latents=sample_latents(folder / FEATURES))
    return card


def model_card(card: Card) -> str:
    """Write the card as the Markdown of a model card."""
    origin = {name: public_name(value) for name, value in card.origin.items() if value is not None}
    if card.spliced:
        card = msgspec.structs.replace(
            card, spliced=msgspec.structs.replace(card.spliced, text=public_name(card.spliced.text))
        )
    rows = "\n".join(f"| {title} | {value} |" for title, value in facts(card))
    where = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in origin.items())
    return f"""{CARD_TITLE}: {card.title}

{card.architecture}, {card.figures.d_in} dimensions, {card.figures.d_sae:,} latents, trained on {card.tokens:,} tokens.
{where}

Measured on {card.data.rows(card.figures.n_tokens)}; {_left_out(card.data)}.

| | |
|---|---|
{rows}

Densities are in {BINS_PER_DECADE} bins for each power of ten.{CARD_REST}
{"".join(_latents(card.latents))}"""


def _left_out(data: Data) -> str:
    """Say which rows no figure counts."""
    others = [f"{plural(data.not_finite, 'row')} that are not finite"] if data.not_finite else []
    others += [f"rows of zeros ({data.zero_fraction:.2%})"] if data.drops_zero else []
    if not data.max_norm:
        left_out = f"; {join_words(others)} are left out" if others else ""
        return f"none are left out for their norm{left_out}"
    far = f"rows of more than {data.max_norm:g} times the median norm\n({data.outlier_fraction:.2%})"
    return f"{join_words([far, *others])} are left out"


def _latents(latents: tuple[SampledLatent, ...]) -> Iterator[str]:
    """Write the latents as a table with their texts."""
    if not latents:
        return
    yield f"\n{len(latents)} of the latents that fire, drawn by chance, and where each fires most:\n\n"
    yield "| latent | fires on | texts |\n|---|---|---|\n"
    for one in latents:
        texts = " … ".join(_in_markdown(marked(text, "\0", "\1")) for text in one.texts)
        yield f"| {one.latent} | {one.density:.3%} | {texts} |\n"


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", text).replace("\0", "**").replace("\1", "**")
