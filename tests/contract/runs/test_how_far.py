"""Tests for describing an SAE's training progress, in a sentence and in export metadata."""

from __future__ import annotations

import pytest

from trainer.contract.runs.checkpoint_manifest import Best
from trainer.contract.runs.how_far import HowFar, from_metadata


@pytest.mark.parametrize(
    ("fvu", "lr_share", "n_rows", "is_below"),
    [
        (0.141, 0.0, 32_768, True),
        (0.1415, 0.0, 400, True),
        (0.141, 0.0, 100, False),
        (0.1341, 0.0, 32_768, False),
        (0.12, 0.0, 32_768, False),
        # The learning rate has risen again, as in an extended run.
        (0.2, 1.0, 32_768, False),
    ],
)
def test_a_worse_fvu_is_ignored_within_noise_or_if_the_learning_rate_has_risen(
    fvu: float, lr_share: float, n_rows: int, is_below: bool
) -> None:
    assert Best(300, 0.134, 0.5, n_rows).is_clearly_below(fvu, lr_share) is is_below


@pytest.mark.parametrize(
    ("passes", "words"), [(18.24, "18.2 passes"), (0.1, "0.1 passes"), (0.0060416, "0.006 passes"), (None, "")]
)
def test_a_part_of_a_pass_is_never_shown_as_no_pass(passes: float | None, words: str) -> None:
    (_, text), *_ = HowFar(step=118, total_steps=118, passes=passes).facts()
    assert text == "finished after 118 steps" + (f", {words} over the training rows" if words else "")


def test_export_metadata_restores_the_progress_of_its_run() -> None:
    whole = HowFar(
        step=500, total_steps=500, lr_share=0.0, passes=18.2, fvu=0.08, heldout_fvu=0.141, best=Best(300, 0.134)
    )
    assert from_metadata(whole.metadata() | {"fvu": 0.08, "heldout_fvu": 0.141}) == whole
    assert whole.overfitting == (
        "FVU is 0.0800 on the last batches, 0.1410 held out, after 18.2 passes over the training rows; "
        "held-out FVU was best at step 300 (0.1340; 0.1410 at the end)"
    )
    assert from_metadata({"fvu": 0.1}) is None
    assert from_metadata({"training_steps": "many", "training_total_steps": 3}) is None
