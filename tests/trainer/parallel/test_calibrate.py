"""The measured speed of ranks that have hardly any memory meanwhile: real processes with a real limit."""

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
    """Return a function that trains on so many ranks, the last of which has so many MiB to spare.

    It returns the measured figures that are stored, and the plan.
    """

    def run(world_size: int, mib: int) -> tuple[Any, Plan]:
        ranks = start_ranks(
            make_job(),
            world_size,
            prepare=functools.partial(starve, mib, world_size - 1),
            box_file=tmp_path / "box.json",
        )
        assert ranks.wait() == [EXIT_FINISHED] * world_size, [one.stderr.read() for one in ranks.processes]
        plan = msgspec.json.decode((tmp_path / "run" / "attempt1" / "plan.json").read_bytes(), type=Plan)
        return read_box(tmp_path / "box.json"), plan

    return run


# Of the copy there is room for all, for a quarter, and for nothing.
@pytest.mark.parametrize(("mib", "is_kept"), [(1000, True), (60, False), (24, False)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_with_hardly_any_memory_is_measured_by_less_or_not_at_all_and_trains(
    world_size: int, mib: int, is_kept: bool, run: Callable[..., Any]
) -> None:
    box, plan = run(world_size, mib)
    # Measured with little, or assumed, it is not what this box is remembered by.
    assert (CPU in box.cards) == is_kept
    assert plan.ranks == world_size
    if not is_kept:
        # What was assumed of one rank is no reason to give it more than another.
        assert len(set(plan.token_shares)) == len(set(plan.latent_shares)) == 1


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_measured_on_data_that_varies_without_a_trace_in_the_runs_random_numbers(
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


def test_less_is_tried_until_there_is_memory_for_it() -> None:
    tried: list[int] = []

    def work(parts: int) -> str:
        tried.append(parts)
        # More than any address space holds.
        torch.empty(2**60 if parts < 4 else 1)
        return "measured"

    assert within_memory(work, torch.device("cpu")) == Within("measured", is_whole=False)
    assert tried == [1, 2, 4]


def test_where_there_is_memory_for_nothing_there_is_no_figure() -> None:
    result = within_memory(lambda parts: torch.empty(2**60), torch.device("cpu"))
    assert result == Within(None, is_whole=False)


def test_what_fails_for_another_reason_is_not_taken_for_missing_memory() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        within_memory(lambda parts: torch.ones(2, 3) @ torch.ones(2, 3), torch.device("cpu"))


def test_ranks_without_memory_for_a_sum_agree_not_to_measure_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert None not in on_all(2, lambda group: bus_of(group, cpu), timeout_s=60)
    monkeypatch.setitem(calibrate._SUMMED, "cpu", 2**60)
    assert on_all(2, lambda group: bus_of(group, cpu), timeout_s=60) == [None, None]
