from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.errors import UserError
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, all_gather, local_shard, reduce_scatter
from trainer.parallel.latents import Latents, apportion, shard_latents
from trainer.parallel.threads import Threads, on_all
from trainer.training.learner import Learner

shares = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(st.integers(0, 500), shares)
def test_apportioned_counts_add_up_and_differ_from_the_exact_share_by_less_than_one(
    total: int, wanted: list[float]
) -> None:
    counts = apportion(total, wanted)
    assert sum(counts) == total
    for count, share in zip(counts, wanted, strict=True):
        assert abs(count - total * share / sum(wanted)) < 1


@given(st.integers(1, 400), shares)
def test_every_prefix_of_the_latents_is_sharded_in_proportion(total: int, wanted: list[float]) -> None:
    parts = shard_latents(total, wanted)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(total))
    for ids, count in zip(parts, apportion(total, wanted), strict=True):
        assert torch.equal(ids, ids.sort().values)
        held = torch.zeros(total).index_fill(0, ids, 1).cumsum(0)
        expected = torch.arange(1, total + 1) * count / total
        assert int(held[-1]) == count
        assert float((held - expected).abs().max()) <= len(wanted)


@pytest.mark.parametrize("wanted", [None, [1.0, 3.0, 2.0]])
@pytest.mark.parametrize(("shape", "dim"), [((11,), 0), ((4, 11), 1), ((11, 4), 0)])
def test_the_parts_on_all_ranks_make_up_the_full_tensor(
    wanted: list[float] | None, shape: tuple[int, ...], dim: int
) -> None:
    whole = torch.randn(shape)

    def split_and_join(group: Threads) -> torch.Tensor | None:
        latents = Latents(11, group, wanted)
        part = latents.part(whole, dim)
        assert part.shape[dim] == latents.sizes[group.index] == len(latents.own)
        assert torch.equal(part, whole.index_select(dim, latents.own))
        if len(shape) == 1:
            assert torch.equal(latents.whole(part), whole)
        return latents.collect(part, dim)

    first, *others = on_all(3, split_and_join)
    assert torch.equal(first, whole)
    assert others == [None, None]
    if wanted:
        assert Latents(11, Threads(None, 3, 0), wanted).sizes == [2, 5, 4]  # type: ignore[arg-type]


def test_a_part_has_the_memory_layout_of_the_full_tensor() -> None:
    by_latent = torch.randn(12, 5).T
    (part, _) = on_all(2, lambda group: Latents(12, group).part(by_latent, 1))
    assert part.T.is_contiguous()


def test_after_loading_all_ranks_know_that_one_of_them_has_a_dead_latent(make_job) -> None:
    job = make_job(sae={"dead_after_tokens": 500})
    tensors = dict(Learner(job, 16, None, Parallel(torch.device("cpu"))).state.tensors())
    tensors["sae.n_tokens_since_fired"] = torch.arange(64) * 0 + 10
    tensors["sae.n_tokens_since_fired"][5] = 600

    def may_have_dead(group: Threads) -> bool:
        learner = Learner(job, 16, None, Parallel(torch.device("cpu"), latents=group))
        learner.state.load(tensors)
        return learner.sae.may_have_dead()

    # A rank with dead latents exchanges AuxK candidates, and would wait forever for a rank that skips this exchange.
    assert on_all(2, may_have_dead) == [True, True]


def test_after_a_log_interval_all_ranks_agree_on_whether_any_latent_is_dead(make_job) -> None:
    job, x = make_job(sae={"dead_after_tokens": 500}), torch.randn(128, 16)

    def may_have_dead(group: Threads) -> list[bool]:
        learner, answers = Learner(job, 16, None, Parallel(torch.device("cpu"), latents=group)), []
        for since_fired_of_first in (0, 600):
            # The host's upper bound has grown over many steps, although every latent has fired since.
            learner.sae.note_since_fired(torch.tensor([10**6]))
            learner.sae.n_tokens_since_fired[0] = since_fired_of_first * (group.index == 0)
            learner.accumulate(x, x)
            learner.values(learner.sums())
            answers.append(learner.sae.may_have_dead())
        return answers

    assert on_all(2, may_have_dead) == [[False, True]] * 2


def test_a_checkpoint_with_another_width_is_refused_even_if_part_of_it_would_fit(make_job) -> None:
    narrow, wide = make_job(sae={"d_sae": 32}), make_job(sae={"d_sae": 64})
    tensors = dict(Learner(narrow, 16, None, Parallel(torch.device("cpu"))).state.tensors())

    def load(group: Threads) -> None:
        with pytest.raises(UserError, match="has 32 latents instead of 64"):
            Learner(wide, 16, None, Parallel(torch.device("cpu"), latents=group)).state.load(tensors)

    on_all(2, load)


def test_parts_in_16_bits_are_summed_in_fp32() -> None:
    parts = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    results = on_all(2, lambda group: reduce_scatter(parts[group.index].expand(2, 1), group))
    assert [float(one) for one in results] == [257.0, 257.0]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("n_tokens", [2, 7])
def test_each_rank_gets_its_own_rows_of_a_sum_and_every_part_gets_its_gradient(n_ranks: int, n_tokens: int) -> None:
    parts = torch.randn(n_ranks, n_tokens, 3, dtype=torch.float64)
    target = torch.randn(n_tokens, 3, dtype=torch.float64)
    total = parts.sum(dim=0).requires_grad_()
    (total - target).pow(3).sum().backward()

    def shared(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        part = parts[group.index].clone().requires_grad_()
        own = reduce_scatter(part, group)
        (own - local_shard(target, group)).pow(3).sum().backward()
        return own.detach(), part.grad

    results = on_all(n_ranks, shared)
    torch.testing.assert_close(torch.cat([own for own, _ in results]), total.detach())
    for _, grad in results:
        torch.testing.assert_close(grad, total.grad)


def test_rows_from_all_ranks_are_gathered_even_if_there_are_fewer_rows_than_ranks() -> None:
    rows = torch.randn(2, 3)
    for rows_gathered in on_all(3, lambda group: all_gather(local_shard(rows, group), 2, group)):
        assert torch.equal(rows_gathered, rows)
