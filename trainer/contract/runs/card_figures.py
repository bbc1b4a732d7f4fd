"""The figures on a report card: how each is named, formatted and read, which direction is better, and any cautions.

To add a figure, add one entry to `_FIGURES`; the screen and the comparison of two report cards then show it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from trainer.contract.runs.crosscoder import letter
from trainer.contract.runs.recipe import asked_l0, misses_l0
from trainer.contract.runs.report_card import (
    AS_SAELENS,
    LEAST_ROWS,
    Card,
    Caution,
    PatchedModel,
    Twin,
    data_cautions,
    few_cautions,
)
from trainer.contract.settings.catalog import METRICS, Series
from trainer.contract.store.seeds import Spread, seeds_of, spread_of
from trainer.contract.store.twins import frozen_in

Group = Literal["reconstruction", "parts", "model", "latents", "effects", "explanations", "probes", "all_tokens"]
_CE_SCORE = Series("CE score", better="higher", prominence="key")
_FVU, _L0, _DENSE = METRICS["fvu"].series, METRICS["l0"].series, METRICS["dense_fraction"].series


class CardFigure(msgspec.Struct, frozen=True):
    """A figure: its value, its standard error (None if it has none) and the properties of its series.

    `condition` is what two report cards must share for this figure to be ranked, such as the number of rows.
    """

    name: str
    group: Group
    series: Series
    value: float
    error: float | None = None
    condition: Any = None

    @property
    def text(self) -> str:
        return in_form(self.value, self.series)

    @property
    def error_text(self) -> str:
        return "" if self.error is None else in_form(self.error, self.series)


class _Declared(msgspec.Struct, frozen=True):
    """How to read a figure, and its error and condition if it has any, from a report card."""

    name: str
    group: Group
    series: Series
    read: Callable[[Card], float | None]
    error: Callable[[Card], float | None] = lambda card: None
    condition: Callable[[Card], Any] = lambda card: None


def in_form(value: float, series: Series) -> str:
    """Format a value from a report card, such as `0.2500` or `2.0%`."""
    return f"{value:{series.format}}"


def _like(series: Series, title: str, prominence: Literal["key", "result", "minor"] = "result", **more: Any) -> Series:
    """Return a copy of a series for another figure, for which the same direction is better."""
    return msgspec.structs.replace(series, title=title, prominence=prominence, **more)


def _of(*path: str) -> Callable[[Card], float | None]:
    """Return a function that reads a value at a path of attributes, or None if a part of the card is missing."""

    def read(card: Card) -> float | None:
        return functools.reduce(lambda part, name: None if part is None else getattr(part, name), path, card)  # type: ignore[return-value]

    return read


def _place(card: Card) -> str:
    return card.data.place


def _of_data(card: Card) -> tuple[object, ...]:
    """Return what two report cards must share for the figures of known features to be comparable."""
    return card.data.place, card.known.data if card.known else ""


def _rows(card: Card) -> tuple[object, ...]:
    return card.data.place, card.figures.n_tokens


def _transformed(card: Card) -> tuple[object, ...]:
    """Return where the rows are, and a description of the dimensions left out or scaled down in them."""
    return card.data.place, card.data.dimensions


def _refined(card: Card) -> tuple[object, ...]:
    """Return what two report cards must share for the figures of refined activations to be comparable."""
    return *_transformed(card), card.figures.refined.n_steps if card.figures.refined else 0


def _firing_correlation(card: Card) -> float | None:
    """Return the firing correlation, or None if it was not measured, or on too few rows."""
    return card.stability.firing_correlation if card.stability and card.stability.n_rows >= LEAST_ROWS else None


def texts_of(card: Card) -> tuple[object, ...] | None:
    """Return what two report cards must share for the language model's losses to be comparable.

    The loss without the SAE identifies the language model; it is rounded because two measurements of it differ in the
    last digits.
    """
    return _text_of(card.spliced)


def _texts_of_all(card: Card) -> tuple[object, ...] | None:
    """Return what two report cards must share for the losses with all MLPs replaced to be comparable."""
    return _text_of(card.together)


def _text_of(spliced: PatchedModel | None) -> tuple[object, ...] | None:
    if spliced is None:
        return None
    return spliced.text, spliced.n_tokens, spliced.n_texts, spliced.left_out, round(spliced.ce, 1)


def _explained_by(card: Card) -> tuple[object, ...] | None:
    """Return what two report cards must share for the scores of explanations to be comparable."""
    return (card.explained.models, card.explained.prompts) if card.explained else None


def _scores(name: str, prominence: Literal["key", "result"]) -> _Declared:
    """Return a mean score of the explanations of latents."""
    series = Series(name, better="higher", format=".3f", prominence=prominence)
    mean, error = _of("explained", name, "mean"), _of("explained", name, "error")
    return _Declared(name, "explanations", series, mean, error, _explained_by)


def _losses(group: Group, *path: str) -> Iterator[_Declared]:
    """Yield the figures for the language model's losses, which are read at a path of attributes."""
    prefix = "" if group == "model" else f"{group}_"
    loss = Series("loss with SAE", better="lower", prominence="key")
    minor = Series("", prominence="minor")
    for name, series in {"ce_score": _CE_SCORE, "kl_score": _like(_CE_SCORE, "KL score")}.items():
        error = _of(*path, f"{name}_error")
        yield _Declared(f"{prefix}{name}", group, series, _of(*path, name), error, condition=texts_of)
    yield _Declared(f"{prefix}loss_with_sae", group, loss, _of(*path, "ce_with_sae"), condition=texts_of)
    yield _Declared(f"{prefix}loss", group, _like(minor, "loss without", "result"), _of(*path, "ce"))
    yield _Declared(
        f"{prefix}loss_with_zeros", group, _like(minor, "loss, zeros", "minor"), _of(*path, "ce_with_zeros")
    )
    if group == "model":
        yield _Declared("loss_with_mean", group, _like(minor, "loss, mean row", "minor"), _of(*path, "ce_with_mean"))
    kl = _like(loss, "KL with SAE")
    yield _Declared(f"{prefix}kl_with_sae", group, kl, _of(*path, "kl_with_sae"), condition=texts_of)
    explained = _like(METRICS["explained_variance"].series, "explained variance", "minor", format=".2%")
    explains = _of(*path, "rows", "explained_variance")
    yield _Declared(f"{prefix}explained", group, explained, explains, condition=texts_of)
    yield _Declared(f"{prefix}l0", group, _like(_L0, "L0", "minor"), _of(*path, "rows", "l0"))


