"""The report card stored next to an SAE's weights: its content, and its text for a terminal."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trainer.contract.json_file import convert_as, read_json
from trainer.contract.runs.crosscoder import Crosscoder, part_facts, part_remarks
from trainer.contract.runs.effects import Effects, effect_facts, effect_remarks
from trainer.contract.runs.explanations import CHANCE, ExplainedLatents, ExplanationsFile
from trainer.contract.runs.features import CARD, ActivatingExample, Features
from trainer.contract.runs.how_far import HowFar
from trainer.contract.runs.recipe import Recipe, asked_l0, misses_l0, recipe_lines
from trainer.contract.runs.row_sums import RowSums
from trainer.contract.store.rows import Time
from trainer.contract.store.twins import Frozen
from trainer.contract.wording import DROP_ZERO_ROWS, MANY_ZERO, bars, join_words, plural, zero_rows

# The histogram of densities starts at 10^LOWEST_DECADE.
LOWEST_DECADE = -6
BINS_PER_DECADE = 2
# A latent is rare if the share of rows on which it fires is at most `RARE`. With fewer rows than `LEAST_ROWS_FOR_RARE`,
# the share of rare latents is unknown.
RARE = 1e-4
LEAST_ROWS_FOR_RARE = round(10 / RARE)
# With fewer rows, too few rows say whether a latent fires on more than 1 % or 10 % of them; about 10 must be expected.
LEAST_ROWS_FOR_DENSE = {0.01: 1000, 0.1: 100}
# With fewer rows, no figure is exact; the standard error of a correlation is above 0.1.
LEAST_ROWS = 100
# With fewer texts or blocks, no standard error is shown: with 3 texts it has 2 degrees of freedom, and Student's t
# then has no finite variance.
LEAST_CLUSTERS = 4
# The number of latents sampled for the report card, and the number of texts per latent.
N_SAMPLED, N_TEXTS = 20, 2
UNKNOWN = "–"
# Copies are reported if at least this share of the held-out rows also occurs in the training rows. A few copies are
# normal because some short texts always occur twice.
MANY_COPIES = 0.02
# The suffix for metrics that follow SAELens' definition.
AS_SAELENS = "all tokens, as in SAELens"
_FAMILY_WORDS = {
    "dense": "dense",
    "token": "fire on one token",
    "position": "at one position",
    "rare": "rarely",
    "silent": "never",
    "other": "other",
}
_LINE_ENDS = str.maketrans({"\n": "⏎", "\r": "⏎", "\t": " "})


class Reconstruction(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of the reconstructions x̂ of rows y.

    `explained_variance` is 1 − FVU, `mse` is the mean of ‖y − x̂‖², and `l2_ratio` is the mean of ‖x̂‖ / ‖y‖.
    `relative_reconstruction_bias` is E‖x̂‖² / E⟨y, x̂⟩; a value below 1 means that reconstructions are too short.
    """

    explained_variance: float = math.nan
    mse: float = math.nan
    cosine: float = math.nan
    l0: float = math.nan
    l2_ratio: float = math.nan
    relative_reconstruction_bias: float = math.nan


class AtK(msgspec.Struct, frozen=True):
    """The FVU and its standard error if only the k largest activations of each row are used."""

    k: int
    fvu: float = math.nan
    fvu_error: float = math.nan


class Refined(msgspec.Struct, frozen=True):
    """The FVU, its standard error and the L0 of activations that `n_steps` steps of refinement have improved.

    Only `encode(x, refine=n_steps)` in Python computes these activations; other tools do not.
    """

    n_steps: int
    fvu: float = math.nan
    fvu_error: float = math.nan
    l0: float = math.nan


class LayerFigures(msgspec.Struct, frozen=True):
    """The place of a layer in a cross-layer transcoder, counted from 0, and where its reconstruction comes from.

    `from_earlier` is the share of Σ‖·‖² that latents of earlier layers write to the layer's target, out of what they
    and the layer's own latents write.
    """

    layer: int
    n_layers: int
    from_earlier: float

    @property
    def words(self) -> str:
        later, earlier = self.n_layers - 1 - self.layer, self.layer
        also = f"its latents also write to {plural(later, 'later layer')}" if later else "its latents write to no other"
        share = (
            f"; earlier layers write {self.from_earlier:.0%} of its reconstruction (by squared norms)"
            if earlier
            else ""
        )
        return f"layer {self.layer + 1} of {self.n_layers}; {also}{share}"


