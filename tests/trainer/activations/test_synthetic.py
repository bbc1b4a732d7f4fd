from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recovery import mmcs

from trainer.activations.synthetic import Synthetic
from trainer.contract.errors import JobFileError
from trainer.contract.settings.sources import SyntheticSettings

DEFAULTS: dict[str, Any] = {
    "d_in": 64,
    "n_features": 256,
    "active": 5.0,
    "skew": 0.0,
    "noise": 0.0,
    "n_rows": 10_000_000,
    "data_seed": 0,
}


def synthetic(**settings: Any) -> Synthetic:
    return Synthetic(**DEFAULTS | settings)


def coefficients(source: Synthetic, n_rows: int) -> torch.Tensor:
    """Return each row's coefficients for all features; these are exact if there are fewer features than dimensions."""
    rows = source.rows(np.arange(n_rows)).double()
    return torch.linalg.lstsq(source.features.double().T, rows.T).solution.T


def test_features_are_unit_directions() -> None:
    features = synthetic().features
    assert features.shape == (256, 64)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(256))


def test_an_sae_with_the_same_seed_is_not_initialised_to_the_features() -> None:
    start = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    assert mmcs(start, synthetic().features) < 0.45


@given(numbers=st.lists(st.integers(0, 2**40), min_size=1, max_size=30), noise=st.sampled_from([0.0, 0.3]))
@settings(max_examples=25)
def test_a_row_does_not_depend_on_the_other_rows_in_the_request(numbers: list[int], noise: float) -> None:
    source, again = synthetic(noise=noise), synthetic(noise=noise)
    rows = source.rows(np.array(numbers))
    assert rows.shape == (len(numbers), 64)
    assert rows.dtype == torch.float32
    for row, number in zip(rows, sorted(numbers), strict=True):
        assert torch.equal(row, again.rows(np.array([number]))[0])


def test_a_different_seed_gives_different_features_and_rows() -> None:
    first, other = synthetic(), synthetic(data_seed=1)
    assert not torch.equal(first.features, other.features)
    fired = [coefficients(synthetic(n_features=32, active=3, data_seed=seed), 1000) > 0.1 for seed in (0, 1)]
    # The probability that two independent rows agree on whether a feature is active is 1 - 2p(1 - p).
    assert (fired[0] == fired[1]).double().mean() == pytest.approx(1 - 2 * 3 / 32 * 29 / 32, abs=0.02)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_the_requested_number_of_features_is_active_and_features_are_independent(skew: float) -> None:
    n = 40_000
    fired = (coefficients(synthetic(n_features=32, active=6.0, skew=skew), n) > 0.1).double()
    assert fired.sum(dim=1).mean() == pytest.approx(6, abs=0.05)
    frequency = fired.mean(dim=0)
    rates = -torch.log1p(-frequency)
    expected = torch.arange(1, 33, dtype=torch.float64) ** -skew
    torch.testing.assert_close(rates / rates.sum(), expected / expected.sum(), rtol=0.15, atol=0)
    together = fired.T @ fired / n
    independent = frequency[:, None] * frequency
    error = (together - independent) / (independent * (1 - frequency[:, None]) * (1 - frequency) / n).sqrt()
    assert error[~torch.eye(32, dtype=torch.bool)].abs().max() < 5


def test_coefficients_are_uniformly_distributed_around_one() -> None:
    values = coefficients(synthetic(n_features=48, active=1.0), 50_000).flatten()
    values = values[values > 0.1]
    once = values[values < 1.5]
    assert values.min() >= 0.5 - 1e-6
    # About 1 % of the rows draw the same feature twice, and the two coefficients add up.
    assert len(once) > 0.98 * len(values)
    counts = torch.histc(once, bins=10, min=0.5, max=1.5)
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()


def test_normal_noise_is_added_to_every_value() -> None:
    indices = np.arange(5000)
    added = synthetic(noise=0.3).rows(indices) - synthetic().rows(indices)
    assert added.std() == pytest.approx(0.3, rel=0.01)
    assert added.mean() == pytest.approx(0, abs=0.003)
    assert (added.abs() > 0.6).double().mean() == pytest.approx(0.0455, abs=0.002)
    correlation = torch.corrcoef(added.T) - torch.eye(64)
    assert correlation.abs().max() < 5 / 5000**0.5
    assert added.unique().numel() > 50_000


