"""How much a language model's loss changes if a latent is ablated: the figures on a report card, and their text.

An effect is the change of the loss in nats per prediction. It is positive if the loss increases, so that the latent
helps the model.
"""

from __future__ import annotations

import math

import msgspec

from trainer.contract.wording import bars, plural


class LargeEffect(msgspec.Struct, frozen=True):
    """A latent with a large effect, its standard error, and the effect per row on which the latent fires."""

    latent: int
    effect: float
    error: float = math.nan
    per_firing: float = math.nan


class AblatedLatent(msgspec.Struct, frozen=True):
    """A latent's estimated effect, and its effect measured by ablation, on the same tokens."""

    latent: int
    estimate: float
    ablation: float


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """The effects of all latents on the loss of a language model, estimated on `n_tokens` predictions.

    `loss` is the loss of the unchanged model. `n_firing` latents fire on the text. `n_helping` and `n_hurting` of them
    have effects above 0 and below 0 by more than 2 standard errors. `helping` and `hurting` are histograms of log10 of
    the effects above 0 and of the negated effects below 0, with the bins of `Figures.density_histogram`. `largest`
    contains the latents with the largest absolute effects.

    `ablated` compares the largest estimates with ablations on `n_ablated_tokens` of these predictions: their Pearson
    and Spearman correlations, and the `ratio` of Σ|estimate| to Σ|ablation|.
    """

    text: str
    is_unseen: bool
    n_tokens: int
    n_texts: int
    loss: float
    n_firing: int
    n_helping: int
    n_hurting: int
    helping: list[int]
    hurting: list[int]
    largest: tuple[LargeEffect, ...] = ()
    ablated: tuple[AblatedLatent, ...] = ()
    n_ablated_tokens: int = 0
    pearson: float = math.nan
    spearman: float = math.nan
    ratio: float = math.nan

    @property
    def tokens_read(self) -> str:
        texts = plural(self.n_texts, "text")
        return f"{self.n_tokens:,} {'unseen ' * self.is_unseen}tokens of {texts} in {self.text}"

    @property
    def agreement(self) -> str:
        """A clause about the agreement of estimates and ablations; "" if too few latents were ablated."""
        if not math.isfinite(self.pearson):
            return ""
        of = f"{plural(len(self.ablated), 'latent')} on {self.n_ablated_tokens:,} tokens"
        share = f"the estimates are {self.ratio:.2f} times as large in total"
        return f"{of}: Spearman {self.spearman:.3f}, Pearson {self.pearson:.3f}; {share}"


def with_error(effect: float, error: float | None = None) -> str:
    """Format an effect with its standard error, if known, like `+0.0388 ± 0.0036`."""
    is_known = error is not None and math.isfinite(error)
    return f"{effect:+.3g} ± {error:.2g}" if is_known else f"{effect:+.3g}"


def effect_facts(one: Effects) -> list[tuple[str, str]]:
    """Return the effects as pairs (title, text), for a terminal and a model card."""
    shown = f"10^-6 {bars(one.helping)} 1 help, {bars(one.hurting)} hurt"
    return [
        ("effects", f"{_counts(one)}; {shown}"),
        *([("largest effects", _largest(one))] if one.largest else []),
        *effect_remarks(one),
    ]


def effect_remarks(one: Effects) -> list[tuple[str, str]]:
    return [
        *([("ablated", one.agreement)] if one.agreement else []),
        ("effects on", one.tokens_read),
    ]


def _counts(one: Effects) -> str:
    if not all(math.isfinite(of.error) for of in one.largest):
        return f"{plural(one.n_firing, 'latent')} fire; too few texts to say how exact the effects are"
    clear = f"{one.n_helping:,} help and {one.n_hurting:,} hurt by more than 2 standard errors"
    return f"of {plural(one.n_firing, 'latent')} that fire, {clear}"


def _largest(one: Effects) -> str:
    """Return the latents with the largest effects, like `279: +0.0388 ± 0.0036, 828: -0.0154 ± 0.0014`."""
    return ", ".join(f"{of.latent}: {with_error(of.effect, of.error)}" for of in one.largest)