class Figures(Reconstruction, frozen=True, kw_only=True):
    """An SAE's metrics on `n_tokens` rows.

    `fvu` is Σ‖y − x̂‖² / Σ‖y − mean‖², and `fvu_error` is its standard error over `n_clusters` groups of dependent
    rows, either texts or blocks of neighbouring rows (`clustered_by`: "texts" or "blocks"). `median_row_fvu` is the
    median of ‖y − x̂‖² / ‖y − mean‖², a metric robust to outliers.

    Four metrics are shares of the latents. `dead` is the share that never fires on these rows, and `rare` is the share
    that fires on at most `RARE` of the rows (None below `LEAST_ROWS_FOR_RARE` rows). `dense_1` and `dense_10` are the
    shares that fire on more than 1 % and more than 10 % of the rows. `density_histogram` is a histogram of log10 of the
    share of rows on which a latent fires, in `BINS_PER_DECADE` bins per decade from `LOWEST_DECADE` to 0; it excludes
    latents that never fire. `l0_below_most` is the share of rows with fewer active latents than the row with the most:
    for TopK, the rows with fewer than k positive pre-activations. `max_decoder_cosine` is the mean over latents of the
    largest cosine between the latent's decoder direction and the direction of any other latent.

    If training left out dimensions or scaled them down, all metrics are measured on rows transformed in the same way,
    and `fvu_all_dimensions` is the FVU on the raw rows. Otherwise, `fvu_all_dimensions` is None.

    `by_k` lists the FVU for each k that the SAE is trained for, in ascending order of k. It is empty for most SAEs.
    `refined` is None unless the evaluation was asked to refine activations.
    `crosscoder` contains the figures of a crosscoder's parts; it is None for other SAEs. `layer` is None unless the SAE
    is a layer of a cross-layer transcoder.
    """

    n_tokens: int
    d_in: int
    d_sae: int
    fvu: float
    fvu_error: float = math.nan
    n_clusters: int = 0
    clustered_by: str = ""
    median_row_fvu: float = math.nan
    l0_quantiles: Annotated[list[float], msgspec.Meta(min_length=5, max_length=5)]
    dead: float
    dead_error: float = math.nan
    rare: float | None = None
    dense_1: float
    dense_10: float
    density_histogram: list[int]
    max_decoder_cosine: float = math.nan
    l0_below_most: float | None = None
    fvu_all_dimensions: float | None = None
    by_k: tuple[AtK, ...] = ()
    crosscoder: Crosscoder | None = None
    refined: Refined | None = None
    layer: LayerFigures | None = None

    def dense(self, least: float) -> float | None:
        """Return the share of latents that fire on more than 1 % or 10 % of the rows; None for too few rows."""
        if self.n_tokens < LEAST_ROWS_FOR_DENSE[least]:
            return None
        return self.dense_1 if least == 0.01 else self.dense_10


class TextRows(Reconstruction, frozen=True, kw_only=True):
    """The quality of the reconstructions that replace `n_rows` rows in the language model."""

    n_rows: int


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """A language model's losses, in nats per prediction, averaged over `n_tokens` predictions.

    Rows of activations are replaced with the SAE's reconstructions (`…_with_sae`) or with zeros (`…_with_zeros`).
    `ce_score` is (zeros − SAE) / (zeros − clean); `kl_score` is the same ratio for the KL divergence from the unchanged
    model. The fields `…_error` are standard errors of the scores.
    """

    n_tokens: int
    ce: float = math.nan
    ce_with_sae: float = math.nan
    ce_with_zeros: float = math.nan
    ce_score: float = math.nan
    ce_score_error: float = math.nan
    kl_with_sae: float = math.nan
    kl_with_zeros: float = math.nan
    kl_score: float = math.nan
    kl_score_error: float = math.nan


class AllTokens(Losses, frozen=True, kw_only=True):
    """The losses with every row replaced and included in the means, as in SAELens' evaluation.

    The first token of a context is often an attention sink with a hundred times the usual norm, and SAEs are not
    trained on such tokens. One SAE had a CE score of 0.97 without first tokens and 0.63 with first tokens.
    """

    rows: TextRows


class PatchedModel(Losses, frozen=True, kw_only=True):
    """The losses if only rows that an extraction for this SAE would keep are replaced.

    All other rows are left unchanged and excluded from the means. `left_out` describes the excluded rows (such as
    "first tokens"), or is None if unknown. Standard errors are computed over `n_texts` texts. For `ce_with_mean`, rows
    are replaced with the mean row of the data. `is_unseen` is set if the text is known to come after the extracted
    text. `rows` is the reconstruction quality, and `all_tokens` contains the losses with all rows replaced.
    """

    text: str
    is_unseen: bool
    n_texts: int = 0
    left_out: str | None = None
    rows: TextRows | None = None
    all_tokens: AllTokens | None = None
    ce_with_mean: float | None = None
    # The number of hooks whose rows are replaced.
    n_replaced: int = 1


class Auc(msgspec.Struct, frozen=True, kw_only=True):
    """The mean AUC on test texts over data sets and seeds; `of_sets` maps each data set to its mean AUC over seeds.

    `seed_error` is the standard error of `auc` over splits into training and test texts, and applies only to these data
    sets. `set_error` is the standard error over data sets, so it generalises to other tasks. It is None if there is
    only one data set.
    """

    auc: float
    seed_error: float = math.nan
    set_error: float | None = None
    of_sets: dict[str, float]


class Probing(msgspec.Struct, frozen=True):
    """The AUC of probes.

    The field `k` maps each number k to the AUC of probes on the k best latents. `dense` is the AUC of probes on the raw
    activations.
    """

    n_sets: int
    n_seeds: int
    n_texts: int
    k: dict[str, Auc]
    dense: Auc


# A latent is stable if the cosine of its decoder direction with a decoder direction from another seed exceeds this
# value.
STABLE_COSINE = 0.7


