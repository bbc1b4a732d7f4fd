from __future__ import annotations

import pytest
import torch

from trainer.parallel.group import PeerLost, peers_expected


def test_memory_that_runs_out_in_an_exchange_is_not_told_as_a_lost_connection() -> None:
    with pytest.raises(torch.OutOfMemoryError), peers_expected("the connection to another rank was lost"):
        raise torch.OutOfMemoryError("out of memory")


def test_any_other_failure_is_told_by_what_was_tried() -> None:
    sentence = "the ranks could not find each other"
    with pytest.raises(PeerLost, match=rf"^{sentence} \(timed out\)$"), peers_expected(sentence):
        raise RuntimeError("timed out\nat somewhere.cpp:12")
