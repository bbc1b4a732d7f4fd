"""Runs the cases for captured steps (CUDA graphs) in Triton's interpreter, and tests which steps are captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fake_gpu import job_of
from support.interpreted import in_two_shares, run_cases

from trainer.contract.planning import graph_capture
from trainer.contract.planning.workload import Layout
from trainer.parallel.base import Parallel
from trainer.training.graph_replay import CudaTape, replay_for
from trainer.training.learner import Learner

CASES = Path(__file__).with_name("graph_replay_cases.py")


@in_two_shares
def test_captured_steps_are_bit_identical_to_eager_steps(among: str) -> None:
    run_cases(CASES, on_cpu=True, among=among)


class Card:
    """Simulates torch's memory pools, in which a failed capture stays active."""

    device_index = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: object = self
        self.under_way: set[tuple[int, int]] = set()
        self.pools: set[tuple[int, int]] = set()
        for name in ("CUDAGraph", "current_stream", "graph_pool_handle", "graph", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: self.pools.remove(pool), raising=False)
        self.is_broken = False

    CUDAGraph = object

    def current_stream(self) -> object:
        return self.stream

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools.add((0, 7))
        return 0, 7

    def set_stream(self, stream: object) -> None:
        self.stream = stream

    def end(self, index: int, pool: tuple[int, int]) -> None:
        if index != self.device_index or pool not in self.under_way:
            raise RuntimeError("not currently recording to this pool")
        self.under_way.remove(pool)

    @contextlib.contextmanager
    def graph(self, graph: object, pool: tuple[int, int], *, capture_error_mode: str) -> Iterator[None]:
        self.stream = graph
        self.under_way.add(pool)
        try:
            yield
        finally:
            if self.is_broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.end(self.device_index, pool)
            self.stream = self


@pytest.mark.parametrize("breaks", [True, False])
def test_a_failed_capture_restores_the_memory_pool_and_the_gpu_stream(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch)

    def wait() -> None:
        card.is_broken = breaks
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        CudaTape().record(wait)
    assert card.stream is card
    assert not card.under_way
    # If a capture ends normally, torch frees its memory pool along with the graph.
    assert card.pools == (set() if breaks else {(0, 7)})


def pays(sae: dict[str, object], d_in: int = 768, precision: str = "bf16", ranks: int = 1, **train: object) -> bool:
    job = job_of({"architecture": "topk", "d_sae": 24576} | sae, {"batch_size": 4096} | train)
    return graph_capture.pays(Layout(job, ranks), d_in, d_in, precision=precision)


def test_single_gpu_steps_are_captured_unless_they_are_very_long() -> None:
    assert pays({})
    assert pays({"architecture": "batch_topk"})
    assert pays({"d_sae": 65536}, d_in=2304)
    assert not pays({"d_sae": 262144}, d_in=2304)
    assert not pays({}, ranks=2)
    assert not pays({}, precision="fp32")
    assert not pays({}, accumulate=2)
    assert not pays({}, deterministic=True)
    assert not pays({}, optimizer="signum")
    assert pays({"architecture": "jumprelu"})
    # With 512 active latents, sparse matmuls are never faster than dense ones.
    assert not pays({"architecture": "jumprelu", "k": 512})
    assert not pays({"k": [16, 32]})


def test_a_cpu_captures_no_steps() -> None:
    job = job_of({"architecture": "topk", "d_sae": 64}, {"batch_size": 64, "precision": "bf16"})
    alone = Parallel(torch.device("cpu"))
    assert replay_for(Learner(job, 16, None, alone), job, alone) is None
