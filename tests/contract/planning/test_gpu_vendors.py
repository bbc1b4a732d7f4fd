"""Which cards CUDA_VISIBLE_DEVICES leaves visible, as CUDA reads it."""

from __future__ import annotations

import pytest

from trainer.contract.planning.gpu_vendors import VENDORS

CARDS = [(0, "GPU-aa11"), (1, "GPU-ab22"), (2, "GPU-cc33"), (3, "GPU-dd44")]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("1,9,2", [1]),
        ("0,-1,2", [0]),
        ("none", []),
        ("1st,2", [1, 2]),
        ("1,1", []),
        ("GPU-cc33,GPU-aa11", [2, 0]),
        ("GPU-dd,GPU-c", [3, 2]),
        ("GPU-CC", [2]),
        ("GPU-a,GPU-c", []),
        ("GPU-cc33,GPU-cc", []),
        ("GPU-cc33,0", [2]),
        ("0,GPU-cc33", [0]),
        ("MIG-cc33", []),
    ],
)
def test_a_list_ends_before_what_names_no_card_and_twice_the_same_is_none(text, indices):
    assert VENDORS["nvml"].visible_indices(text, CARDS) == indices


def test_numbers_are_those_of_the_cards_that_can_be_read():
    assert VENDORS["nvml"].visible_indices("2,1", [(0, "GPU-a"), (2, "GPU-c")]) == [2]
