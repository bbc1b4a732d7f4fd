from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainer.parallel.group import FAILED, LOST, PeerLost, exchanging, gather_rows, peers_expected, reduce_scatter
from trainer.parallel.threads import Threads, on_all
from trainer.parallel.waiting import waiting


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_running_out_of_memory_in_an_exchange_does_not_count_as_a_lost_connection(error: RuntimeError) -> None:
    with pytest.raises(type(error), match="out of memory"), peers_expected("the connection to another rank was lost"):
        raise error


def test_other_failures_are_reported_with_the_failed_operation() -> None:
    sentence = "the ranks could not find each other"
    with pytest.raises(PeerLost, match=rf"^{sentence} \(timed out\)$"), peers_expected(sentence):
        raise RuntimeError("timed out\nat somewhere.cpp:12")


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 401 'in this state'\n"
            "Exception raised from create at x.cpp:9",
            rf"^{FAILED} \(NCCL error in: .*NCCL version 2.27.5: Cuda failure 401 'in this state'\)$",
        ),
        (
            f"{NCCL}invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
            rf"^{FAILED} \(.*invalid usage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10\)$",
        ),
        (
            f"{NCCL}remote process exited or there was a network error\nLast error:\nCall to recv failed",
            rf"^{LOST} \(.*network error: Call to recv failed\)$",
        ),
        (f"{NCCL}unhandled system error\nLast error:\nno /dev/shm\n", rf"^{LOST} \(.*system error: no /dev/shm\)$"),
        ("[gloo/pair.cc:534] Connection closed by peer [::1]:4", rf"^{LOST} \(.*Connection closed by peer .*\)$"),
    ],
)
def test_a_failed_exchange_names_its_cause_and_blames_a_rank_only_if_it_is_lost(error: str, said: str) -> None:
    with pytest.raises(PeerLost, match=said), exchanging(waiting(torch.device("cpu"))):
        raise dist.DistBackendError(error)


def test_any_number_of_rows_is_gathered_from_each_rank_that_takes_part() -> None:
    own = [torch.randn(5, 3), torch.empty(0, 3), torch.randn(2, 3), torch.empty(0, 3)]

    def gather(group: Threads) -> list[torch.Tensor]:
        return gather_rows(group, own[group.index], is_there=group.index < 3)

    for gathered in on_all(4, gather, timeout_s=60):
        assert len(gathered) == 3
        assert all(map(torch.equal, gathered, own))
    nobody = on_all(2, lambda group: gather_rows(group, own[1], is_there=False), timeout_s=60)
    assert nobody == [[], []]


@pytest.mark.parametrize(
    ("read_in", "expected"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_ranks_with_dense_and_sparse_matmuls_send_the_same_dtype(
    read_in: torch.dtype | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.dtype] = []
    part_of_sum = Threads.part_of_sum

    def noted(group: Threads, tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.dtype)
        return part_of_sum(group, tensor)

    monkeypatch.setattr(Threads, "part_of_sum", noted)
    dtypes = torch.bfloat16, torch.float32

    def summed(group: Threads) -> tuple[torch.Tensor, torch.Tensor]:
        x_hat = torch.full((4, 3), 1.5, dtype=dtypes[group.index], requires_grad=True)
        part = reduce_scatter(x_hat, group, read_in)
        part.sum().backward()
        assert x_hat.grad is not None
        return part.detach(), x_hat.grad

    for index, (part, grad) in enumerate(on_all(2, summed, 20.0)):
        assert torch.equal(part, torch.full((2, 3), 3.0))
        assert part.dtype == torch.float32
        assert torch.equal(grad, torch.ones(4, 3, dtype=dtypes[index]))
    assert sent == [expected] * 2