class Stability(msgspec.Struct, frozen=True, kw_only=True):
    """How many of an SAE's latents were also found by the SAEs `others`, which differ only in the seed.

    For each latent, the largest cosine of its decoder direction with any decoder direction of another SAE is averaged
    over the other SAEs. `share` is the share of latents whose average exceeds `STABLE_COSINE`, and `median` is the
    median of these averages. `encoder_share` is the same share for encoder directions. `pw_mcc` is the mean cosine
    under the best one-to-one matching of decoder directions, averaged over the other SAEs; None if it was not computed.

    `firing_correlation` is a mean over the latents that fire: the correlation over `n_rows` rows of a latent's
    activations with those of the latent that has the nearest decoder direction in another SAE, averaged over the other
    SAEs. It is None if it was not measured, as by older versions. `rows` is a digest of these rows.
    """

    others: tuple[str, ...]
    share: float = math.nan
    median: float = math.nan
    encoder_share: float = math.nan
    pw_mcc: float | None = None
    firing_correlation: float | None = None
    n_rows: int = 0
    rows: str = ""


class KnownFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """How well latents detect the known features of synthetic data, on `n_rows` rows that no run was trained on.

    Each latent is judged as a detector of the feature with the nearest direction. `f1`, `precision` and `recall` are
    means over the latents, and `f1_error` is the standard error of the mean. `uniqueness` is the number of distinct
    nearest features per latent. `mcc` is the mean absolute cosine under the best one-to-one matching, or None if it was
    not computed. `true_l0` is the mean number of features that fire on a row. `data` is a digest of the data's
    settings.
    """

    n_features: int
    n_rows: int
    data: str = ""
    true_l0: float = math.nan
    f1: float = math.nan
    f1_error: float = math.nan
    precision: float = math.nan
    recall: float = math.nan
    uniqueness: float = math.nan
    mcc: float | None = None


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """A random twin of an SAE: its label, the weights that it keeps frozen, and its figures by name.

    `errors` maps the names of figures to their standard errors, if known.
    """

    label: str
    frozen: Frozen
    figures: dict[str, float]
    errors: dict[str, float] = {}

    @property
    def words(self) -> str:
        """The frozen weights, such as `random decoder`."""
        return "random encoder and decoder" if self.frozen == "both" else f"random {self.frozen}"


# The key of random twins in an exported SAE's metadata.
TWINS = "random_twins"
# The figures that are listed for a random twin, with their titles and formats.
_TWIN_FIGURES = {
    "fvu": ("FVU", ".4f"),
    "ce_score": ("CE score", ".4f"),
    "kl_score": ("KL score", ".4f"),
    "f1": ("F1", ".3f"),
}
_AUC = re.compile("auc_([0-9]+)")


class EvaluationData(msgspec.Struct, frozen=True, kw_only=True):
    """The rows used to measure an SAE.

    `is_held_out` is set if the rows belong to the run's `n_held_out` held-out rows. `is_trained_on` is set if the SAE
    is known to have been trained on the rows. `gamma` is ‖mean‖/‖std‖. `not_finite` is the number of non-finite rows,
    and `outlier_fraction` is the share of rows with an enormous norm; all metrics exclude both. `heavy` is a sentence
    about a few dimensions accounting for most of the variance, or "". `dimensions` is a sentence about dimensions that
    training left out or scaled down, or "". `zero_fraction` is the share of zero rows; the run leaves these out if
    `drops_zero` is set. `hold_out` is the unit of the held-out split: "texts", "blocks" or "rows". `copies` is the
    share of held-out rows that are identical to a compared training row, or None if no rows were compared. `stored_as`
    is a phrase about the rows' encoding and its noise, or "" if they are stored as numbers.
    """

    place: str
    is_held_out: bool
    gamma: float = math.nan
    outlier_fraction: float
    not_finite: int
    max_norm: float
    n_held_out: int = 0
    is_trained_on: bool = False
    heavy: str = ""
    hold_out: str = ""
    copies: float | None = None
    dimensions: str = ""
    zero_fraction: float = 0.0
    drops_zero: bool = False
    stored_as: str = ""

    def rows(self, n: int) -> str:
        """Return a description of `n` measured rows, such as `1,024 of 4,096 held-out rows`."""
        if self.is_held_out:
            of_all = f" of {self.n_held_out:,}" if n < self.n_held_out else ""
            return f"{n:,}{of_all} held-out rows{' (texts not used in training)' * (self.hold_out == 'texts')}"
        return f"{n:,} {'training ' * self.is_trained_on}rows"


class SampledText(msgspec.Struct, frozen=True):
    """The token at index `at`, on which a latent fires most, with its activation `act` and the tokens around it."""

    tokens: tuple[str, ...]
    at: int
    act: float


class SampledLatent(msgspec.Struct, frozen=True):
    """A latent, the share of rows on which it fires, and the texts on which it fires most."""

    latent: int
    density: float
    texts: tuple[SampledText, ...]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """When, on what data and with what settings one part of a report card was measured.

    `measured` is the time in seconds since the epoch. `step` is the SAE's training step, or 0 if unknown. `text` names
    the data, and `n` is its amount in `unit`: rows, tokens, texts or latents. `model` is the language model, or "" if
    none was used. `settings` contains the settings affecting the results. `seconds` is the duration on `device`.
    """

    measured: Time
    step: int
    n: int
    unit: str
    text: str = ""
    model: str = ""
    settings: dict[str, Any] = {}
    device: str = ""
    seconds: float | None = None


