from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.activations.micro_batches import Cut


@given(
    n_tokens=st.integers(1, 5000),
    n_parts=st.integers(1, 7),
    shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
)
def test_each_token_in_a_step_goes_to_exactly_one_rank_and_every_rank_gets_tokens(
    n_tokens: int, n_parts: int, shares: list[float]
) -> None:
    n_tokens += n_parts * len(shares)
    of_ranks = [Cut(n_tokens, n_parts, shares, index).token_slices for index in range(len(shares))]
    positions = [place for own in of_ranks for start, length, _ in own for place in range(start, start + length)]
    assert sorted(positions) == list(range(n_tokens))
    assert all(token_slice.length > 0 for own in of_ranks for token_slice in own)
    for part in zip(*of_ranks, strict=True):
        assert {token_slice.of_all for token_slice in part} == {sum(token_slice.length for token_slice in part)}


def test_tokens_are_split_in_proportion_to_the_shares() -> None:
    assert [Cut(4000, 2, [3.0, 1.0], index).own_tokens for index in range(2)] == [3000, 1000]


def test_micro_batch_sizes_differ_by_at_most_one_token() -> None:
    assert [token_slice.of_all for token_slice in Cut(100, 3).token_slices] == [34, 33, 33]