def _of_rows(name: str, series: Series, group: Group = "reconstruction", **more: Any) -> _Declared:
    return _Declared(name, group, series, _of("figures", name), **{"condition": _transformed} | more)


_FIGURES = (
    _of_rows("fvu", _FVU, error=_of("figures", "fvu_error")),
    _of_rows("fvu_all_dimensions", _like(_FVU, "FVU, raw rows"), condition=_place),
    _Declared("refined_fvu", "reconstruction", _like(_FVU, "FVU, refined"), _of("figures", "refined", "fvu"),
              _of("figures", "refined", "fvu_error"), _refined),
    _Declared("refined_l0", "reconstruction", _like(_L0, "L0, refined"), _of("figures", "refined", "l0")),
    _of_rows("median_row_fvu", _like(_FVU, "median row FVU")),
    # The explained variance is 1 - FVU, with the same error.
    _of_rows("explained_variance", _like(METRICS["explained_variance"].series, "explained variance", format=".2%"),
             error=_of("figures", "fvu_error")),
    _of_rows("cosine", Series("cosine", better="higher", prominence="minor")),
    _of_rows("mse", Series("MSE", better="lower", format=".4g", prominence="minor")),
    # A value of 1 is best for both, so neither direction is better.
    _of_rows("l2_ratio", Series("shrinkage", prominence="minor")),
    _of_rows("relative_reconstruction_bias", Series("shrinkage, bias", prominence="minor")),
    *_losses("model", "spliced"),
    _of_rows("l0", _like(_L0, "L0", "key"), "latents"),
    # More latents fire if more rows are read, so the number of rows must match.
    _of_rows("dead", _like(METRICS["dead_fraction"].series, "never fire"), "latents",
             error=_of("figures", "dead_error"), condition=_rows),
    _of_rows("rare", Series("rare", format=".1%", prominence="minor"), "latents"),
    _Declared("dense_1", "latents", _like(_DENSE, "fire on > 1 %", "minor", format=".1%"),
              lambda card: card.figures.dense(0.01), condition=_transformed),
    _Declared("dense_10", "latents", _like(_DENSE, "fire on > 10 %", format=".1%"),
              lambda card: card.figures.dense(0.1), condition=_transformed),
    _of_rows("max_decoder_cosine", Series("nearest decoder", format=".3f"), "latents"),
    _Declared("stable", "latents", Series("stable over seeds", better="higher", format=".1%", prominence="key"),
              _of("stability", "share")),
    _Declared("pw_mcc", "latents", Series("PW-MCC over seeds", better="higher", format=".3f"),
              _of("stability", "pw_mcc")),
    _Declared("firing_correlation", "latents", Series("firing correlation", better="higher", format=".3f"),
              _firing_correlation, condition=_of("stability", "rows")),
    _Declared("f1", "latents", Series("F1, known features", better="higher", format=".3f", prominence="key"),
              _of("known", "f1"), _of("known", "f1_error"), _of_data),
    _Declared("precision", "latents", Series("precision", better="higher", format=".3f"), _of("known", "precision"),
              condition=_of_data),
    _Declared("recall", "latents", Series("recall", better="higher", format=".3f"), _of("known", "recall"),
              condition=_of_data),
    _Declared("mcc", "latents", Series("MCC, features", better="higher", format=".3f"), _of("known", "mcc"),
              condition=_of_data),
    _Declared("uniqueness", "latents", Series("uniqueness", better="higher", format=".3f"), _of("known", "uniqueness"),
              condition=_of_data),
    _Declared("true_l0", "latents", Series("true L0", format=".1f", prominence="minor"), _of("known", "true_l0")),
    _Declared("recovery", "latents", Series("recovery (MMCS)", better="higher", format=".3f"), _of("recovery")),
    _Declared("effects_spearman", "effects", Series("Spearman, ablated", format=".3f"), _of("effects", "spearman")),
    _Declared("effects_pearson", "effects", Series("Pearson, ablated", format=".3f"), _of("effects", "pearson")),
    _Declared("effects_ratio", "effects", Series("estimate / true", format=".2f"), _of("effects", "ratio")),
    _Declared("explained", "explanations", Series("latents described", format=",.0f", prominence="minor"),
              _of("explained", "n_latents")),
    _scores("detection", "key"),
    _scores("fuzzing", "result"),
    *_losses("all_tokens", "spliced", "all_tokens"),
    _Declared("together_ce_score", "model", _like(_CE_SCORE, "CE score, all MLPs"), _of("together", "ce_score"),
              _of("together", "ce_score_error"), _texts_of_all),
    _Declared("together_loss", "model", _like(_CE_SCORE, "loss, all MLPs", better="lower"),
              _of("together", "ce_with_sae"), condition=_texts_of_all),
)  # fmt: skip


