"""Tests that no rank uses a kernel that fails on any rank."""

from __future__ import annotations

import threading

import pytest
import torch
from support.fake_gpu import job_of

from trainer.parallel import same_kernels
from trainer.parallel.group import Group
from trainer.parallel.threads import Threads, on_all
from trainer.runtime.triton_kernels import COMPILED_UPDATES, GRADIENT_SCALES, SPARSE_PRODUCTS, Kernels

SPARSE, SCALE = SPARSE_PRODUCTS.module, GRADIENT_SCALES.module
FAILURES = [{SCALE: "no fp8"}, {SCALE: "no fp8", SPARSE: "cache gone"}, {SCALE: "no fp8"}]


def test_one_rank_per_host_compiles_first_and_no_rank_uses_a_failed_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    withheld: list[set[str]] = []

    # The ranks are threads in this test.
    of_thread = threading.local()

    def try_all(device: torch.device, dtype: torch.dtype, _: object) -> dict[str, str]:
        tried.append(of_thread.rank)
        return FAILURES[of_thread.rank]

    def agree(group: Threads) -> list[str]:
        sentences: list[str] = []
        of_thread.rank = group.index
        same_kernels.agree(
            group,
            torch.device("cpu"),
            job_of({}, {"precision": "bf16"}),
            compiles=group.index == 0,
            report=sentences.append,
        )
        return sentences

    monkeypatch.setattr(same_kernels, "try_all", try_all)
    monkeypatch.setattr(same_kernels, "withhold", lambda names: withheld.append(set(names)))
    reported = on_all(3, agree, timeout_s=60)
    assert tried[0] == 0
    assert sorted(tried) == [0, 0, 1, 2]
    assert withheld == [{SPARSE, SCALE}] * 3
    expected = [
        "sparse matmuls run without Triton, which is slower: it fails on rank 1 (cache gone)",
        "gradient scales run without Triton, which is slower: it fails (no fp8)",
    ]
    assert reported == [expected] * 3


@pytest.mark.parametrize(
    ("sae", "train", "compiles_updates"),
    [
        ({}, {}, False),
        ({"architecture": "batch_topk", "skip": True}, {}, True),
        ({}, {"optimizer": "signum"}, True),
        ({}, {"optimizer": ["adam", "muon"]}, True),
    ],
    ids=str,
)
def test_compiled_updates_are_tried_only_if_the_job_uses_them(
    sae: dict[str, object], train: dict[str, object], compiles_updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Kernels] = []
    monkeypatch.setattr(same_kernels, "try_all", lambda device, dtype, kernels: tried.extend(kernels) or {})
    agreed = {"compiles": False, "report": print}
    same_kernels.agree(Group(), torch.device("cpu"), job_of(sae, train), **agreed)
    assert (COMPILED_UPDATES in tried) == compiles_updates
    assert {SPARSE_PRODUCTS, GRADIENT_SCALES} < set(tried)
