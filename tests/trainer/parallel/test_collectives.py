"""Tests that all ranks make the same `torch.distributed` calls in the same order.

The ranks are real processes. Their process groups pack and shard tensors, and start several transfers at once. The
GPU code path uses gloo.
"""

from __future__ import annotations

import itertools

import pytest
from support.logged_ranks import Call, Case, calls_of_ranks

from trainer.parallel import group

KINDS = ("topk", "batch_topk", "jumprelu")
MODES = ("ddp", "tensor", "hybrid")
# Two ranks are too few for hybrid mode. On the CPU path, a group's calls do not depend on the number of ranks, and four
# ranks take half the time of eight.
USUAL = [
    Case(size, path, {"architecture": kind}, {"mode": mode})
    for size, path in ((8, "gpu"), (4, "cpu"), (2, "gpu"))
    for kind in KINDS
    for mode in MODES[: 2 if size == 2 else 3]
]
UNUSUAL = [
    Case(4, "gpu", {"architecture": "topk"}, {"mode": "ddp", "zero": False}),
    Case(8, "gpu", {"architecture": "topk"}, {"mode": "hybrid", "zero": False, "gradients": "bf16"}),
    Case(4, "gpu", {"architecture": "batch_topk"}, {"mode": "ddp", "gradients": "bf16"}),
    Case(4, "cpu", {"architecture": "batch_topk"}, {"mode": "ddp", "gradients": "bf16"}),
    Case(4, "gpu", {"architecture": "jumprelu"}, {"mode": "hybrid"}, {"accumulate": 2}),
    Case(4, "gpu", {"architecture": "topk"}, {"mode": "ddp", "shares": "1:2:2:4"}),
    Case(4, "gpu", {"architecture": "batch_topk"}, {"mode": "tensor", "shares": "1:2:2:4"}),
    Case(8, "gpu", {"architecture": "topk"}, {"mode": "hybrid", "latent_ranks": 4, "shares": "1:2:2:4:3:3:5:1"}),
    # The latents are not evenly divisible by the number of replicas, nor the tokens by the number of ranks sharing
    # latents.
    Case(8, "gpu", {"architecture": "topk", "d_sae": 50}, {"mode": "ddp"}),
    Case(8, "gpu", {"architecture": "batch_topk", "d_sae": 50}, {"mode": "hybrid"}, {"batch_size": 27}),
]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[Call]]]:
    return calls_of_ranks([*USUAL, *UNUSUAL], tmp_path_factory.mktemp("ranks"))


def test_all_ranks_in_a_group_make_the_same_calls_in_the_same_order(calls: list[list[list[Call]]]) -> None:
    for number, case in enumerate([*USUAL, *UNUSUAL]):
        of_ranks = [of_rank[number] for of_rank in calls[: case.size]]
        assert all(of_ranks)
        for one, other in itertools.permutations(range(case.size), 2):
            ours, theirs = (
                [call for call in of_ranks[rank] if {one, other} <= {*call.members}] for rank in (one, other)
            )
            assert [call.of_all for call in ours] == [call.of_all for call in theirs], (
                f"{case}, ranks {one} and {other}"
            )
            sent = [call.sends[call.members.index(other)] for call in ours if call.sends]
            assert sent == [call.receives[call.members.index(one)] for call in theirs if call.receives]


def test_the_cases_cover_every_kind_of_exchange(calls: list[list[list[Call]]]) -> None:
    of_first = list(itertools.chain(*calls[0]))
    parts, whole = group._reduce_scatter.__name__, group._all_gather.__name__
    names = {"all_reduce", "broadcast", "all_to_all_single", "coalescing", "coalesced", parts, whole}
    assert {call.name for call in of_first} == names
    assert any("bfloat16" in word for call in of_first for word in call.arguments)


def test_rows_are_exchanged_before_and_between_steps(
    calls: list[list[list[Call]]],
) -> None:
    number = USUAL.index(Case(8, "gpu", {"architecture": "topk"}, {"mode": "tensor"}))
    of_rows = [at for at, call in enumerate(calls[0][number]) if "uint8" in " ".join(call.arguments)]
    # The ranks exchange rows twice before the first step and once before the second step.
    first, second, third = of_rows
    assert second == first + 1
    assert third > second + 1
