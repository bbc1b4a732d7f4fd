"""Tests speed measurement on ranks with very little memory. The ranks are real processes with a memory limit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.rank_faults import starve
from torch import Tensor

from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.plan import Plan
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.parallel import calibrate
from trainer.parallel.calibrate import Within, bus_of, within_memory
from trainer.parallel.threads import on_all


@pytest.fixture
def run(start_ranks: Callable, make_job: Callable[..., JobConfig], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that trains on `world_size` ranks, where the last rank has only `mib` MiB of free memory.

    The function returns the stored measurements and the plan.
    """

    def run(world_size: int, mib: int) -> tuple[Any, Plan]:
        ranks = start_ranks(
            make_job(),
            world_size,
            prepare=functools.partial(starve, mib, world_size - 1),
            measures_in_full=True,
            box_file=tmp_path / "box.json",
        )
        assert ranks.wait() == [EXIT_FINISHED] * world_size, [one.stderr.read() for one in ranks.processes]
        plan = msgspec.json.decode((tmp_path / "run" / "attempt1" / "plan.json").read_bytes(), type=Plan)
        return read_box(tmp_path / "box.json"), plan

    return run


# The memory limits leave space for all of the test data, a quarter of it, or none.
@pytest.mark.parametrize(("mib", "is_kept"), [(1000, True), (60, False), (24, False)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_with_little_memory_trains_and_is_measured_with_less_data_or_not_at_all(
    world_size: int, mib: int, is_kept: bool, run: Callable[..., Any]
) -> None:
    box, plan = run(world_size, mib)
    # Speeds that are assumed or were measured with less data are not stored for this machine.
    assert (CPU in box.devices) == is_kept
    assert plan.ranks == world_size
    if not is_kept:
        # Assumed speeds do not justify uneven shares.
        assert len(set(plan.token_shares)) == len(set(plan.latent_shares)) == 1


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_matmuls_are_measured_on_random_data_without_changing_the_random_state(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[Tensor] = []

    def run_once(work: Callable[[], Tensor], device: torch.device) -> float:
        products.append(work())
        return 1.0

    monkeypatch.setattr(calibrate, "fastest", run_once)
    torch.manual_seed(7)
    calibrate.products_per_s(torch.device("cpu"), precision, parts=4)
    (product,) = products
    assert product.dtype == dtype
    assert len(product.unique()) > 1000
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))


def test_smaller_measurements_are_tried_until_memory_suffices() -> None:
    tried: list[int] = []

    def work(parts: int) -> str:
        tried.append(parts)
        # 2^60 bytes exceed any address space.
        torch.empty(2**60 if parts < 4 else 1)
        return "measured"

    assert within_memory(work, torch.device("cpu")) == Within("measured", is_whole=False)
    assert tried == [1, 2, 4]


def test_there_is_no_result_if_even_the_smallest_measurement_does_not_fit() -> None:
    result = within_memory(lambda parts: torch.empty(2**60), torch.device("cpu"))
    assert result == Within(None, is_whole=False)


def test_other_failures_are_not_mistaken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        within_memory(lambda parts: torch.ones(2, 3) @ torch.ones(2, 3), torch.device("cpu"))


def test_all_ranks_skip_measuring_a_sum_if_memory_is_too_small_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert None not in on_all(2, lambda group: bus_of(group, cpu), timeout_s=60)
    monkeypatch.setitem(calibrate._SUMMED, "cpu", 2**60)
    assert on_all(2, lambda group: bus_of(group, cpu), timeout_s=60) == [None, None]
