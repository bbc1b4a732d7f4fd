from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from support.steps import take_alone
from torch import Tensor

from trainer.contract.planning.hardware import auto_precision, usual_capability
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.runtime.precision import (
    autocast,
    resolve_precision,
    set_deterministic,
    set_matmul_precision,
)
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the process-wide precision settings after each test."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(matmul)
    cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def learner(job: JobConfig) -> Learner:
    made = Learner(job, 16, None, Parallel(CPU))
    made.initialise(batch(99), batch(99))
    return made


def batch(seed: int) -> Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(seed))


def weights_after(job: JobConfig, n_steps: int = 12) -> dict[str, Tensor]:
    made = learner(job)
    for step in range(n_steps):
        take_alone(made, step, batch(step))
    return {name: value.clone() for name, value in made.state.tensors()}


@pytest.mark.parametrize("chosen", ["fp32", "tf32", "bf16", "fp16"])
def test_an_explicit_precision_is_used_as_is(chosen: str) -> None:
    assert resolve_precision(chosen, CPU) == chosen == resolve_precision(chosen, CUDA)


GPUS = [((6, 1), "tf32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((12, 0), "bf16")]


@pytest.mark.parametrize(("capability", "expected"), GPUS)
def test_auto_selects_the_low_precision_that_is_fast_on_the_gpu(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compute capability is simulated, because no machine has GPUs of all these generations.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_precision("auto", CUDA) == expected
    assert resolve_precision("auto", CPU) == "fp32"


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("gfx942:sramecc+:xnack-", "AMD Instinct MI300X", "bf16"),
        ("gfx90a:sramecc+:xnack-", "AMD Instinct MI250X", "bf16"),
        ("gfx908", "AMD Instinct MI100", "bf16"),
        ("gfx1100", "AMD Radeon RX 7900 XTX", "bf16"),
        ("gfx1201", "AMD Radeon RX 9070 XT", "bf16"),
        ("gfx906:sramecc-:xnack-", "AMD Instinct MI50", "fp16"),
        ("gfx900", "AMD Radeon RX Vega 64", "fp16"),
        ("gfx1030", "AMD Radeon RX 6900 XT", "fp16"),
    ],
)
def test_auto_looks_at_an_amd_gpus_architecture_and_a_plan_looks_at_its_name(
    monkeypatch: pytest.MonkeyPatch, architecture: str, name: str, expected: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    properties = SimpleNamespace(gcnArchName=architecture, name=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert resolve_precision("auto", CUDA) == auto_precision("cuda", usual_capability(name)) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_only_matmuls_use_the_chosen_dtype(chosen: str, expected: torch.dtype) -> None:
    a = torch.randn(4, 4)
    with autocast(chosen, CPU):
        assert (a @ a).dtype == expected
        assert (a + a).dtype == torch.float32
    assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(("chosen", "expected"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high")])
def test_tf32_is_used_unless_fp32_is_chosen(chosen: str, expected: str) -> None:
    set_matmul_precision(chosen)
    products = torch.backends.cuda.matmul
    # Newer versions of torch return a pair of booleans here.
    for allowed in (products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction):
        assert allowed in (False, (False, False))
    assert torch.get_float32_matmul_precision() == expected


@pytest.mark.parametrize("chosen", ["bf16", "fp16"])
def test_weights_and_optimizer_state_stay_in_fp32(chosen: str, make_job: MakeJob) -> None:
    weights = weights_after(make_job(train={"precision": chosen}), n_steps=2)
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("chosen", ["bf16", "fp16"])
def test_training_with_16_bit_matmuls_is_similar_to_training_in_fp32(chosen: str, make_job: MakeJob) -> None:
    errors = []
    for name in (chosen, "fp32"):
        made = learner(make_job(train={"precision": name, "n_steps": 40}))
        for step in range(40):
            take_alone(made, step, batch(step))
        errors.append(made.values(made.sums())["fvu"])
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.mark.parametrize("architecture", list(catalog.ARCHITECTURES))
def test_deterministic_training_on_a_cpu_is_reproducible(architecture: str, make_job: MakeJob) -> None:
    job = make_job()
    settings = catalog.ARCHITECTURES[architecture].settings()
    job = job.replace("sae", architecture=architecture, settings=settings)
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    first, second = weights_after(job), weights_after(job)
    set_deterministic(False)
    third = weights_after(job)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], third[name]) for name in first)


def test_the_next_job_turns_determinism_off_again() -> None:
    set_deterministic(True)
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


ASKED = """
from trainer.runtime.precision import set_deterministic
set_deterministic(True)
import sys
print("torch._inductor" in sys.modules)
from torch._inductor import config
asked = [getattr(config, "deterministic", None)]
set_deterministic(False)
print([*asked, getattr(config, "deterministic", None)])
"""


@pytest.mark.slow
def test_a_compiler_loaded_later_is_deterministic_but_is_not_loaded_just_for_this() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    is_loaded, options = done.stdout.splitlines()
    assert is_loaded == "False"
    if options == "[None, None]":
        pytest.skip(f"the compiler of torch {torch.__version__} has no option `deterministic`")
    assert options == "[True, False]"


class Older:
    """A compiler configuration that rejects unknown names, like torch's."""

    __slots__ = ()


def test_a_compiler_without_the_deterministic_option_is_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.config", Older())
    for deterministic in (True, False):
        set_deterministic(deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic


def test_a_cublas_workspace_chosen_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
