"""Writes an SAE's report card next to its weights, as JSON and as a model card."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.files import open_plain, write_whole
from trainer.contract.locks import locked
from trainer.contract.printable import MARKDOWN, in_markdown, printable
from trainer.contract.runs.card_versions import Version, archive, of_weights, weights_of
from trainer.contract.runs.features import CARD, FEATURES, Features, is_of_weights
from trainer.contract.runs.report_card import (
    BINS_PER_DECADE,
    Card,
    EvaluationData,
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
from trainer.sharing.base import CARD_REST, CARD_TITLE, MODEL_CARD, has_own_model_card, public_name


def write_card(
    folder: Path, card: Card, tensors: Mapping[str, Tensor] | None = None, replaces: Card | None = None
) -> Card:
    """Merge new measurements into the report card next to an SAE's weights, and return the merged report card.

    Earlier measurements for the same weights are kept unless they were repeated. `tensors` contains the texts that
    latents fire on and the tokens that latents promote; these are merged in the same way. The previous report card is
    archived as an older version, unless it equals `replaces`, a report card written by the same evaluation. Only one
    process writes at a time, and each file is written atomically. A README.md not written by `eval` is kept. Raise
    `UserError` if the disk fails or the weights have changed.
    """
    try:
        with locked(folder):
            weights = weights_of(folder)
            if card.weights not in ("", weights):
                raise UserError(f"{folder}: another SAE was written there during the evaluation; evaluate it again")
            before = of_weights(folder, weights, card.tokens, card.step)
            if replaces is None or not _is_in(folder, replaces):
                archive(folder)
            return _add(folder, msgspec.structs.replace(card, weights=weights), tensors or {}, before)
    except OSError as error:
        raise UserError(f"{folder}: the report card could not be written: {error.strerror or error}") from None


def _is_in(folder: Path, card: Card) -> bool:
    """Return whether the report card in a folder equals `card`."""
    with contextlib.suppress(OSError), open_plain(folder / CARD) as stream:
        return stream.read() == card.as_json()
    return False


def _add(folder: Path, card: Card, tensors: Mapping[str, Tensor], before: Version | None) -> Card:
    features = before.features if before and is_of_weights(before.features, card.weights) else None
    if tensors or features != folder / FEATURES:
        _put_features(folder, with_older(tensors, features), card.weights)
    card = with_latents(card.with_older(before.card if before else None), folder)
    readme = folder / MODEL_CARD
    if not readme.exists() or has_own_model_card(folder):
        write_whole(readme, model_card(card))
    write_whole(folder / CARD, card.as_json())
    if card.sums:
        write_whole(folder / SUMS, msgspec.json.encode(card.sums))
    return card


def _put_features(folder: Path, tensors: Mapping[str, Tensor], weights: str) -> None:
    """Write the features file; without tensors, remove the old file, which is damaged or belongs to other weights."""
    if tensors:
        write_features(folder, tensors, weights)
    else:
        with contextlib.suppress(OSError):
            (folder / FEATURES).unlink(missing_ok=True)


def timer(step: int, device: torch.device) -> Callable[..., Part]:
    """Start timing a part of an evaluation; return a function that creates a `Part` from the remaining fields."""
    began = time.monotonic()

    def part(n: int, unit: str, **fields: Any) -> Part:
        took = time.monotonic() - began
        return Part(measured=time.time(), step=step, n=n, unit=unit, device=device.type, seconds=took, **fields)

    return part


def rows_part(timed: Callable[..., Part], figures: Figures, data: EvaluationData) -> Part:
    settings = {"held_out": data.is_held_out, "max_norm": data.max_norm}
    return timed(figures.n_tokens, "rows", text=data.place, settings=settings)


def with_latents(card: Card, folder: Path) -> Card:
    """Add a sample of latents and the family counts to a report card if the folder has a valid features file."""
    with contextlib.suppress(UserError):
        features = Features(folder / FEATURES)
        return msgspec.structs.replace(card, latents=sample_latents(features), families=Counter(features.families))
    return card


def model_card(card: Card) -> str:
    """Return the report card as the Markdown text of a model card."""
    origin = {name: public_name(value) for name, value in card.origin.items() if value is not None}
    if card.spliced:
        card = msgspec.structs.replace(
            card, spliced=msgspec.structs.replace(card.spliced, text=public_name(card.spliced.text))
        )
    if card.effects:
        card = msgspec.structs.replace(
            card, effects=msgspec.structs.replace(card.effects, text=public_name(card.effects.text))
        )
    data = card.data
    stored_as = f" (stored as {in_markdown(data.stored_as)})" if data.stored_as else ""
    rows = "\n".join(f"| {_in_table(title)} | {_in_table(value)} |" for title, value in facts(card))
    where = "\n".join(f"- {name.replace('_', ' ')}: {in_markdown(str(value))}" for name, value in origin.items())
    shape = f"{card.figures.d_in} dimensions, {card.figures.d_sae:,} latents"
    return f"""{CARD_TITLE}: {in_markdown(card.title)}

{in_markdown(card.architecture)}, {shape}, trained on {card.tokens:,} tokens.
{where}

Measured on {data.rows(card.figures.n_tokens)}{stored_as}; {_left_out(data)}.

| | |
|---|---|
{rows}

Densities are counted in {BINS_PER_DECADE} bins per power of ten.{CARD_REST}
{"".join(_latents(card.latents))}"""


def _left_out(data: EvaluationData) -> str:
    """Return a clause listing the rows left out of all metrics."""
    others = [f"{plural(data.not_finite, 'row')} with values that are not finite"] if data.not_finite else []
    others += [f"zero rows ({data.zero_fraction:.2%})"] if data.drops_zero else []
    if not data.max_norm:
        left_out = f"; {join_words(others)} are left out" if others else ""
        return f"no rows are left out because of their norm{left_out}"
    far = f"rows with more than {data.max_norm:g} times the median norm\n({data.outlier_fraction:.2%})"
    return f"{join_words([far, *others])} are left out"


def _latents(latents: tuple[SampledLatent, ...]) -> Iterator[str]:
    """Yield the lines of a Markdown table of latents and their texts."""
    if not latents:
        return
    yield f"\n{len(latents)} random latents that fire, and where each fires most:\n\n"
    yield "| latent | fires on | texts |\n|---|---|---|\n"
    for one in latents:
        texts = " … ".join(_with_bold(marked(text, "\0", "\1")) for text in one.texts)
        yield f"| {one.latent} | {one.density:.3%} | {texts} |\n"


def _with_bold(text: str) -> str:
    """Escape a string for Markdown, with the part between the two markers in bold."""
    return MARKDOWN.sub(r"\\\1", text).replace("\0", "**").replace("\1", "**")


def _in_table(text: str) -> str:
    """Escape a value for a table cell, because an untrusted name in it must not end the cell or inject HTML."""
    return re.sub(r"([\\|<`])", r"\\\1", printable(text))
