from __future__ import annotations

import pytest
import torch
from support import recovery
from support.recovery import mmcs


def random_rows(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_each_feature_is_scored_by_its_most_similar_latent() -> None:
    latents, features = random_rows(30, 6, 0), random_rows(20, 6, 1)
    best = [max(float(torch.cosine_similarity(f, w, dim=0)) for w in latents) for f in features]
    assert mmcs(latents, features) == pytest.approx(sum(best) / 20, abs=1e-6)


def test_surplus_latents_and_the_order_and_norms_of_latents_do_not_change_the_score() -> None:
    features = random_rows(20, 6, 1)
    decoder = torch.cat([random_rows(5, 6, 2), 7 * features.flip(0), random_rows(5, 6, 3)])
    assert mmcs(decoder, features) == pytest.approx(1, abs=1e-6)


def test_the_opposite_direction_scores_0() -> None:
    features = torch.eye(3)
    assert mmcs(-features, features) == pytest.approx(0, abs=1e-6)


def test_an_all_zero_latent_scores_0() -> None:
    assert mmcs(torch.zeros(4, 3), torch.eye(3)) == 0


def test_comparing_features_in_chunks_does_not_change_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    latents, features = random_rows(30, 6, 0), random_rows(20, 6, 1)
    whole = mmcs(latents, features)
    monkeypatch.setattr(recovery, "_AT_A_TIME", 70)
    assert mmcs(latents, features) == pytest.approx(whole, abs=1e-6)