def figures_of(card: Card) -> list[CardFigure]:
    """Return the measured figures of a report card."""
    found = [
        _figure(one.name, one.group, one.series, one.read(card), one.error(card), one.condition(card))
        for one in _FIGURES
    ]
    return [one for one in (*found, *_parts(card), *_probes(card)) if one is not None]


def over_seeds(cards: Mapping[str, Card], label: str) -> list[tuple[CardFigure, Spread]]:
    """Return an SAE's figures with their spreads over the SAEs that differ from it only in the seed.

    `cards` maps the label of each SAE in a sweep to its report card. Figures that some of the report cards lack, or
    that were measured under different conditions, are left out. Return [] for one seed.
    """
    own = [figures_of(cards[other]) for other in seeds_of(cards, label)]
    found = []
    for figure in figures_of(cards[label]) if len(own) > 1 else ():
        like = (figure.name, figure.condition)
        values = [one.value for figures in own for one in figures if (one.name, one.condition) == like]
        # Two SAEs have the same PW-MCC, since each is compared with the other.
        is_mutual = figure.name == "pw_mcc" and len(own) == 2
        if len(values) == len(own) and not is_mutual and (spread := spread_of(values)):
            found.append((figure, spread))
    return found


def twin_of(card: Card, label: str, other: Card) -> Twin:
    """Return the random twin `label` described by the report card `other`, with the figures that can be compared."""
    frozen = frozen_in(label)
    assert frozen is not None, label
    own = {one.name: one.condition for one in figures_of(card)}
    known = [one for one in figures_of(other) if one.name in own and own[one.name] == one.condition]
    return Twin(
        label=label,
        frozen=frozen,
        figures={one.name: one.value for one in known},
        errors={one.name: one.error for one in known if one.error is not None},
    )


