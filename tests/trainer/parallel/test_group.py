from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainer.parallel.group import PeerLost, peers_expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77\nLast error:\nCuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_runs_out_in_an_exchange_is_not_told_as_a_lost_connection(error: RuntimeError) -> None:
    with pytest.raises(type(error), match="out of memory"), peers_expected("the connection to another rank was lost"):
        raise error


def test_any_other_failure_is_told_by_what_was_tried() -> None:
    sentence = "the ranks could not find each other"
    with pytest.raises(PeerLost, match=rf"^{sentence} \(timed out\)$"), peers_expected(sentence):
        raise RuntimeError("timed out\nat somewhere.cpp:12")
