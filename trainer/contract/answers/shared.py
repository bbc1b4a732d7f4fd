"""JSON Schemas shared by `sae-tui` and `sae-train`: errors, results and report cards."""

from __future__ import annotations

from typing import Any

from trainer.contract.answers.schema import Schema, by_name, fields, list_of, one_of, or_null, typed, whole
from trainer.contract.failure import Failure, Refusal
from trainer.contract.runs.crosscoder import Crosscoder, CrosscoderPart
from trainer.contract.runs.effects import AblatedLatent, Effects, LargeEffect
from trainer.contract.runs.explanations import ExplainedLatents, MeanScore
from trainer.contract.runs.how_far import BEST_FVU, BEST_STEP, PASSES, HowFar
from trainer.contract.runs.import_check import ImportCheck
from trainer.contract.runs.recipe import Recipe
from trainer.contract.runs.report_card import (
    AllTokens,
    AtK,
    Auc,
    Card,
    EvaluationData,
    Figures,
    KnownFeatures,
    LayerFigures,
    Part,
    PatchedModel,
    Probing,
    Refined,
    Stability,
    TextRows,
    Twin,
)
from trainer.contract.settings.catalog import METRICS
from trainer.contract.settings.series import HELD_OUT, measured_names
from trainer.contract.store.seeds import Spread

Described = dict[str, tuple[Any, str]]
FAILURE = typed(
    "Failure",
    Failure,
    {
        "field": "The flag, argument or setting that is wrong, or null if none of them is.",
        "message": "The problem, in one sentence.",
        "fix": "The fix; null if the message already says what is allowed.",
    },
)
REFUSAL = whole(
    "The problems: the only output of a command that fails with a non-zero exit code",
    fields(
        "",
        {
            name: (FAILURE if name == "error" else list_of(FAILURE), words)
            for name, words in {
                "error": "The first problem.",
                "others": "All other problems; omitted if there are none.",
            }.items()
            if name in Refusal.__struct_fields__
        },
        may_lack=["others"],
    ),
)


SEEDS = fields(
    "Seeds",
    {
        "labels": (list_of(str), "Labels of the SAEs that differ only in the seed."),
        "figures": (
            by_name(
                typed(
                    "Spread",
                    Spread,
                    {
                        "mean": "Mean over the seeds.",
                        "sd": "Standard deviation over the seeds, with n - 1 in the denominator.",
                        "n": "Number of seeds.",
                    },
                )
            ),
            "Spread of each metric over the seeds, by name.",
        ),
    },
)


def metric_words(name: str) -> str:
    """Return the description of a metric."""
    metric = name.removeprefix(HELD_OUT)
    entry, is_held_out = METRICS[metric], name != metric
    unit = " (0 to 1)" if entry.series.is_share else f" ({entry.series.unit})" if entry.series.unit else ""
    where = ", on held-out data" if is_held_out else ", over the last batches" if entry.held_out else ""
    return f"{entry.summary.removesuffix('.')}{unit}{where}; null if not measured{' yet' * is_held_out}."


def metrics() -> Described:
    """Return a dict mapping each SAE metric to its type and description."""
    return {name: (float | None, metric_words(name)) for name in measured_names()}


