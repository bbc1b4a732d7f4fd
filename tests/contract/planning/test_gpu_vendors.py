"""Tests that we interpret CUDA_VISIBLE_DEVICES and its AMD counterparts in the same way as CUDA and ROCm."""

from __future__ import annotations

import pytest

from trainer.contract.planning.gpu_vendors import VENDORS, is_slice_by_name, refusal_of_slices

GPUS = [(0, "GPU-aa11"), (1, "GPU-ab22"), (2, "GPU-cc33"), (3, "GPU-dd44")]


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
def test_a_gpu_list_ends_at_the_first_unknown_gpu_and_is_empty_if_it_has_duplicates(text, indices):
    assert VENDORS["nvml"].visible_indices(text, GPUS) == indices


def test_numbers_in_a_gpu_list_refer_to_the_indices_of_readable_gpus():
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
def test_mig_slices_are_selected_by_uuid_and_not_by_index(text, indices):
    gpus = [(0, "GPU-split"), (1, "GPU-whole"), (2, "MIG-a"), (3, "MIG-b")]
    assert VENDORS["nvml"].visible_indices(text, gpus) == indices


@pytest.mark.parametrize(
    ("gpus", "refused"),
    [([], False), ([(2, True)], False), ([(0, False), (1, False)], False), ([(2, True), (3, True)], True),
     ([(0, False), (3, True)], True)],
)  # fmt: skip
def test_several_gpus_are_refused_for_ranks_if_one_is_a_slice(gpus, refused):
    assert ("NCCL cannot connect slices" in refusal_of_slices(gpus)) == refused


def test_a_slice_is_recognised_by_its_name_in_pytorch():
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
def test_on_amd_the_second_variable_indexes_the_gpus_that_the_first_one_selects(environ, text):
    assert VENDORS["amdsmi"].visible_devices(environ) == text


def test_an_inherited_variable_does_not_hide_amd_gpus_from_a_rank():
    pinned = VENDORS["amdsmi"].pin(["GPU-cc33", "GPU-aa11"])
    assert pinned == {"ROCR_VISIBLE_DEVICES": "GPU-cc33,GPU-aa11", "HIP_VISIBLE_DEVICES": "0,1"}
    inherited = {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": ""}
    assert VENDORS["amdsmi"].visible_devices(inherited | pinned) == "GPU-cc33,GPU-aa11"
