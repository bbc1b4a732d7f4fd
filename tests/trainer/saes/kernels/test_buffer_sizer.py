"""Tests selecting the values above a bound when the host has to guess how many there are, and may guess too low."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.contract.planning import latent_capacity
from trainer.runtime.device_queue import HostCopy
from trainer.saes.kernels import buffer_sizer
from trainer.saes.kernels.buffer_sizer import BufferSizer, largest_above
from trainer.saes.kernels.pre_acts import PreActs


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor | float, int]:
    """Draw pre-activations of any dtype, with or without ties, one bound or one bound per latent, and a buffer size."""
    n_tokens, d_sae = draw(st.integers(1, 60)), draw(st.sampled_from([1, 7, 24, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    values = torch.randn(n_tokens, d_sae, generator=generator) + draw(st.sampled_from([-2.0, 0.0]))
    values = (values.round() if draw(st.booleans()) else values).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # The bounds are so close to the values that the differences are 0 in 16 bits.
    bounds = values[0].to(wide) + 1e-9 * torch.randn(d_sae, generator=generator, dtype=wide)
    return values, bounds if draw(st.booleans()) else 0.0, draw(st.integers(1, n_tokens * d_sae))


@settings(max_examples=150)
@given(cases())
def test_all_values_above_the_bound_are_chosen_or_an_overflow_is_reported(
    case: tuple[Tensor, Tensor | float, int],
) -> None:
    matrix, bound, capacity = case
    (indices, values), n_above = largest_above(PreActs(matrix), bound, capacity)
    assert len(values) == len(indices.latents) == capacity
    is_above = matrix.to(torch.float64) > bound
    if n_above == capacity:
        assert values.isnan().all()
        return
    assert torch.equal(values, matrix[indices.tokens, indices.latents])
    chosen = torch.zeros_like(is_above)
    chosen[indices.tokens, indices.latents] = True
    assert int(chosen.sum()) == capacity
    assert not (is_above & ~chosen).any()
    assert int(is_above.sum()) <= n_above < capacity


def test_a_buffer_that_is_too_small_is_always_detected() -> None:
    matrix = torch.randn(50, 40)
    for bound in (0.0, torch.zeros(40)):
        n = int((matrix > bound).sum())
        assert largest_above(PreActs(matrix), bound, n + 1)[1] == n
        for capacity in (n, n // 2, 1):
            assert largest_above(PreActs(matrix), bound, capacity)[1] == capacity


@pytest.mark.parametrize("bound", [0.0, torch.zeros(40)])
def test_a_nan_is_chosen_and_does_not_count_as_a_buffer_overflow(bound: Any) -> None:
    matrix = torch.randn(50, 40)
    matrix[:10] = torch.nan
    (_, values), n_above = largest_above(PreActs(matrix), bound, 300)
    assert values.isnan().any()
    assert n_above < 300


@pytest.fixture
def sizer(monkeypatch: pytest.MonkeyPatch) -> BufferSizer:
    """Return a `BufferSizer` that uses sparse matmuls only if the buffer holds at most a quarter of all values."""
    monkeypatch.setattr(latent_capacity, "DENSE", 4)
    return BufferSizer()


def with_above(n_per_token: int, n_tokens: int = 50) -> PreActs:
    """Return pre-activations [n_tokens, 400] in which each token has `n_per_token` values above 0."""
    matrix = -1 - torch.rand(n_tokens, 400)
    return PreActs(matrix.index_fill(1, torch.arange(n_per_token), 1.0))


def capacities(sizer: BufferSizer, *n_per_token: int, ahead: bool = False) -> list[int | None]:
    """Return each batch's capacity per token, or None if all values of the batch are kept."""
    found = []
    for n in n_per_token:
        decided = sizer.decide(50, 400) if ahead else None
        found += capacities_in_step(sizer, n)
        assert not ahead or decided == (found[-1] and 50 * found[-1])
    return found