def test_a_row_without_an_active_feature_is_zero() -> None:
    rows = synthetic(active=0.5).rows(np.arange(10_000))
    assert (rows == 0).all(dim=1).double().mean() == pytest.approx(np.exp(-0.5), abs=0.02)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_features": 1, "active": 0.5},
        {"d_in": 1},
        {"d_in": 3, "noise": 1.0},
        {"active": 230.0},
        {"active": 0.001},
        {"active": 200.0, "skew": 3.0},
    ],
)
def test_extreme_settings_produce_finite_rows(settings: dict[str, Any]) -> None:
    source = synthetic(**settings)
    assert source.rows(np.arange(500)).isfinite().all()


def test_too_many_active_features_produce_a_one_sentence_error() -> None:
    most = r"^data\.active: must be at most 243\.2 with these features, trees and topics, not 243\.3$"
    with pytest.raises(JobFileError, match=most):
        synthetic(active=243.3)


# Tests for trees and topics.


@pytest.mark.parametrize("children", [1, 2, 4])
@pytest.mark.parametrize("topics", [0, 3])
def test_a_child_fires_only_with_its_parent_as_in_saelens(children: int, topics: int) -> None:
    hierarchy = pytest.importorskip("sae_lens.synthetic.hierarchy")
    source = synthetic(children=children, topics=topics, active=8.0, skew=0.7)
    fired, n_roots = source.firings(np.arange(3000)), source._n_roots
    nodes = [hierarchy.HierarchyNode(number) for number in range(256)]
    for number in range(n_roots, 256):
        parent = nodes[(number - n_roots) // children]
        parent.children = [*parent.children, nodes[number]]
    gated = hierarchy.hierarchy_modifier(nodes[:n_roots])(fired.clone())
    torch.testing.assert_close(gated, fired)
    parents = (torch.arange(n_roots, 256) - n_roots) // children
    given = (fired[:, n_roots:] > 0)[fired[:, parents] > 0].float().mean()
    assert 0.1 < given < 0.6


@pytest.mark.parametrize("options", [{}, {"children": 4}, {"topics": 6}, {"children": 3, "topics": 6, "skew": 0.0}])
def test_the_mean_number_of_active_features_matches_the_setting(options: dict[str, Any]) -> None:
    source = synthetic(**{"skew": 0.6} | options)
    n = float((source.firings(np.arange(40_000)) > 0).float().sum(1).mean())
    assert n == pytest.approx(5.0, rel=0.05)


def test_features_with_the_same_topic_fire_together() -> None:
    source = synthetic(topics=8, n_features=64)
    fired = (source.firings(np.arange(30_000)) > 0).float()
    table, topic = torch.corrcoef(fired.T), torch.arange(64) % 8
    same = (topic[:, None] == topic) & ~torch.eye(64, dtype=torch.bool)
    assert table[same].mean() > 0.03
    assert table[topic[:, None] != topic].mean() < 0


@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 40))
@settings(max_examples=25)
def test_a_row_is_the_sum_of_the_features_that_fire(children: int, topics: int, n: int) -> None:
    source = synthetic(children=children, topics=topics, skew=0.4)
    torch.testing.assert_close(source.rows(np.arange(n)), source.firings(np.arange(n)) @ source.features)


def test_more_topics_than_features_without_a_parent_are_refused() -> None:
    with pytest.raises(JobFileError, match=r"data.topics: must be at most the number of features without a parent, 12"):
        synthetic(children=4, topics=13)


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 9), st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=12)
def test_the_largest_accepted_number_of_active_features_can_be_reached(
    n: int, children: int, topics: int, skew: float
) -> None:
    options: dict[str, Any] = {"n_features": n, "children": children, "skew": skew}
    options["topics"] = min(topics, SyntheticSettings(**options).n_roots)
    most = SyntheticSettings(**options).most_active
    source = synthetic(**options, active=0.9999 * most)
    found = float((source.firings(np.arange(4000)) > 0).float().sum(1).mean())
    assert found == pytest.approx(most, rel=0.05)
    with pytest.raises(
        JobFileError, match=r"data.active: must be at most [0-9.]+ with these features, trees and topics"
    ):
        synthetic(**options, active=1.001 * most)