# Fields in the output of both import commands.
IMPORT_CHECK: Described = {
    "check": (
        typed(
            "Check of an import",
            ImportCheck,
            {
                "rows": "Number of data rows that were read.",
                "l0": "Mean number of active latents per row.",
                "fvu": "Fraction of variance unexplained; null if reconstructions are not finite.",
            },
        ),
        "Metrics of the imported SAE on rows of the data.",
    ),
    "warnings": (list_of(str), "Implausible metrics, each with the likely reason."),
}
_AT_K = typed(
    "At a k",
    AtK,
    {
        "k": "Number of largest activations of each row that are used.",
        "fvu": "FVU with this k; null if undefined.",
        "fvu_error": "Standard error of `fvu`; null if undefined.",
    },
    no_number_is_null=True,
)
_REFINED = typed(
    "Refined activations",
    Refined,
    {
        "n_steps": "Number of refinement steps.",
        "fvu": "FVU with the refined activations; null if undefined.",
        "fvu_error": "Standard error of `fvu`; null if undefined.",
        "l0": "Mean number of active latents per token; null if undefined.",
    },
    no_number_is_null=True,
)
_CROSSCODER = typed(
    "Crosscoder",
    Crosscoder,
    {
        "parts": "The parts that the rows are joined from, A first.",
        "n_shared": "Number of shared latents that fire on these rows: each of two parts has 0.4 to 0.6 of the norms.",
        "n_shared_dead": "Number of shared latents that do not fire.",
        "n_other": "Number of firing latents that are neither shared nor only in one part.",
        "n_other_dead": "Number of such latents that do not fire.",
        "norms": "Histogram of the firing latents' relative norms, from 0 to 1: the share of part B, or with more than"
        " two parts, the largest share.",
        "n_rows": "Number of rows used for latent scaling; 0 if it was not measured.",
    },
    {
        "parts": list_of(
            typed(
                "CrosscoderPart",
                CrosscoderPart,
                {
                    "name": "What sets this part apart: its hook, model or folder.",
                    "width": "Width of this part.",
                    "scale": "Scale of this part in training, as a multiple of the largest one; null if undefined.",
                    "fvu": "FVU of this part; null if undefined.",
                    "fvu_error": "Standard error of `fvu`; null if undefined.",
                    "n_only": "Number of firing latents only in this part: more than 0.9 of the decoder norms.",
                    "n_only_dead": "Number of latents only in this part that do not fire.",
                    "n_confirmed": "Number of `n_only` that latent scaling confirms; null if it was not measured.",
                },
                no_number_is_null=True,
            )
        )
    },
)
_LAYER = typed(
    "Layer of a cross-layer transcoder",
    LayerFigures,
    {
        "layer": "Number of the layer among the transcoder's layers, from 0.",
        "n_layers": "Number of layers.",
        "from_earlier": "Share of the squared norms written to the layer's target that earlier layers write.",
    },
)
_FIGURES = typed(
    "Figures",
    Figures,
    {
        "n_tokens": "Number of rows that were measured.",
        "d_in": "Width of the activations.",
        "d_sae": "Number of latents.",
        "fvu": "Fraction of variance unexplained; null if undefined.",
        "fvu_error": "Standard error of `fvu` over clusters of dependent rows; null if undefined.",
        "n_clusters": "Number of clusters (texts or blocks of neighbouring rows); 0 if unknown.",
        "clustered_by": '"texts" or "blocks"; "" if unknown.',
        "median_row_fvu": "Median FVU of individual rows; null if undefined.",
        "explained_variance": "Explained variance as defined by SAEBench; null if undefined.",
        "mse": "Squared error per row, summed over dimensions; null if undefined.",
        "cosine": "Mean cosine similarity of a row and its reconstruction; null if undefined.",
        "l0": "Mean number of active latents per token; null if undefined.",
        "l0_quantiles": "The 5th, 25th, 50th, 75th and 95th percentiles of L0.",
        "l2_ratio": "Mean of the reconstruction's norm divided by the row's norm; null if undefined.",
        "relative_reconstruction_bias": "Relative reconstruction bias, below 1 if reconstructions shrink; null if"
        " undefined.",
        "dead": "Share of latents that did not fire on these rows (0 to 1); null if undefined.",
        "dead_error": "Standard error of `dead`; null if undefined.",
        "rare": "Share of latents that fire on at most one row in 10,000 (0 to 1); null if there are too few rows.",
        "dense_1": "Share of latents that fire on more than 1 % of the rows (0 to 1); null if undefined.",
        "dense_10": "Share of latents that fire on more than 10 % of the rows (0 to 1); null if undefined.",
        "density_histogram": "Histogram of the logarithm of the latents' densities.",
        "max_decoder_cosine": "Mean over latents of the largest cosine similarity with any other decoder direction;"
        " null if undefined.",
        "l0_below_most": "Share of rows with fewer active latents than the row with the most; null if unknown.",
        "fvu_all_dimensions": "FVU of raw rows, if training left out or scaled dimensions; null otherwise.",
        "by_k": "The FVU for each k that the SAE is trained for; empty for most SAEs.",
        "crosscoder": "The figures of a crosscoder's parts; null for other SAEs.",
        "layer": "The place of a layer in a cross-layer transcoder; null for other SAEs.",
        "refined": "With `eval --refine`: figures of refined activations, which only Python computes; otherwise null.",
    },
    {
        "by_k": list_of(_AT_K),
        "crosscoder": or_null(_CROSSCODER),
        "refined": or_null(_REFINED),
        "layer": or_null(_LAYER),
    },
    no_number_is_null=True,
)
_TEXT_ROWS = typed(
    "Rows of the text",
    TextRows,
    {
        "n_rows": "Number of rows that were replaced by reconstructions.",
        "explained_variance": "Explained variance, 1 − FVU; null if undefined.",
        "mse": "Squared error per row, summed over dimensions; null if undefined.",
        "cosine": "Mean cosine similarity of a row and its reconstruction; null if undefined.",
        "l0": "Mean number of active latents per token; null if undefined.",
        "l2_ratio": "Mean of the reconstruction's norm divided by the row's norm; null if undefined.",
        "relative_reconstruction_bias": "Reconstruction bias, below 1 if reconstructions shrink; null if undefined.",
    },
    no_number_is_null=True,
)
_LOSSES = {
    "n_tokens": "Number of tokens over which the cross-entropies are averaged.",
    "ce": "Cross-entropy of the unchanged model, in nats; null if undefined.",
    "ce_with_sae": "Cross-entropy with reconstructions in place of activations, in nats; null if undefined.",
    "ce_with_zeros": "Cross-entropy with zeros in place of activations, in nats; null if undefined.",
    "ce_score": "Loss recovered: 0 for zeros, 1 for the unchanged model; null if undefined.",
    "ce_score_error": "Standard error of `ce_score`; null if undefined.",
    "kl_with_sae": "KL divergence with reconstructions, in nats; null if undefined.",
    "kl_with_zeros": "KL divergence with zeros, in nats; null if undefined.",
    "kl_score": "Loss recovered, computed from KL divergences; null if undefined.",
    "kl_score_error": "Standard error of `kl_score`; null if undefined.",
}
_ALL_TOKENS = typed(
    "All tokens, as in SAELens",
    AllTokens,
    _LOSSES | {"rows": "Reconstructions of all rows."},
    {"rows": _TEXT_ROWS},
    no_number_is_null=True,
)
_SPLICED = typed(
    "In the language model",
    PatchedModel,
    _LOSSES
    | {
        "text": "Source of the text.",
        "is_unseen": "Whether this text was not used for training.",
        "n_replaced": "Number of hooks whose rows are replaced.",
        "n_texts": "Number of texts over which the standard errors are computed; 0 if unknown.",
        "left_out": "Excluded tokens, such as first tokens; empty if there are none; null if unknown.",
        "ce_with_mean": "Cross-entropy with the mean row in place of activations, in nats; null if not measured.",
        "rows": "Reconstructions of the included rows; null if not measured.",
        "all_tokens": "The same metrics for all tokens, for comparison with SAELens; null if not measured.",
    },
    {"rows": or_null(_TEXT_ROWS), "all_tokens": or_null(_ALL_TOKENS)},
    no_number_is_null=True,
)
_LARGE_EFFECT = typed(
    "LargeEffect",
    LargeEffect,
    {
        "latent": "Index of the latent.",
        "effect": "Estimated increase of the loss if it is ablated, in nats per token; null if undefined.",
        "error": "Standard error of the effect over texts; null if there are too few texts.",
        "per_firing": "The same increase per row on which it fires; null if undefined.",
    },
    no_number_is_null=True,
)
_ABLATED = typed(
    "AblatedLatent",
    AblatedLatent,
    {
        "latent": "Index of the latent.",
        "estimate": "Estimated effect on these tokens, in nats per token.",
        "ablation": "Increase of the loss on these tokens when the latent was ablated, in nats per token.",
    },
)
_EFFECTS = typed(
    "Effects",
    Effects,
    {
        "text": "Source of the text.",
        "is_unseen": "Whether this text was not used for training.",
        "n_tokens": "Number of tokens over which the effects are averaged.",
        "n_texts": "Number of texts over which the standard errors are computed.",
        "loss": "Cross-entropy of the unchanged model, in nats; null if undefined.",
        "n_firing": "Number of latents that fire on the text.",
        "n_helping": "Number of latents with an effect above 0 by more than 2 standard errors.",
        "n_hurting": "Number of latents with an effect below 0 by more than 2 standard errors.",
        "helping": "Histogram of the logarithm of the effects above 0.",
        "hurting": "Histogram of the logarithm of the negated effects below 0.",
        "largest": "The latents with the largest absolute effects.",
        "ablated": "Estimates and ablations of the latents with the largest estimates.",
        "n_ablated_tokens": "Number of tokens on which latents were ablated.",
        "pearson": "Pearson correlation of estimates and ablations; null if fewer than 3 latents were ablated.",
        "spearman": "Spearman correlation of estimates and ablations; null if fewer than 3 latents were ablated.",
        "ratio": "Sum of the absolute estimates, as a share of the sum of the absolute ablations; null if unknown.",
    },
    {"largest": list_of(_LARGE_EFFECT), "ablated": list_of(_ABLATED)},
    no_number_is_null=True,
)
_AUC = typed(
    "AUC",
    Auc,
    {
        "auc": "Mean area under the ROC curve; null if undefined.",
        "seed_error": "Standard error over splits of the texts; null if undefined.",
        "set_error": "Standard error over sets; null if there is only one set.",
        "of_sets": "AUC of each set.",
    },
    {"of_sets": by_name(float | None)},
    no_number_is_null=True,
)
_PROBING = typed(
    "Probing",
    Probing,
    {
        "n_sets": "Number of sets of labelled texts.",
        "n_seeds": "Number of splits of each set.",
        "n_texts": "Total number of texts.",
        "k": "Results by the number of latents that a probe uses.",
        "dense": "Result of probes that use all activations.",
    },
    {"k": by_name(_AUC), "dense": _AUC},
)
_RECIPE = typed(
    "Recipe",
    Recipe,
    {
        "optimizer": "The optimizer.",
        "optimizer_settings": "Settings of the optimizer, with auto resolved.",
        "lr": "Peak learning rate, with auto resolved.",
        "encoder_follows": "Whether encoder updates are tied to decoder updates.",
        "encoder_lr": "Learning rate of tied encoders; null if the encoders are not tied.",
        "freeze": "Weights that kept their initial values: off, decoder, encoder or both.",
        "warmup_fraction": "Share of the steps during which the learning rate rises.",
        "decay_fraction": "Share of the steps during which the learning rate falls.",
        "batch_tokens": "Tokens per step.",
        "steps": "Number of completed steps.",
        "planned_steps": "Total number of steps of the run.",
        "tokens": "Number of training tokens.",
        "passes": "Number of passes over the training rows; null if unknown, or if the data is a stream.",
        "target_l0": "Requested L0; null if a fixed penalty determines L0, or if layers share k.",
        "auxk_alpha": "Weight of the AuxK loss; null if the architecture has no such loss.",
        "k_aux": "Number of dead latents that the AuxK loss uses, or null if there is no such loss.",
        "seed": "The seed.",
    },
    {"optimizer_settings": by_name({})},
)
_DATA = typed(
    "EvaluationData",
    EvaluationData,
    {
        "place": "Folder or source of the rows.",
        "is_held_out": "Whether the run held out these rows.",
        "gamma": "Norm of the mean row divided by the rows' root mean square distance from it; null if undefined.",
        "outlier_fraction": "Share of rows that were left out because of a huge norm (0 to 1); null if undefined.",
        "not_finite": "Number of rows that were left out because they are not finite.",
        "max_norm": "A row whose norm exceeds the median norm by this factor is an outlier; null if undefined.",
        "n_held_out": "Number of rows that the run held out.",
        "is_trained_on": "Whether the SAE was trained on these rows.",
        "heavy": 'Description of dimensions that make the FVU look better than it is, or "" if there are none.',
        "hold_out": 'Unit in which rows were held out: "texts", "blocks" or "rows"; "": no rows were held out.',
        "copies": "Share of the compared held-out rows that are identical to a training row; null if not compared.",
        "dimensions": 'Description of dimensions that training left out or scaled down, or "" if there are none.',
        "zero_fraction": "Share of rows of zeros (0 to 1); null if undefined.",
        "drops_zero": "Whether rows of zeros were left out.",
        "stored_as": 'Encoding of the stored rows and its noise, or "" if the rows are stored as numbers.',
    },
    no_number_is_null=True,
)
_TRAINING = typed(
    "Training",
    HowFar,
    {
        "step": "Step of the measured weights.",
        "total_steps": "Total number of steps of the run; the run is unfinished if `step` is smaller.",
        "lr_share": "Learning rate at this step as a share of the peak; null if unknown or without decay.",
        "passes": "Number of passes over the training rows; null if unknown, or if the data is a stream.",
        "fvu": "FVU on the last batches; null if unknown.",
        "heldout_fvu": "FVU on held-out rows; null if not measured.",
        "best": "The lowest held-out FVU, if it is clearly lower than the last one; null otherwise.",
        "is_last": "Whether the weights are from the run's last checkpoint.",
    },
    {"best": or_null(by_name({}))},
)
_PART = typed(
    "Part",
    Part,
    {
        "measured": "Time of the measurement, in s since the epoch.",
        "step": "Training step of the SAE; 0 if unknown.",
        "n": "Number of measured units.",
        "unit": "The unit of `n`: rows, tokens, texts or latents.",
        "text": 'Measured text or rows; "": not recorded.',
        "model": 'Language model that read the text, or "" if none.',
        "settings": "Settings that affect the metrics, by name.",
        "device": '"cpu" or "cuda"; "" if unknown.',
        "seconds": "Duration, in s; null if unknown.",
    },
    {"settings": by_name({})},
)
_STABILITY = typed(
    "Stability",
    Stability,
    {
        "others": "Labels of the SAEs that differ only in the seed.",
        "share": "Share of latents whose mean cosine with the nearest decoder direction of each SAE is above 0.7.",
        "median": "Median of this cosine over the latents.",
        "encoder_share": "The same share for encoder directions.",
        "pw_mcc": "Mean cosine under the best one-to-one matching; null without scipy, or above 4,096 latents.",
        "firing_correlation": "Mean correlation of the activations of a latent that fires and its nearest latent in "
        "each SAE; null if it was not measured.",
        "n_rows": "Number of rows on which the activations were correlated; 0 if they were not.",
        "rows": 'Digest of these rows; "" if there are none.',
    },
)
_KNOWN = typed(
    "KnownFeatures",
    KnownFeatures,
    {
        "n_features": "Number of known features.",
        "n_rows": "Number of rows, which no run was trained on.",
        "data": 'Digest of the settings of the data; "" if unknown.',
        "true_l0": "Mean number of features that fire on a row.",
        "f1": "Mean F1 of the latents as detectors of their nearest features.",
        "f1_error": "Standard error of this mean.",
        "precision": "Mean precision of the latents.",
        "recall": "Mean recall of the latents.",
        "uniqueness": "Number of different nearest features per latent.",
        "mcc": "Mean absolute cosine under the best one-to-one matching; null if it was not computed.",
    },
)
_TWIN = typed(
    "Twin",
    Twin,
    {
        "label": "Label of the twin.",
        "frozen": "Weights that keep their random initial values: decoder, encoder or both.",
        "figures": "The twin's figures that are comparable with the SAE's, by name.",
        "errors": "Standard errors of these figures, by name.",
    },
    {"figures": by_name(float), "errors": by_name(float)},
)
_SCORE = typed(
    "MeanScore",
    MeanScore,
    {
        "mean": "Mean over the scored latents; a model that guesses reaches 0.5.",
        "error": "Its standard error.",
        "n": "Number of scored latents.",
        "histogram": "Number of latents in each of 10 equal bins of the score from 0 to 1.",
    },
)
_EXPLAINED = typed(
    "Explained",
    ExplainedLatents,
    {
        "n_latents": "Number of latents with a description of these weights.",
        "models": "Language models that gave the descriptions.",
        "prompts": "Versions of the prompts.",
        "detection": "Scores for finding the texts on which a latent fires; null if not measured.",
        "fuzzing": "Scores for finding the texts with the right marks; null if not measured.",
    },
    {"detection": or_null(_SCORE), "fuzzing": or_null(_SCORE)},
)
_CARD: dict[str, tuple[Any, str]] = {
    "name": (str, "Name of the run or folder."),
    "label": (str, 'Label of the SAE in a sweep; "" if the run is not a sweep.'),
    "architecture": (str, "Architecture of the SAE."),
    "step": (int, "Step of the SAE's checkpoint."),
    "tokens": (int, "Number of tokens that the SAE was trained on."),
    "origin": (by_name({}), "Known facts about the model, hook and text."),
    "data": (_DATA, "Data on which the SAE was measured."),
    "figures": (_FIGURES, "Metrics of the SAE on this data."),
    "recovery": (float | None, "Share of the true directions that the SAE found; null if the directions are unknown."),
    "known": (or_null(_KNOWN), "How well latents detect the known features of synthetic data; null for other data."),
    "spliced": (or_null(_SPLICED), "Loss of the patched language model; null if not measured."),
    "together": (
        or_null(_SPLICED),
        "Loss with the outputs of all MLPs of a set of transcoders or a cross-layer transcoder replaced; else null.",
    ),
    "effects": (or_null(_EFFECTS), "Effect of each latent on the model's loss if it is ablated; null if not measured."),
    "probing": (or_null(_PROBING), "Probes of the latents on labelled texts; null if not measured."),
    "stability": (or_null(_STABILITY), "Share of latents that SAEs with other seeds also found; null for one seed."),
    "twins": (list_of(_TWIN), "Random twins that were trained alongside the SAE."),
    "latents": (list_of(by_name({})), "Random latents, with texts on which they fire."),
    "families": (by_name(int), "Number of latents of each family; empty without stored max-activating examples."),
    "explained": (or_null(_EXPLAINED), "Descriptions of latents by language models; null if no latent has one."),
    "recipe": (or_null(_RECIPE), "How the SAE was trained; null if unknown."),
    "threshold_set_on": (str, "Rows on which the SAE's single threshold was set; empty if there is no such threshold."),
    "training": (or_null(_TRAINING), "How far the training went; null if unknown."),
    "weights": (str, 'Digest of the measured weights; "" if unknown.'),
    "parts": (by_name(_PART), "When and how each part was measured: rows, model, effects, probes, fires_on, promoted."),
    "features": (
        str,
        'Digest of the stored features file; "" if none are stored or the report card is current.',
    ),
}
# JSON fields for a training run's progress, with the same names as the metrics in the run's store.
HOW_FAR: dict[str, tuple[Any, str]] = {
    PASSES: (
        float | None,
        "Number of passes over the training rows; null if not measured, or if the data is a stream.",
    ),
    BEST_STEP: (int | None, "Step at which the held-out FVU was lowest; null if not measured."),
    BEST_FVU: (float | None, "Held-out FVU at that step, averaged over the SAEs of a sweep; null if not measured."),
}
assert _CARD.keys() == {*Card.__struct_fields__} - {"sums"}


def card(title: str, *names: str, **more: tuple[Any, str]) -> Schema:
    """Return the schema for a report card with the named fields (by default all), plus the fields in `more`."""
    return fields(title, more | {name: _CARD[name] for name in names or _CARD})


def answer(title: str, *schemas: Schema) -> Schema:
    """Return the schema for a command's output: one of the given schemas."""
    return whole(title, schemas[0] if len(schemas) == 1 else one_of(*schemas))
