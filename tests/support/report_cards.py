"""An example of a report card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.contract.runs.features import CARD

FIGURES: dict[str, Any] = {
    "n_tokens": 1000, "d_in": 16, "d_sae": 64, "fvu": 0.25, "fvu_error": 0.01, "median_row_fvu": 0.24,
    "explained_variance": 0.75, "mse": 1.5, "cosine": 0.9, "l0": 32.0, "l0_quantiles": [30.0, 31.0, 32.0, 33.0, 34.0],
    "l2_ratio": 0.98, "relative_reconstruction_bias": 0.99, "dead": 0.02, "dead_error": 0.005, "rare": None,
    "dense_1": 0.1, "dense_10": 0.01, "density_histogram": [0] * 8 + [1, 2, 3, 4], "max_decoder_cosine": 0.3,
}  # fmt: skip
SPLICED = {
    "n_tokens": 4000, "text": "corpus.jsonl", "is_unseen": True, "ce": 3.5, "ce_with_sae": 3.6, "ce_with_zeros": 10.0,
    "ce_with_mean": 7.0, "ce_score": 0.95, "ce_score_error": 0.004, "kl_with_sae": 0.2, "kl_with_zeros": 6.0,
    "kl_score": 0.96, "kl_score_error": 0.003,
}  # fmt: skip
CROSSCODER: dict[str, Any] = {
    "parts": [
        {"name": "resid_post.8", "width": 6, "scale": 1.0, "fvu": 0.2, "fvu_error": 0.02, "n_only": 5, "n_only_dead": 1,
         "n_confirmed": 4},
        {"name": "resid_post.12", "width": 10, "scale": 0.25, "fvu": 0.3, "fvu_error": 0.03, "n_only": 7,
         "n_only_dead": 0, "n_confirmed": 7},
    ],
    "n_shared": 40, "n_shared_dead": 0, "n_other": 11, "n_other_dead": 0, "norms": [5, *[0] * 8, 30, 21, *[0] * 8, 7],
    "n_rows": 100_000,
}  # fmt: skip
EFFECTS: dict[str, Any] = {
    "text": "corpus.jsonl", "is_unseen": True, "n_tokens": 16_000, "n_texts": 40, "loss": 3.5, "n_firing": 60,
    "n_helping": 21, "n_hurting": 13, "helping": [0, 0, 1, 2, 4, 8, 4, 2, 0, 0, 0, 0],
    "hurting": [0, 0, 1, 2, 4, 2, 1, 0, 0, 0, 0, 0],
    "largest": [
        {"latent": 7, "effect": 0.0388, "error": 0.0036, "per_firing": 0.087},
        {"latent": 40, "effect": -0.0154, "error": 0.0014, "per_firing": -0.068},
    ],
    "ablated": [
        {"latent": 7, "estimate": 0.04, "ablation": 0.08}, {"latent": 40, "estimate": -0.02, "ablation": -0.03},
        {"latent": 3, "estimate": 0.01, "ablation": 0.01},
    ],
    "n_ablated_tokens": 2000, "pearson": 0.9, "spearman": 0.8, "ratio": 0.5,
}  # fmt: skip
AUC = {"auc": 0.8, "seed_error": 0.01, "set_error": 0.05, "of_sets": {"a": 0.8}}
PROBING = {"n_sets": 12, "n_seeds": 3, "n_texts": 12_000, "k": {"1": AUC, "16": AUC}, "dense": AUC}


def card_table(**parts: Any) -> dict[str, Any]:
    """Return a report card as parsed JSON."""
    usual = {
        "name": "quick", "label": "", "architecture": "topk", "step": 100, "tokens": 100_000, "origin": {},
        "data": {"place": "data/sample", "is_held_out": True, "gamma": 0.5, "outlier_fraction": 0.0, "not_finite": 0,
                 "max_norm": 10.0, "n_held_out": 4000, "is_trained_on": False},
        "figures": dict(FIGURES), "recovery": None, "spliced": dict(SPLICED), "probing": PROBING,
        "latents": [
            {"latent": number, "density": 0.01 * number, "texts": [
                {"tokens": [" the", " children", f" of{number}", " israel"], "at": 2, "act": 1.5}]}
            for number in range(1, 21)
        ],
    }  # fmt: skip
    return usual | parts


def put_card(folder: Path, **parts: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD).write_text(json.dumps(card_table(**parts)))
