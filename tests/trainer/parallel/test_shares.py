from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.shares import LEAST_SHARE, Shares, by_speed, even, parse_shares

speeds = st.floats(0.01, 100)


def normal(shares: tuple[float, ...]) -> list[float]:
    return [share / sum(shares) for share in shares]


def test_tokens_are_split_across_replicas_by_speed() -> None:
    shares = by_speed([3.0, 1.0], 1)
    assert normal(shares.tokens) == pytest.approx([0.75, 0.25])
    assert shares.latents == (1.0,)


def test_latents_are_split_across_the_ranks_in_a_row_by_speed() -> None:
    shares = by_speed([1.0, 2.0, 1.0], 3)
    assert normal(shares.latents) == pytest.approx([0.25, 0.5, 0.25])
    assert shares.tokens == (1.0,)


def test_ranks_with_similar_speeds_get_even_shares() -> None:
    assert by_speed([1.0, 1.1, 1.05, 1.0], 1) == even(4, 1)
    assert len(set(by_speed([1.0, 1.1], 2).latents)) == 1


def test_in_a_grid_a_row_is_as_fast_as_its_slowest_rank() -> None:
    shares = by_speed([2.0, 2.0, 1.0, 1.0], 2)
    assert normal(shares.tokens) == pytest.approx([2 / 3, 1 / 3])
    assert normal(shares.latents) == pytest.approx([0.5, 0.5])


def test_a_fast_gpu_with_little_memory_gets_a_share_that_fits() -> None:
    shares = by_speed([3.0, 1.0, 1.0], 3, capacity=[0.4, 0.9, 0.9])
    assert normal(shares.latents) == pytest.approx([0.4, 0.3, 0.3])


def test_memory_limits_the_shares_of_equally_fast_ranks() -> None:
    assert normal(by_speed([1.0, 1.0], 2, capacity=[0.25, 2.0]).latents) == pytest.approx([0.25, 0.75])


@given(st.lists(speeds, min_size=1, max_size=8), st.lists(st.floats(0.01, 2), min_size=8, max_size=8))
def test_every_rank_gets_a_share_and_memory_limits_are_respected_if_possible(
    found: list[float], capacity: list[float]
) -> None:
    capacity = capacity[: len(found)]
    shares = normal(by_speed(found, len(found), capacity).latents)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0.99 * LEAST_SHARE / len(found) / (1 + LEAST_SHARE)
    if sum(capacity) > 1 and min(capacity) > 2 * LEAST_SHARE / len(found):
        assert all(share <= most + 0.05 for share, most in zip(shares, capacity, strict=True))


def test_shares_can_be_set_by_the_user() -> None:
    assert normal(parse_shares("3:2", 1).tokens) == pytest.approx([0.6, 0.4])
    assert normal(parse_shares("3:2", 2).latents) == pytest.approx([0.6, 0.4])


def test_even_shares_are_1_for_each_row_and_column() -> None:
    assert even(2, 3) == Shares((1.0, 1.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (Shares((29.0, 39.0, 32.0), (1.0,)), "tokens per rank now 29 % / 39 % / 32 %"),
        (Shares((1.0,), (3.0, 1.0)), "latents per rank now 75 % / 25 %"),
        (Shares((3.0, 1.0), (1.0, 1.0)), "tokens per row of ranks now 75 % / 25 %"),
        (Shares((1.0, 1.0), (1.0,)), "tokens and latents are now shared evenly"),
    ],
)
def test_shares_are_reported_as_percentages(shares: Shares, said: str) -> None:
    assert shares.sentence() == said