# The parts of a report card and their titles. Each part is measured separately, and its results are kept until the part
# is measured again.
ROWS, IN_MODEL, PROBES, FIRES_ON, PROMOTED = "rows", "model", "probes", "fires_on", "promoted"
EFFECTS = "effects"
PART_TITLES = {
    ROWS: "rows",
    IN_MODEL: "in the model",
    EFFECTS: "effect of each latent",
    PROBES: "probes",
    FIRES_ON: "max-activating examples",
    PROMOTED: "promoted tokens",
}


class Card(msgspec.Struct, frozen=True):
    """The report card for an SAE: its identity, data and metrics.

    `recovery` is the mean maximum cosine similarity (MMCS) with the known features of synthetic data, and `known` says
    how well latents detect these features. `latents` is a random sample of the latents that fire, and is empty if their
    texts are unknown. `recipe` contains the training settings, and `training` the run's state; both are None if
    unknown. `threshold_set_on` names the rows on which the SAE's single threshold was set to reach the target L0, or is
    "" for an SAE without a single threshold. `weights` is a digest of the weights described by all `parts`. `features`
    is a digest of the stored features file. `effects` says how much the language model's loss changes if latents are
    ablated. `together` contains the losses if the outputs of all MLPs are replaced at
    once, by the run's transcoders or its cross-layer transcoder; it is None for other SAEs. `stability` is None for an
    SAE that was trained with one seed. `twins` are the random twins trained alongside the SAE. `families` maps each of
    `features.FAMILIES` to its number of latents; it is empty if no max-activating examples are stored. `explained`
    summarises the descriptions of latents. It is None in a stored report card, since descriptions are written later;
    `with_explanations` adds it.
    """

    name: str
    label: str
    architecture: str
    step: int
    tokens: int
    origin: dict[str, Any]
    data: EvaluationData
    figures: Figures
    recovery: float | None = None
    known: KnownFeatures | None = None
    spliced: PatchedModel | None = None
    together: PatchedModel | None = None
    effects: Effects | None = None
    probing: Probing | None = None
    latents: tuple[SampledLatent, ...] = ()
    # The sums are stored in a separate file.
    sums: RowSums | None = None
    recipe: Recipe | None = None
    threshold_set_on: str = ""
    training: HowFar | None = None
    weights: str = ""
    parts: dict[str, Part] = {}
    features: str = ""
    stability: Stability | None = None
    twins: tuple[Twin, ...] = ()
    families: dict[str, int] = {}
    explained: ExplainedLatents | None = None

    @property
    def target_l0(self) -> int | None:
        return self.recipe.target_l0 if self.recipe else None

    @property
    def title(self) -> str:
        return " ".join(word for word in (self.name, self.label) if word)

    def is_of(self, weights: str, tokens: int, step: int) -> bool:
        """Return whether this report card is for the given weights, by digest or, if missing, by tokens and step."""
        if self.weights and weights:
            return self.weights == weights
        return self.tokens == tokens and (self.step == step or not (self.step and step))

    def with_older(self, older: Card | None) -> Card:
        """Return this report card with its missing parts taken from an older report card for the same weights."""
        if older is None or not older.is_of(self.weights, self.tokens, self.step):
            return self
        rows = self if ROWS in self.parts or not self.parts else older
        # The figures of random twins and of known features are valid only for the same rows.
        same_rows = (older.data.place, older.figures.n_tokens) == (rows.data.place, rows.figures.n_tokens)
        refined = rows.figures.refined or (older.figures.refined if same_rows else None)
        return msgspec.structs.replace(
            self,
            data=rows.data,
            figures=msgspec.structs.replace(rows.figures, refined=refined),
            # If an SAE's folder is evaluated without its run, fields such as the label and the step are unknown.
            label=self.label or older.label,
            step=self.step or older.step,
            recovery=older.recovery if self.recovery is None else self.recovery,
            known=self.known or (older.known if same_rows else None),
            spliced=self.spliced or older.spliced,
            together=self.together or older.together,
            effects=self.effects or older.effects,
            probing=self.probing or older.probing,
            stability=self.stability or older.stability,
            twins=self.twins or (older.twins if same_rows else ()),
            parts=older.parts | self.parts,
        )

    def as_json(self) -> bytes:
        table = as_table(self)
        del table["explained"]
        # Unlike msgspec, json can write file names that are not UTF-8.
        return json.dumps(table, indent=2).encode() + b"\n"


def read_card(folder: Path) -> Card | None:
    """Return the report card for the SAE in a folder, or None if it is missing or cannot be read."""
    table = read_json(folder / CARD, dict[str, Any])
    return None if table is None else card_from(table)


def card_from(table: dict[str, Any]) -> Card | None:
    """Return the report card in a table read from JSON, or None if the table is not valid."""
    try:
        return msgspec.structs.replace(convert_as(_without_unknown(table), Card), explained=None)
    except (msgspec.ValidationError, RecursionError):
        return None


def with_explanations(card: Card, stored: ExplanationsFile) -> Card:
    """Add a summary of the stored explanations that describe the weights of a report card."""
    return msgspec.structs.replace(card, explained=stored.summary_of(card.weights, card.figures.d_sae))


def _without_unknown(value: Any) -> Any:
    """Remove null entries, which represent non-finite numbers, so that the fields get their default values."""
    if isinstance(value, dict):
        return {name: _without_unknown(one) for name, one in value.items() if one is not None}
    return [_without_unknown(one) for one in value] if isinstance(value, list) else value


