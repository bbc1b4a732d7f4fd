from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.races import HERE, Moment, races_in

from trainer.contract.errors import UserError
from trainer.parallel import threads
from trainer.parallel.group import PeerLost
from trainer.parallel.threads import Threads, on_all
from trainer.runtime.device_queue import CompletedWork


def test_tensors_with_different_shapes_are_summed_over_all_ranks_in_place() -> None:
    def work(group: Threads) -> list[torch.Tensor]:
        tensors = [torch.full(shape, float(group.index + 1)) for shape in ((5, 3), (7,), (), (4, 1))]
        # This tensor is non-contiguous, like a weight matrix in which each latent is contiguous.
        tensors.append(torch.full((6, 5), float(group.index + 1)).T)
        group.sum_(*tensors)
        return tensors

    for tensors in on_all(3, work):
        assert all(torch.equal(tensor, torch.full(tensor.shape, 6.0)) for tensor in tensors)


def test_the_tensor_on_the_first_rank_replaces_those_on_the_other_ranks() -> None:
    def work(group: Threads) -> float:
        own = torch.tensor([float(group.index)])
        group.copy_from_first_([own])
        return float(own)

    assert on_all(3, work) == [0.0, 0.0, 0.0]


def test_only_the_first_rank_receives_collected_rows() -> None:
    def work(group: Threads) -> int:
        return len(group.collect(torch.zeros(group.index + 1, 2), [1, 2, 3], 0))

    assert on_all(3, work) == [3, 0, 0]


def test_a_failing_thread_releases_the_other_threads_and_its_error_is_raised() -> None:
    lost: list[int] = []

    def work(group: Threads) -> None:
        if group.index == 1:
            raise UserError("no luck")
        try:
            group.sum_(torch.zeros(1))
        except PeerLost:
            lost.append(group.index)
            raise

    with pytest.raises(UserError, match="no luck"):
        on_all(3, work)
    assert sorted(lost) == [0, 2]


@pytest.mark.parametrize("n_rows", [7, 9])
def test_each_thread_sums_one_part_and_sends_the_result_to_all_threads(n_rows: int) -> None:
    owns = torch.randn(3, n_rows, 4)

    def in_parts(group: Threads) -> torch.Tensor:
        tensor = owns[group.index].clone()
        group.sum_parts_([tensor])
        part = tensor.tensor_split(3)[group.index]
        torch.testing.assert_close(part, owns.sum(dim=0).tensor_split(3)[group.index])
        # The thread modifies its part of the tensor, just as an optimizer updates its part of the weights.
        part += 1
        group.spread_parts_([tensor])
        return tensor

    for received in on_all(3, in_parts):
        torch.testing.assert_close(received, owns.sum(dim=0) + 1)


EXCHANGES: dict[str, Callable[[Threads, torch.Tensor], object]] = {
    "sum": lambda group, tensor: group.sum_(tensor),
    "sum of parts": lambda group, tensor: group.sum_parts_([tensor]),
    "spread": lambda group, tensor: group.spread_parts_([tensor]),
    "gather": lambda group, tensor: group.gather(tensor),
    "to owners": lambda group, tensor: group.to_owners(tensor),
    "from owners": lambda group, tensor: group.from_owners(tensor, 6),
    "copy": lambda group, tensor: group.copy_from_first_([tensor]),
}


@pytest.mark.parametrize("kind", EXCHANGES)
def test_gpu_queues_wait_for_each_other_without_blocking_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an exchange waits after all writes and again after all reads, and that both waits are needed."""

    def give_and_change(group: Threads) -> None:
        tensor = torch.ones(6, 4) * group.index if kind != "from owners" else torch.ones(3, 2, 4)
        EXCHANGES[kind](group, tensor)
        tensor.zero_()

    def without(left_out: int) -> list[str]:
        n_moments = [0] * 3

        def made(device: torch.device) -> Moment | CompletedWork:
            n_moments[HERE.queue.index] += 1
            return CompletedWork() if n_moments[HERE.queue.index] == left_out else Moment(device)

        monkeypatch.setattr(threads, "moment", made)
        return races_in(3, give_and_change)

    assert without(0) == []
    assert without(1)
    assert without(2)
