from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.threads import Thread, on_all
from trainer.parallel.latents import Latents, apportioned, dealt

shares = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(st.integers(0, 500), shares)
def test_whole_numbers_in_proportion_add_up_and_are_off_by_less_than_one(total: int, wanted: list[float]) -> None:
    counts = apportioned(total, wanted)
    assert sum(counts) == total
    for count, share in zip(counts, wanted, strict=True):
        assert abs(count - total * share / sum(wanted)) < 1


@given(st.integers(1, 400), shares)
def test_every_prefix_is_dealt_out_in_proportion_too(total: int, wanted: list[float]) -> None:
    parts = dealt(total, wanted)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(total))
    for ids, count in zip(parts, apportioned(total, wanted), strict=True):
        assert torch.equal(ids, ids.sort().values)
        held = torch.zeros(total).index_fill(0, ids, 1).cumsum(0)
        expected = torch.arange(1, total + 1) * count / total
        assert int(held[-1]) == count
        assert float((held - expected).abs().max()) <= len(wanted)


@pytest.mark.parametrize("wanted", [None, [1.0, 3.0, 2.0]])
@pytest.mark.parametrize(("shape", "dim"), [((11,), 0), ((4, 11), 1), ((11, 4), 0)])
def test_parts_make_the_whole_again(wanted: list[float] | None, shape: tuple[int, ...], dim: int) -> None:
    whole = torch.randn(shape)

    def split_and_join(group: Thread) -> torch.Tensor | None:
        latents = Latents(11, group, wanted)
        part = latents.part(whole, dim)
        assert part.shape[dim] == latents.sizes[group.index] == len(latents.own)
        assert torch.equal(part, whole.index_select(dim, latents.own))
        if len(shape) == 1:
            assert torch.equal(latents.whole(part), whole)
        return latents.collected(part, dim)

    first, *others = on_all(3, split_and_join)
    assert torch.equal(first, whole)
    assert others == [None, None]
    if wanted:
        assert Latents(11, Thread(None, 3, 0), wanted).sizes == [2, 5, 4]  # type: ignore[arg-type]


def test_a_part_lies_in_memory_as_the_whole_does() -> None:
    by_latent = torch.randn(12, 5).T
    (part, _) = on_all(2, lambda group: Latents(12, group).part(by_latent, 1))
    assert part.T.is_contiguous()
