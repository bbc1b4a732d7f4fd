from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trainer.saes.kernels import sparse
from trainer.self_test import products, run
from trainer.self_test.base import CPU, Check
from trainer.self_test.feeding import check_feeding
from trainer.self_test.learning import check_curves, check_resuming
from trainer.self_test.products import check_products, check_selections
from trainer.training.sharded_state import ShardedState


def wrong(checks: Iterator[Check]) -> list[Check]:
    return [check for check in checks if not check.ok]


@pytest.fixture
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit matmuls with real model widths, which take ten seconds on a CPU."""
    monkeypatch.setattr(products, "CASES", {name: case for name, case in products.CASES.items() if "d_in" not in name})


@pytest.mark.usefixtures("small_cases")
def test_matmuls_and_selections_on_a_cpu_are_correct() -> None:
    assert len(products.CASES) >= 4
    assert not wrong(check_products(CPU))
    assert not wrong(check_selections(CPU))


@pytest.mark.slow
def test_matmuls_with_real_model_widths_are_correct_on_a_cpu() -> None:
    assert not wrong(check_products(CPU))


@pytest.mark.usefixtures("small_cases")
def test_a_slightly_wrong_matmul_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sparse.bag_sums
    monkeypatch.setattr(sparse, "bag_sums", lambda *args, **named: right(*args, **named) * 1.0001)
    names = {check.name.partition(":")[0] for check in wrong(check_products(CPU))}
    assert names == {"decoding", "gradient of weights", "both gradients"}


def test_batches_and_log_intervals_are_correct_and_a_wrong_row_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not wrong(check_feeding(CPU))
    used = iter([torch.zeros_like, *[lambda x: x] * 200])
    monkeypatch.setattr("trainer.self_test.feeding._used", lambda x: next(used)(x))
    (check,) = wrong(check_feeding(CPU))
    assert check.found == {"differing": [0]}


def test_state_that_is_missing_from_a_checkpoint_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = ShardedState.tensors

    def without_moments(state: ShardedState) -> Iterator[tuple[str, Tensor]]:
        return ((name, one) for name, one in tensors(state) if "optimizer." not in name)

    monkeypatch.setattr(ShardedState, "tensors", without_moments)
    monkeypatch.setattr("trainer.self_test.learning.ARCHITECTURES", ("topk",))
    monkeypatch.setattr("trainer.self_test.learning.OTHERS", ())
    (check,) = check_resuming(CPU, half=2)
    assert not check.ok
    assert "sae.W_dec" in check.found["differing"]


def test_a_learning_curve_that_diverges_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.self_test.learning.ARCHITECTURES", ("topk",))
    fvus = iter([0.5, 0.2, 0.5, 0.22])
    monkeypatch.setattr("trainer.self_test.learning._fvu", lambda *_: next(fvus))
    (check,) = check_curves(CPU, n_steps=6)
    assert not check.ok


def test_an_exception_in_a_check_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_selections(device: torch.device) -> Iterator[Check]:
        raise RuntimeError("an illegal memory access\nwas encountered")

    monkeypatch.setattr(run, "SHORT", (check_selections,))
    (check,) = run.checks(CPU, full=False)
    assert (check.part, check.ok) == ("selections", False)
    assert check.found == {"error": "RuntimeError: an illegal memory access"}


def test_the_command_reports_a_missing_gpu() -> None:
    done = subprocess.run([sys.executable, "-m", "trainer", "self-test"], capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2
    assert done.stderr == "--gpus: this machine has no GPU; cpu checks its CPU\n"


def test_the_result_counts_the_checks_and_names_the_failed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Check("products", "a", True, {}), Check("products", "b", False, {"off": 0.1})
    monkeypatch.setattr(run, "SHORT", (lambda device: iter(checks),))
    found = run.run({}, full=False, tell=lambda check: None)
    assert (found["device"], found["ok"], found["checks"]) == ("CPU", False, 2)
    assert json.dumps(found["failed"]) == '[{"part": "products", "name": "b", "ok": false, "found": {"off": 0.1}}]'