def as_table(card: Card) -> dict[str, Any]:
    """Return the report card as a table for JSON; non-finite numbers become None."""
    table: dict[str, Any] = _numbers_or_none(msgspec.to_builtins(msgspec.structs.replace(card, sums=None)))
    del table["sums"]
    return table


def _numbers_or_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers_or_none(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_or_none(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sample_latents(features: Features, seed: int = 0) -> tuple[SampledLatent, ...]:
    """Return a random sample of at most `N_SAMPLED` firing latents."""
    alive = features.order("latent")
    drawn = sorted(random.Random(seed).sample(alive, min(N_SAMPLED, len(alive))))
    return tuple(_sampled(features, latent) for latent in drawn)


def _sampled(features: Features, latent: int) -> SampledLatent:
    feature = features.feature(latent)
    return SampledLatent(latent, feature.density, tuple(map(_text, feature.contexts[:N_TEXTS])))


def _text(context: ActivatingExample) -> SampledText:
    return SampledText(tuple(token.text for token in context.tokens), context.at, context.act)


def lines(card: Card) -> list[str]:
    """Return the report card as lines for a terminal."""
    table = facts(card)
    width = max(len(title) for title, _ in table)
    return [*title_lines(card), *(f"  {title:<{width}}  {value}" for title, value in table)]


def title_lines(card: Card) -> list[str]:
    """Return lines describing the SAE, its rows and, if known, when it was measured."""
    figures, data = card.figures, card.data
    rows = f"{data.rows(figures.n_tokens)} of {data.place}{f' (stored as {data.stored_as})' * bool(data.stored_as)}"
    counts = {"with a huge norm": data.outlier_fraction and f"{data.outlier_fraction:.2%}"}
    counts |= {"not finite": data.not_finite and f"{data.not_finite:,}"}
    counts |= {"zero": data.drops_zero and data.zero_fraction and f"{data.zero_fraction:.2%}"}
    reasons = [f"{share} {reason}" for reason, share in counts.items() if share]
    left_out = f", {join_words(reasons)} left out" if reasons else ""
    step = f", step {card.step:,}" if card.step else ""
    return [
        f"{card.title}: {card.architecture}, {figures.d_in} -> {figures.d_sae:,}{step}",
        f"on {rows}{left_out}",
        *([f"measured: {of_parts(card)}"] if card.parts else []),
    ]


def of_parts(card: Card) -> str:
    """Return when and on what data parts were measured, like `rows 2026-11-27 09:20, 819 rows · in the model …`."""
    return " · ".join(
        f"{PART_TITLES.get(name, name)} {time.strftime('%Y-%m-%d %H:%M', time.localtime(part.measured))}, "
        f"{part.n:,} {part.unit}{f' by {Path(part.model).name}' if part.model else ''}"
        for name, part in card.parts.items()
        if name in (ROWS, IN_MODEL, EFFECTS, PROBES)
    )


def summary(card: Card) -> str:
    """Return a one-line report card: the most important metrics, the rows, and caveats about the metrics."""
    one = card.figures
    missed = f" ({asked_l0(one.l0, card.target_l0)})" if misses_l0(one.l0, card.target_l0) else ""
    quality = f"{quality_words(card)}, L0 {one.l0:.1f}{missed}"
    dense = one.dense(0.1)
    latents = f"{one.dead:.1%} did not fire" + ("" if dense is None else f", {dense:.1%} dense")
    latents += f", {card.stability.share:.1%} stable over seeds" if card.stability else ""
    latents += f", F1 {_with_error(card.known.f1, card.known.f1_error, '.3f')} on known features" if card.known else ""
    latents += f", {card.explained.words}" if card.explained else ""
    unfinished = card.training.unfinished if card.training else ""
    of_data = (one.text for one in [*data_cautions(card.data), *few_cautions(card)])
    notes = [note for note in (_of_dimensions(card), *of_data, unfinished) if note]
    return "; ".join([f"{quality}, {latents}, on {card.data.rows(one.n_tokens)}", *notes])


def quality_words(card: Card) -> str:
    """Return the FVU and the FVUs of random twins, like `FVU 0.1419 ± 0.0028, 0.5836 with a random decoder`."""
    of_twins = [f"{twin.figures['fvu']:.4f} with a {twin.words}" for twin in card.twins if "fvu" in twin.figures]
    return ", ".join([f"FVU {_with_error(card.figures.fvu, card.figures.fvu_error)}", *of_twins])


class Caution(msgspec.Struct, frozen=True):
    """Why the figures on a report card can mislead, and what to do about it."""

    text: str
    remedy: str


def data_cautions(data: EvaluationData) -> list[Caution]:
    """Return properties of the data that make the SAE look better than it really is, each with a remedy."""
    is_odd = data.zero_fraction > MANY_ZERO and not data.drops_zero
    zeros = zero_rows(data.zero_fraction, "the rows") if is_odd else ""
    found = [
        Caution(data.heavy, 'leave them out with data.drop_dimensions, or set data.scale_dimensions = "auto"'),
        Caution(zeros, f"{DROP_ZERO_ROWS} leaves them out"),
        Caution(copies_sentence(data.copies), "remove the copies from the data, or hold out whole texts"),
    ]
    return [one for one in found if one.text]


def few_cautions(card: Card) -> list[Caution]:
    """Return the figures that were measured on too few texts or rows, each with a remedy."""
    one, spliced = card.figures, card.spliced
    named = {"texts": "text", "blocks": "block"}.get(one.clustered_by)
    few = "too few to say how exact the figures are"
    found = []
    if one.n_tokens < LEAST_ROWS:
        found.append(Caution(f"only {plural(one.n_tokens, 'row')} were measured, {few}", "measure on more rows"))
    elif named and one.n_clusters < LEAST_CLUSTERS:
        text = f"the rows come from only {plural(one.n_clusters, named)}, {few}"
        found.append(Caution(text, f"hold out rows from more {named}s, or measure on other rows"))
    if spliced and 0 < spliced.n_texts < LEAST_CLUSTERS:
        text = f"the model read only {plural(spliced.n_texts, 'text')}, too few to say how exact its scores are"
        found.append(Caution(text, "read more with --tokens"))
    return found


def copies_sentence(share: float | None) -> str:
    """Return a sentence about held-out rows with copies in the training rows, or "" if they are few or unknown."""
    if share is None or share < MANY_COPIES:
        return ""
    return f"{share:.1%} of the held-out rows have an exact copy among the checked training rows, so the FVU is too low"


def held_out_words(n_rows: int, hold_out: str, n_texts: int) -> str:
    """Return a clause about the number of held-out rows and how they were chosen."""
    ways = {"texts": f"all rows of {plural(n_texts, 'text')}", "blocks": "blocks of neighbouring rows"}
    return f"{n_rows:,} rows are held out: {ways.get(hold_out, hold_out)}"


def clustered(n_clusters: int, clustered_by: str) -> str:
    """Return a phrase about the clusters used for a standard error, such as ` over 136 texts`."""
    named = {"texts": "text", "blocks": "block"}.get(clustered_by)
    return f" over {plural(n_clusters, named)}" if named else ""


def _of_dimensions(card: Card) -> str:
    """Return a clause about omitted or scaled dimensions and the FVU over all dimensions; "" if there are none."""
    of_all = _known(card.figures.fvu_all_dimensions, ".4f")
    return f"{card.data.dimensions}; FVU of all dimensions {of_all}" if card.data.dimensions else ""


def facts(card: Card) -> list[tuple[str, str]]:
    """Return the metrics on a report card as pairs (title, text)."""
    one = card.figures
    low, lower, _, upper, high = one.l0_quantiles
    silent = f"{_with_error(one.dead, one.dead_error, '.1%')} did not fire in {one.n_tokens:,} rows"
    rare = "too few rows to say which are rare" if one.rare is None else f"{_known(one.rare, '.1%')} rare"
    shares = {"1 %": one.dense(0.01), "10 %": one.dense(0.1)}
    dense = [f"{share:.1%} > {least}" for least, share in shares.items() if share is not None]
    over = clustered(one.n_clusters, one.clustered_by)
    dimensions = _of_dimensions(card)
    return [
        ("FVU", f"{_with_error(one.fvu, one.fvu_error)}{over}, median row {_known(one.median_row_fvu, '.4f')}"),
        *([("FVU by k", _by_k(one))] if one.by_k else []),
        *([("FVU, refined", _refined(one.refined))] if one.refined else []),
        *(part_facts(one.crosscoder) if one.crosscoder else []),
        *([("cross-layer", one.layer.words)] if one.layer else []),
        *([("dimensions", dimensions)] if dimensions else []),
        *(("note on FVU", f"{note.text}; {note.remedy}") for note in data_cautions(card.data)),
        *(("note", f"{note.text}; {note.remedy}") for note in few_cautions(card)),
        ("explained variance", f"{one.explained_variance:.2%} of these rows"),
        ("MSE", f"{one.mse:.4g}"),
        ("cosine", f"{one.cosine:.4f}"),
        ("L0", f"{_l0(card)} (5 % {low:g}, 25 % {lower:g}, 75 % {upper:g}, 95 % {high:g})"),
        *([("threshold", _threshold(card))] if card.threshold_set_on else []),
        ("shrinkage", f"‖x_hat‖/‖x‖ {one.l2_ratio:.4f}, bias {one.relative_reconstruction_bias:.4f}"),
        # These latents are not called "dead", because only a training run sees enough rows to decide that.
        ("latents", ", ".join([silent, rare, *(dense or ["too few rows to say which are dense"])])),
        ("density", f"10^{LOWEST_DECADE} {bars(one.density_histogram)} 1"),
        ("decoder cosine", f"{one.max_decoder_cosine:.3f} with the nearest other latent"),
        ("gamma of the data", f"{card.data.gamma:.2f}"),
        *([("stability", _stability(card.stability))] if card.stability else []),
        *((twin.words, words) for twin in card.twins if (words := _twin(twin))),
        *([("families", _families(card))] if card.families else []),
        *explanation_facts(card),
        *([("recovery (MMCS)", f"{card.recovery:.3f} of the known features")] if card.recovery is not None else []),
        *([("known features", _known_features(card.known))] if card.known else []),
        *(_losses(card.spliced) if card.spliced else []),
        *(_of_all_layers(card.together) if card.together else []),
        *(effect_facts(card.effects) if card.effects else []),
        *(_probes(card.probing) if card.probing else []),
        *_of_run(card),
    ]


def _by_k(one: Figures) -> str:
    """Return the FVU for each k, like `8: 0.3776 ± 0.0031, 16: 0.2886 ± 0.0024`."""
    return ", ".join(f"{at.k}: {_with_error(at.fvu, at.fvu_error)}" for at in one.by_k)


def _refined(one: Refined) -> str:
    """Return the figures of refined activations, like `0.1281 ± 0.0021 at L0 31.9, with refine=1 in Python only`."""
    fvu, l0 = _with_error(one.fvu, one.fvu_error), _known(one.l0, ".1f")
    return f"{fvu} at L0 {l0}, with refine={one.n_steps} in Python only"


def family_words(families: Mapping[str, int]) -> str:
    """Return the number of latents in each family, like `12 fire on one token, 3 at one position, 40 rarely`."""
    return ", ".join(f"{families.get(name, 0):,} {words}" for name, words in _FAMILY_WORDS.items())


def _known_features(one: KnownFeatures) -> str:
    """Return the figures, like `F1 0.812 ± 0.010, precision 0.850, recall 0.790, MCC 0.900, uniqueness 0.950; …`."""
    mcc = "" if one.mcc is None else f", MCC {_known(one.mcc, '.3f')}"
    figures = f"precision {_known(one.precision, '.3f')}, recall {_known(one.recall, '.3f')}{mcc}"
    f1 = _with_error(one.f1, one.f1_error, ".3f")
    uniqueness, fire = _known(one.uniqueness, ".3f"), _known(one.true_l0, ".1f")
    return f"F1 {f1}, {figures}, uniqueness {uniqueness}; {fire} of {one.n_features:,} features fire per row"


def _families(card: Card) -> str:
    """Return the families, with the number of rows in which they were counted, if known."""
    counted = card.parts.get(FIRES_ON)
    if counted is None:
        return family_words(card.families)
    few = ", too few to say which fire rarely" if counted.n < LEAST_ROWS_FOR_RARE else ""
    return f"{family_words(card.families)} (in {counted.n:,} rows with their tokens{few})"


def explanation_facts(card: Card) -> list[tuple[str, str]]:
    """Return a line such as `412 of 3,072 latents described by Qwen3-8B; mean detection 0.854 ± 0.012 (chance 0.5)`."""
    one = card.explained
    if one is None:
        return []
    scores = f"; mean {one.means} (chance {CHANCE})" if one.means else "; not scored"
    return [("explanations", f"{one.n_latents:,} of {card.figures.d_sae:,} latents described by {one.by}{scores}")]


def _stability(one: Stability) -> str:
    """Return what share of latents is stable, like `46.0% of latents have a decoder cosine above 0.7 with …`."""
    n = len(one.others)
    which = f"with a latent of {'the other seed' if n == 1 else f'each of {n} other seeds, on average'}"
    matched = "" if one.pw_mcc is None else f"; PW-MCC {one.pw_mcc:.3f}"
    of_encoder = f"{one.encoder_share:.1%} of the encoder directions"
    cosines = f"{one.share:.1%} of latents have a decoder cosine above {STABLE_COSINE} {which}; {of_encoder}{matched}"
    if one.firing_correlation is None:
        return cosines
    if one.n_rows < LEAST_ROWS:
        return f"{cosines}; {plural(one.n_rows, 'row')}, too few to say how firing correlates"
    return f"{cosines}; mean firing correlation {one.firing_correlation:.3f} in {plural(one.n_rows, 'row')}"


def _twin(twin: Twin) -> str:
    """Return a random twin's main figures, like `FVU 0.5836 ± 0.0024, CE score 0.4120 ± 0.0080`."""
    named = [(name, *_TWIN_FIGURES[name]) for name in _TWIN_FIGURES if name in twin.figures]
    probes = filter(None, map(_AUC.fullmatch, twin.figures))
    named += [(one[0], f"AUC (k = {one[1]})", ".3f") for one in probes]
    errors = {name: twin.errors.get(name, math.nan) for name, *_ in named}
    return ", ".join(f"{title} {_with_error(twin.figures[name], errors[name], form)}" for name, title, form in named)


def remarks(card: Card) -> list[tuple[str, str]]:
    """Return the remarks on a report card, as pairs (title, text): about the rows, the texts and the training."""
    dimensions = _of_dimensions(card)
    return [
        *([("measured", of_parts(card))] if card.parts else []),
        *([("dimensions", dimensions)] if dimensions else []),
        *(part_remarks(card.figures.crosscoder) if card.figures.crosscoder else []),
        *([("cross-layer", layer.words)] if (layer := card.figures.layer) else []),
        *([("threshold", _threshold(card))] if card.threshold_set_on else []),
        *([("families", _families(card))] if card.families else []),
        *explanation_facts(card),
        *([("model read", _text_read(read))] if (read := card.spliced or card.together) else []),
        *(effect_remarks(card.effects) if card.effects else []),
        *([("probed on", _probed_on(card.probing))] if card.probing else []),
        *_of_run(card),
    ]


def _of_run(card: Card) -> list[tuple[str, str]]:
    """Return the lines about the training and its settings."""
    return [
        *(card.training.facts() if card.training else []),
        *(recipe_lines(card.recipe) if card.recipe else []),
    ]


def _l0(card: Card) -> str:
    asked = asked_l0(card.figures.l0, card.target_l0)
    return f"{card.figures.l0:.1f}, {asked}" if asked else f"{card.figures.l0:.1f}"


def _threshold(card: Card) -> str:
    """Return a clause about the rows used to set the threshold.

    Metrics on held-out rows are never measured with a threshold set on the same rows.
    """
    measured = "; each half is measured with the threshold of the other half" if card.data.is_held_out else ""
    asked = f" so that L0 is {card.target_l0}" if card.target_l0 and card.threshold_set_on == "held-out rows" else ""
    return f"set on {card.threshold_set_on}{asked}{measured if asked else ''}"


def _losses(spliced: PatchedModel) -> list[tuple[str, str]]:
    both = _two_ways(spliced) if spliced.left_out else _one_way(spliced)
    return [*both, ("measured on", _text_read(spliced))]


def _of_all_layers(together: PatchedModel) -> list[tuple[str, str]]:
    """Return lines about the losses if the outputs of all the run's MLPs are replaced."""
    scores = (
        f"CE score {_with_error(together.ce_score, together.ce_score_error)}, "
        f"KL score {_with_error(together.kl_score, together.kl_score_error)}"
    )
    return [
        (f"{together.n_replaced} MLPs replaced", f"{scores}: {_ce(together)}"),
        ("measured on", _text_read(together)),
    ]


def _text_read(spliced: PatchedModel) -> str:
    of_texts = f"{plural(spliced.n_texts, 'text')} in " if spliced.n_texts else ""
    return f"{spliced.n_tokens:,} {'unseen ' * spliced.is_unseen}tokens of {of_texts}{spliced.text}"


def _one_way(spliced: PatchedModel) -> list[tuple[str, str]]:
    """Return lines about the losses if all rows are included, or if it is unknown which rows are included."""
    which = "" if spliced.left_out is None else f" {AS_SAELENS}"
    ce = f"{_with_error(spliced.ce_score, spliced.ce_score_error)}{which}"
    kl = f"{_with_error(spliced.kl_score, spliced.kl_score_error)}{which}"
    text = [("on this text", _of_rows(spliced.rows))] if spliced.rows else []
    return [("CE score", f"{ce}: {_ce(spliced)}{_mean(spliced)}"), ("KL score", f"{kl}: {_kl(spliced)}"), *text]


def _two_ways(spliced: PatchedModel) -> list[tuple[str, str]]:
    """Return lines about the losses on the rows that an extraction keeps, and on all rows."""
    views: dict[str, PatchedModel | AllTokens] = {f"without {spliced.left_out}": spliced}
    if spliced.all_tokens:
        views[AS_SAELENS] = spliced.all_tokens
    ce = [f"{_with_error(one.ce_score, one.ce_score_error)} {which}" for which, one in views.items()]
    kl = [f"{_with_error(one.kl_score, one.kl_score_error)} {which}" for which, one in views.items()]
    text = [f"{_of_rows(one.rows)} {which}" for which, one in views.items() if one.rows]
    losses = [
        ("loss" if one is spliced else "loss, all tokens", f"{_ce(one)}{_mean(one)}; KL {_kl(one)}")
        for one in views.values()
    ]
    of_text = [("on this text", "; ".join(text))] if text else []
    return [("CE score", "; ".join(ce)), ("KL score", "; ".join(kl)), *of_text, *losses]


def _of_rows(rows: TextRows) -> str:
    return f"{_known(rows.explained_variance, '.2%')} of the variance explained at L0 {_known(rows.l0, '.1f')}"


def _ce(one: Losses) -> str:
    clean, zeros = _known(one.ce, ".3f"), _known(one.ce_with_zeros, ".3f")
    return f"{_known(one.ce_with_sae, '.3f')} with the SAE, {clean} without, {zeros} with zeros"


def _kl(one: Losses) -> str:
    return f"{_known(one.kl_with_sae, '.4f')} with the SAE, {_known(one.kl_with_zeros, '.3f')} with zeros"


def _mean(one: Losses) -> str:
    mean = one.ce_with_mean if isinstance(one, PatchedModel) else None
    return "" if mean is None else f", {mean:.3f} with the mean row"


def _probes(probing: Probing) -> list[tuple[str, str]]:
    aucs = {f"k = {k}": one for k, one in probing.k.items()} | {"all activations": probing.dense}
    of_each = ", ".join(f"{_with_error(one.auc, one.seed_error, '.3f')} {name}" for name, one in aucs.items())
    return [("probing (AUC)", of_each), ("probed on", _probed_on(probing))]


def _probed_on(probing: Probing) -> str:
    return f"{probing.n_texts:,} texts of {plural(probing.n_sets, 'set')}, {plural(probing.n_seeds, 'seed')}"


def marked(text: SampledText, before: str = "[", after: str = "]") -> str:
    """Return the tokens as one line, with marks before and after the token on which the latent fires most."""
    tokens = [token.translate(_LINE_ENDS) for token in text.tokens]
    strongest = tokens[text.at]
    bare = strongest.strip() or strongest
    tokens[text.at] = strongest.replace(bare, f"{before}{bare}{after}", 1)
    return "".join(tokens).strip()


def _known(value: float | None, form: str) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:{form}}"


def _with_error(value: float, error: float, form: str = ".4f") -> str:
    """Format a value with its standard error, if known."""
    return f"{_known(value, form)} ± {error:{form}}" if math.isfinite(error) else _known(value, form)
