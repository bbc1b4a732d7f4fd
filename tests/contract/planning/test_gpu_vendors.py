"""Which cards CUDA_VISIBLE_DEVICES leaves visible, as CUDA reads it."""

from __future__ import annotations

import pytest

from trainer.contract.planning.gpu_vendors import VENDORS, is_slice_by_name, refusal_of_slices

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


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("MIG-b", [3]),
        ("MIG-b,MIG-a", [3, 2]),
        ("MIG-b,GPU-whole", [3, 1]),
        ("3", []),
        ("1,2", [1]),
    ],
)
def test_slices_are_named_by_their_identity_and_by_no_number(text, indices):
    cards = [(0, "GPU-split"), (1, "GPU-whole"), (2, "MIG-a"), (3, "MIG-b")]
    assert VENDORS["nvml"].visible_indices(text, cards) == indices


@pytest.mark.parametrize(
    ("gpus", "refused"),
    [([], False), ([(2, True)], False), ([(0, False), (1, False)], False), ([(2, True), (3, True)], True),
     ([(0, False), (3, True)], True)],
)  # fmt: skip
def test_ranks_that_exchange_are_refused_more_than_one_gpu_where_one_is_a_slice(gpus, refused):
    assert ("NCCL cannot connect slices" in refusal_of_slices(gpus)) == refused


def test_the_name_that_pytorch_has_for_a_slice_tells_it_from_a_card():
    nvml, names = VENDORS["nvml"], ("NVIDIA H200", "NVIDIA H200 MIG 1g.18gb")
    assert [nvml.prefix_of(name) for name in names] == ["GPU-", "MIG-"]
    assert [is_slice_by_name(name) for name in (*names, "AMD Instinct MI300X")] == [False, True, False]


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, None),
        ({"ROCR_VISIBLE_DEVICES": "GPU-cc33"}, "GPU-cc33"),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, "1,0"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-cc33,1,GPU-aa11", "HIP_VISIBLE_DEVICES": "2,0"}, "GPU-aa11,GPU-cc33"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1,2"}, "3"),
    ],
)
def test_of_amd_the_second_variable_counts_the_cards_that_the_first_leaves(environ, text):
    assert VENDORS["amdsmi"].visible_devices(environ) == text


def test_a_rank_on_cards_of_amd_is_not_kept_from_them_by_a_variable_that_it_inherits():
    pinned = VENDORS["amdsmi"].pin(["GPU-cc33", "GPU-aa11"])
    assert pinned == {"ROCR_VISIBLE_DEVICES": "GPU-cc33,GPU-aa11", "HIP_VISIBLE_DEVICES": "0,1"}
    inherited = {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": ""}
    assert VENDORS["amdsmi"].visible_devices(inherited | pinned) == "GPU-cc33,GPU-aa11"
