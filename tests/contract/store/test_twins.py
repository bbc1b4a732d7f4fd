"""Tests that random twins do not compete with the SAEs trained next to them."""

from __future__ import annotations

import pytest

from trainer.contract.store.metrics_store import best_sae
from trainer.contract.store.seeds import seeds_in
from trainer.contract.store.twins import frozen_in, twins_of, without_twins

LABELS = ["k=8,freeze=off,seed=0", "k=8,freeze=decoder,seed=0", "k=8,freeze=both,seed=0", "k=8,freeze=decoder,seed=1"]


@pytest.mark.parametrize(
    ("label", "frozen"),
    [("", None), ("k=8", None), ("freeze=off", None), ("k=8,freeze=both,seed=1", "both"), ("freeze=| <b>", None)],
)
def test_a_label_names_the_frozen_weights(label: str, frozen: str | None) -> None:
    assert frozen_in(label) == frozen


def test_a_twin_differs_only_in_its_frozen_weights() -> None:
    assert twins_of(LABELS, LABELS[0]) == LABELS[1:3]
    assert twins_of(LABELS, LABELS[1]) == []
    # The last SAE is frozen too, but no SAE with this seed was trained in full.
    assert without_twins(LABELS) == [LABELS[0], LABELS[3]]


def test_a_twin_is_never_the_best_sae_and_a_sweep_over_seeds_may_contain_twins() -> None:
    fvu = {"freeze=off,seed=0": 0.3, "freeze=off,seed=1": 0.2}
    of_twins = dict.fromkeys(["freeze=decoder,seed=0", "freeze=decoder,seed=1"], 0.1)
    latest = {f"heldout_fvu@{label}": value for label, value in (fvu | of_twins).items()}
    assert best_sae(latest) == "freeze=off,seed=0"
    seeds = seeds_in(latest, best_sae(latest))
    assert seeds is not None
    assert seeds.are_all
    assert seeds.spreads["heldout_fvu"].mean == pytest.approx(0.25)


def test_without_fully_trained_saes_frozen_saes_compete_with_each_other() -> None:
    assert best_sae({"fvu@freeze=decoder": 0.5, "fvu@freeze=encoder": 0.4}) == "freeze=encoder"