def next_to_twins(card: Card) -> Iterator[tuple[CardFigure, list[tuple[Twin, str]]]]:
    """Yield an SAE's main figures, each with the twins that also have it and the twins' values and errors as text."""
    for figure in figures_of(card):
        known = [twin for twin in card.twins if figure.name in twin.figures]
        if known and figure.series.prominence == "key":
            yield figure, [(twin, _twin_text(twin, figure)) for twin in known]


def _twin_text(twin: Twin, like: CardFigure) -> str:
    error = twin.errors.get(like.name)
    return _with_error(msgspec.structs.replace(like, value=twin.figures[like.name], error=error))


def _with_error(figure: CardFigure) -> str:
    return f"{figure.text} ± {figure.error_text}" if figure.error_text else figure.text


def _figure(
    name: str, group: Group, series: Series, value: float | None, error: float | None, condition: Any = None
) -> CardFigure | None:
    value, error = _finite(value), _finite(error)
    return None if value is None else CardFigure(name, group, series, value, error, condition)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _parts(card: Card) -> Iterator[CardFigure | None]:
    """Yield the figures for a crosscoder's parts, named after their letters."""
    if (crosscoder := card.figures.crosscoder) is None:
        return
    for number, part in enumerate(crosscoder.parts):
        name = letter(number)
        fvu = _like(_FVU, f"FVU, {name}", "key")
        yield _figure(f"fvu_{name}", "parts", fvu, part.fvu, part.fvu_error, _transformed(card))
    count = Series("", format=",.0f")
    for number, part in enumerate(crosscoder.parts):
        name = letter(number)
        only = _like(count, f"only in {name}")
        yield _figure(f"only_{name}", "parts", only, part.n_only, None, _rows(card))
        if part.n_confirmed is not None:
            yield _figure(f"confirmed_{name}", "parts", _like(count, "  confirmed", "minor"), part.n_confirmed, None)
    yield _figure("shared", "parts", _like(count, "shared"), crosscoder.n_shared, None, _rows(card))
    yield _figure("other_parts", "parts", _like(count, "other", "minor"), crosscoder.n_other, None, _rows(card))


def _probes(card: Card) -> Iterator[CardFigure | None]:
    """Yield the figures for the probes; the probe on all activations does not depend on the SAE."""
    if card.probing is None:
        return
    auc, raw = Series("AUC", better="higher", format=".3f", prominence="key"), Series("AUC, activations", format=".3f")
    for k, one in card.probing.k.items():
        yield _figure(f"auc_{k}", "probes", _like(auc, f"AUC, k = {k}", "key"), one.auc, one.seed_error)
    dense = card.probing.dense
    yield _figure("auc_dense", "probes", _like(raw, raw.title, "minor"), dense.auc, dense.seed_error)


def title_of_group(group: Group, card: Card) -> str:
    """Return the heading of a group of figures."""
    left_out = card.spliced.left_out if card.spliced else None
    which = "" if left_out is None else f", without {left_out}" if left_out else f", {AS_SAELENS.partition(',')[0]}"
    return {
        "reconstruction": "Reconstruction",
        "parts": "Parts of the crosscoder",
        "model": f"Language model{which}",
        "latents": "Latents",
        "effects": "Effect of each latent (nats/token)",
        "explanations": "Explanations of latents",
        "probes": "Probes",
        "all_tokens": AS_SAELENS[:1].upper() + AS_SAELENS[1:],
    }[group]


def cautions(card: Card) -> list[Caution]:
    """Return the reasons for caution about the figures on a report card, each with a remedy."""
    found = [*few_cautions(card), *data_cautions(card.data)]
    l0, target, training = card.figures.l0, card.target_l0, card.training
    if card.data.is_trained_on:
        text = "the SAE was trained on these rows, so the FVU is too low"
        found.append(Caution(text, "hold out rows with data.held_out_tokens, or evaluate on other rows"))
    if misses_l0(l0, target):
        found.append(Caution(f"L0 is {l0:.1f}, {asked_l0(l0, target)}", "compare the FVU only at the same L0"))
    if training and training.unfinished:
        found.append(Caution(training.unfinished, "resume the job to finish it"))
    if training and training.overfitting:
        best = ", or export the best checkpoint with --best" if training.best else ""
        found.append(Caution(training.overfitting, f"train on more rows{best}"))
    return found