def capacities_in_step(sizer: BufferSizer, *n_per_token: int) -> list[int | None]:
    """Return the capacity per token for each micro-batch in one step."""
    chosen = [sizer.above(with_above(n), 0.0) for n in n_per_token]
    sizer.queued()
    return [None if one is None else len(one[1]) // 50 for one in chosen]


def test_the_capacity_is_a_quarter_above_the_maximum_in_earlier_batches(sizer: BufferSizer) -> None:
    assert capacities(sizer, 4, 9, 8, 9) == [None] * buffer_sizer.MEMORY
    # A quarter above the maximum of 9 is 11.25, which is rounded up to one of a few allowed sizes.
    assert capacities(sizer, 8, 8, 8, 8, 8) == [12, 12, 12, 12, 10]


def test_all_values_are_kept_while_the_count_grows_quickly(sizer: BufferSizer) -> None:
    assert capacities(sizer, 8, 12, 18, 27, 40, 60, 60) == [None] * 7
    assert capacities(sizer, 64, 66, 66) == [80, 96, 96]


def test_all_values_are_kept_after_an_overflow_or_if_too_many_exceed_the_bound(sizer: BufferSizer) -> None:
    assert capacities(sizer, 8, 8, 8, 8, 40) == [None, None, None, None, 10]
    assert sizer.overflowed
    assert capacities(sizer, 40, 40, 40, 40, 40, 9) == [None, None, None, None, 56, 56]
    assert not sizer.overflowed
    assert capacities(sizer, 40, 48, 57, 90, 90) == [56, 56, 80, 96, None]
    assert capacities(sizer, 9) == [None]


def test_the_capacity_follows_the_largest_micro_batch_in_earlier_steps(sizer: BufferSizer) -> None:
    steps = [(4, 4, 1), (9, 3, 1), (1, 8, 1), (1, 1, 9), (9, 8, 1)]
    assert [capacities_in_step(sizer, *step) for step in steps] == [[None] * 3] * buffer_sizer.MEMORY + [[12] * 3]


def test_growth_is_measured_between_steps_and_not_between_micro_batches(sizer: BufferSizer) -> None:
    for n in (8, 12, 18, 27, 40, 60, 60):
        assert capacities_in_step(sizer, n, n) == [None, None]
    for n, capacity in ((64, 80), (66, 96)):
        assert capacities_in_step(sizer, n, n) == [capacity, capacity]


def test_all_values_are_kept_from_the_step_after_a_micro_batch_overflows(sizer: BufferSizer) -> None:
    capacities(sizer, 8, 8, 8, 8)
    assert capacities_in_step(sizer, 8, 40, 8) == [10] * 3
    assert [capacities_in_step(sizer, 40, 8, 8) for _ in range(5)] == [[None] * 3] * 4 + [[56] * 3]


def test_no_micro_batch_waits_for_the_count_from_another_micro_batch_in_its_step(
    sizer: BufferSizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_step: list[HostCopy] = []
    waits = []

    class Number(HostCopy):
        """A count that the GPU computes only after the host has queued the entire step."""

        def __init__(self, number: Tensor) -> None:
            super().__init__(number)
            of_step.append(self)

        def read(self) -> Tensor:
            waits.append(self in of_step)
            return super().read()

    monkeypatch.setattr(buffer_sizer, "HostCopy", Number)
    for _ in range(6):
        of_step.clear()
        capacities_in_step(sizer, 8, 9, 8)
    # Every count except those from the last step was read after its own step had ended.
    assert waits == [False] * 15


def test_a_capacity_decided_in_advance_ignores_the_last_batch(sizer: BufferSizer) -> None:
    assert capacities(sizer, 8, 9, 11, 13, 16, 19, ahead=True) == [None, None, None, None, None, 24]
    assert not sizer.overflowed


def test_an_overflow_with_a_capacity_decided_in_advance_is_noticed_a_batch_later(sizer: BufferSizer) -> None:
    assert capacities(sizer, 8, 8, 8, 8, 8, 40, 40, ahead=True) == [None, None, None, None, None, 10, 10]
    assert sizer.overflowed
    assert capacities(sizer, 40, 40, 40, 40, 40, 40, ahead=True) == [None, None, None, None, None, 56]
    # If capacities are not decided in advance, the counts for all earlier batches are known.
    assert capacities(sizer, 40, 30, 30, 30, 30) == [56] * 5


def test_a_capacity_decided_in_advance_grows_quickly_and_shrinks_slowly(sizer: BufferSizer) -> None:
    sizer._expected = deque(maxlen=6)
    assert capacities(sizer, *[32] * 6, ahead=True)[-1] == 40
    # For a k of 32, the capacity of 40 is exactly one of the allowed sizes.
    assert capacities(sizer, 33, 31, 33, 31, 32, 31, 31, ahead=True) == [40, 40, 48, 48, 48, 48, 48]
    assert capacities(sizer, *[32] * 20, ahead=True) == [48] * 20
    assert capacities(sizer, *[16] * 12, ahead=True) == [48] * 10 + [20] * 2
    # After an overflow, the counts for earlier batches are forgotten.
    assert capacities(sizer, 16, 81, 16, 16, 16, 16, 16, 16, ahead=True) == [
        20,
        20,
        20,
        None,
        None,
        None,
        None,
        20,
    ]


def test_each_replay_of_a_pass_counts_as_a_batch(sizer: BufferSizer) -> None:
    capacities(sizer, 8, 8, 8, 8, 8, 8, ahead=True)
    assert sizer._pass is not None
    n_above = sizer._pass.n_above
    found = []
    for n in (9, 40, 9, 9):
        found.append(sizer.decide(50, 400))
        # A replayed pass never counts more values than its buffer can hold.
        n_above.fill_(50 * min(n, 10))
        sizer.queued()
    # The count of 9 from the first replay has been read, and is treated as growth.
    assert found == [500, 500, 800, None]


def test_a_rank_without_tokens_never_overflows(sizer: BufferSizer) -> None:
    for n_tokens in (50, 0) * 5:
        sizer.above(with_above(8, n_tokens), 0.0)
        sizer.queued()
        assert not sizer.overflowed


def test_in_deterministic_mode_the_capacity_does_not_depend_on_earlier_batches(sizer: BufferSizer) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert capacities(sizer, *[8] * 6) == [None] * 6
    finally:
        torch.use_deterministic_algorithms(False)
