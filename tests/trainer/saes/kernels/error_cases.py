"""Checks the kernels that sum errors against a float64 reference.

`test_triton_errors.py` runs this file in a separate process. With TRITON_INTERPRET=1, kernels run on a CPU; otherwise
they need a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support.fake_gpu import job_of
from support.kernels import use_kernels
from support.programs import Programs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.contract.settings import catalog
from trainer.parallel.base import Parallel
from trainer.runtime.triton_kernels import (
    DEAD_LATENTS,
    LATENT_SELECTIONS,
    OPTIMIZER_STEPS,
    RECONSTRUCTION_ERRORS,
    SPARSE_PRODUCTS,
    Kernels,
)
from trainer.saes import losses
from trainer.saes.kernels import triton_errors, triton_sparse, triton_top_k
from trainer.saes.losses import Sums
from trainer.saes.sparse_acts import Filled, SparseActs, SparseIndices
from trainer.training.learner import Learner

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# In this file, a learner uses none of these kernels unless a test enables them.
NONE: dict[Kernels, Any] = dict.fromkeys(
    (DEAD_LATENTS, LATENT_SELECTIONS, OPTIMIZER_STEPS, RECONSTRUCTION_ERRORS, SPARSE_PRODUCTS)
)


def numbers(n_tokens: int, d_out: int, seed: int) -> Tensor:
    return torch.randn(n_tokens, d_out, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def numbers_of(sums: Sums) -> tuple[Tensor, ...]:
    assert sums.centred is not None
    return *sums.error, *sums.centred


def assert_right(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> None:
    errors, sums = triton_errors.errors_of(y, x_hat, y_mean)
    assert torch.equal(errors, x_hat - y)
    missed, centred = x_hat.double() - y.double(), y.double() - y_mean.double()
    expected = (missed.square().sum(), missed.sum(dim=0), centred.square().sum(), centred.sum(dim=0))
    for found, exact in zip(numbers_of(sums), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(centred.abs().max()))


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (32, 128), (33, 129), (100, 300)], ids=str)
def test_errors_and_their_sums_match_a_float64_reference(shape: tuple[int, int]) -> None:
    assert_right(numbers(*shape, seed=0), numbers(*shape, seed=1), numbers(*shape, seed=2)[0])


def test_precision_is_not_lost_if_the_mean_is_far_larger_than_the_spread() -> None:
    y = numbers(70, 40, seed=0) + 30_000
    assert_right(y, y + 0.3 * numbers(70, 40, seed=1), torch.full((40,), 30_000.0, device=DEVICE))


def test_non_contiguous_tensors_are_read_correctly() -> None:
    assert_right(numbers(40, 35, seed=0).T, numbers(40, 70, seed=1)[:, ::2].T, numbers(40, 1, seed=2)[:, 0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values_appear_in_the_sums(value: float) -> None:
    y, x_hat = numbers(40, 20, seed=0), numbers(40, 20, seed=1)
    y[37, 3] = value
    errors, sums = triton_errors.errors_of(y, x_hat, numbers(1, 20, seed=2)[0])
    assert not errors[37, 3].isfinite()
    assert not any(one.isfinite().all() for one in numbers_of(sums))
    assert sums.error.total.isfinite().sum() == 19


def test_unsupported_dtypes_and_empty_batches_are_left_to_torch() -> None:
    y = numbers(4, 3, seed=0)
    assert triton_errors.fits(y, y)
    assert not triton_errors.fits(y.double(), y.double())
    assert not triton_errors.fits(y, y.bfloat16())
    assert not triton_errors.fits(y[:0], y[:0])


def plainly_nested(parts: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x_hat, its squared error, and the sum of the squared errors for all shorter prefixes, all in float64."""
    errors = offset[..., None, :] - y.double()[:, None] + parts.cumsum(dim=1)
    return y + errors[:, -1], errors[:, -1].square().sum(), errors[:, :-1].square().sum()


@pytest.mark.parametrize("n_levels", [1, 2, 5])
@pytest.mark.parametrize("is_vector", [True, False])
def test_nested_prefix_errors_and_their_gradients_match_float64(n_levels: int, is_vector: bool) -> None:
    n_tokens, d_out = 35, 131
    parts, y = numbers(n_tokens * n_levels, d_out, seed=0).view(n_tokens, n_levels, d_out), numbers(35, d_out, seed=1)
    offset = numbers(n_tokens, d_out, seed=2)
    offset = offset[0] if is_vector else offset
    found = triton_errors.nested(parts, offset, y, y[0])
    exact, of_offset = parts.double().requires_grad_(), offset.double().requires_grad_()
    x_hat, square, inner = plainly_nested(exact, of_offset, y)
    for one, other in ((found.x_hat, x_hat), (found.sums.error.square, square), (found.inner, inner)):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-5)
    missed, centred = (x_hat - y).detach(), y.double() - y[0]
    torch.testing.assert_close(found.sums.error.total.double(), missed.sum(dim=0), rtol=1e-5, atol=1e-4)
    assert found.sums.centred is not None
    torch.testing.assert_close(found.sums.centred.total.double(), centred.sum(dim=0), rtol=1e-5, atol=1e-4)
    (0.3 * square + 0.7 * inner).backward()
    weights = torch.tensor([0.3, 0.7], device=DEVICE)
    assert exact.grad is not None
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        gradients, total = triton_errors.nested_gradients(found.errors, *weights, dtype)
        assert gradients.dtype == dtype
        torch.testing.assert_close(gradients.double(), exact.grad, rtol=tolerance, atol=1e-5)
        torch.testing.assert_close(total.double(), exact.grad[:, 0].sum(dim=0), rtol=1e-5, atol=1e-4)


def by_level(counts: Sequence[Sequence[int]], d_sae: int, n_beside: int = 0) -> SparseActs:
    """Return activations with `counts` entries per token and level, followed by `n_beside` padding entries."""
    generator = torch.Generator().manual_seed(d_sae)
    of_bags = torch.tensor(counts).flatten()
    n = int(of_bags.sum())
    values, latents = torch.randn(n + n_beside, generator=generator), torch.randint(d_sae, (n,), generator=generator)
    bags = torch.arange(len(of_bags)).repeat_interleave(of_bags)
    beside = torch.arange(n_beside)
    bags, latents = torch.cat([bags, beside * 0 + len(of_bags) - 1]), torch.cat([latents, beside % d_sae])
    starts = of_bags.cumsum(0) - of_bags
    filled = Filled(torch.tensor(n, device=DEVICE), n) if n_beside else None
    return SparseActs(
        values.to(DEVICE), SparseIndices(*(one.to(DEVICE) for one in (latents, bags, starts)), filled), d_sae
    )


def parts_of(acts: SparseActs, rows: Tensor, n_levels: int) -> Tensor:
    """Return each level's contribution to each token's reconstruction, [n_tokens, n_levels, d_out], in float64."""
    indices, n = acts.indices, len(acts.values) if acts.indices.filled is None else int(acts.indices.filled.n)
    added = acts.values[:n, None].double() * rows.double()[indices.latents[:n]]
    parts = added.new_zeros(len(indices.starts), rows.shape[1]).index_add(0, indices.tokens[:n], added)
    return parts.view(-1, n_levels, rows.shape[1])


UNEVEN = [[3, 0, 9, 17, 1], [0, 0, 0, 0, 0], [0, 8, 0, 0, 0], [2, 2, 0, 1, 30], [0, 0, 0, 0, 1], [5, 4, 3, 2, 0]]


def all_of(found: triton_errors.NestedErrors) -> tuple[Tensor, ...]:
    return found.errors, found.x_hat, found.inner, *numbers_of(found.sums)


@pytest.mark.parametrize(
    ("counts", "n_beside", "d_out", "dtype"),
    [
        (UNEVEN, 0, 300, torch.bfloat16),
        (UNEVEN, 3, 37, torch.float16),
        (UNEVEN, 0, 256, torch.float32),
        ([[4], [0], [11]], 3, 130, torch.bfloat16),
        ([[0, 0]] * 3, 0, 40, torch.float32),
        ([[1, 0], [0, 40]] * 4, 0, 1, torch.float16),
    ],
    ids=["uneven", "with padding", "fp32", "one level", "no entry", "one column"],
)
def test_errors_computed_from_entries_sorted_by_level_match_float64(
    counts: list[list[int]], n_beside: int, d_out: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts, n_levels, d_sae = by_level(counts, 11, n_beside), len(counts[0]), 11
    rows, (y, y_mean, offset) = (
        numbers(d_sae, d_out, seed=0).to(dtype),
        (numbers(len(counts), d_out, seed=1), *numbers(2, d_out, seed=2)),
    )
    parts = parts_of(acts, rows, n_levels)
    expected = offset.double() - y.double()[:, None] + parts.cumsum(dim=1)
    missed, centred = expected[:, -1], y.double() - y_mean.double()
    exact = (
        expected,
        y + expected[:, -1],
        expected[:, :-1].square().sum(),
        *(one for moment in (missed, centred) for one in (moment.square().sum(), moment.sum(dim=0))),
    )
    # With the first limit, each program handles a single token; with the second, one program handles all tokens.
    for full in (10**9, 1):
        monkeypatch.setattr(triton_errors, "_FULL", full)
        found = triton_errors.nested_bags(acts, rows, n_levels, offset, y, y_mean)
        for one, other in zip(all_of(found), exact, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
        # The kernel that reads the levels' sums returns the same result.
        apart = all_of(triton_errors.nested(parts.float(), offset, y, y_mean))
        for one, other in zip(all_of(found), apart, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n_beside", [0, 3], ids=["no padding", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_single_level_errors_are_also_written_in_the_dtype_of_the_rows(n_beside: int, dtype: torch.dtype) -> None:
    acts, rows = by_level([[4], [0], [11]] * 2, 9, n_beside), numbers(9, 140, seed=0).to(dtype)
    y, (y_mean, offset) = numbers(6, 140, seed=1), numbers(2, 140, seed=2)
    found = triton_errors.errors_of_bags(acts, rows, offset, y, y_mean)
    expected = triton_errors.nested_bags(acts, rows, 1, offset, y, y_mean)
    assert torch.equal(found.errors, expected.errors[:, 0])
    assert torch.equal(found.x_hat, expected.x_hat)
    for one, other in zip(numbers_of(found.sums), numbers_of(expected.sums), strict=True):
        assert torch.equal(one, other)
    assert found.narrow.dtype == dtype
    # Triton's interpreter truncates values that a GPU would round.
    torch.testing.assert_close(found.narrow.float(), found.errors, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_level_errors_do_not_depend_on_the_order_of_programs(programs: Programs) -> None:
    acts, rows, y = by_level(UNEVEN, 11), numbers(11, 300, seed=0).bfloat16(), numbers(6, 300, seed=1)
    programs.assert_same_bits(lambda: all_of(triton_errors.nested_bags(acts, rows, 5, y[0], y, y[1])))


@pytest.mark.parametrize("shape", [(1, 1), (33, 129), (70, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_auxk_error_has_the_dtype_of_its_reconstruction_but_its_square_is_fp32(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    (n_tokens, d_out), explained = shape, numbers(*shape, seed=0).to(dtype)
    # The last level's error is strided, because errors for all levels are interleaved in memory.
    error = numbers(n_tokens, 3 * d_out, seed=1).view(n_tokens, 3, d_out)[:, -1]
    weight = torch.full((), 0.3, device=DEVICE)
    square, twice = triton_errors.add_and_square(explained, error, weight)
    exact = explained.double() + error
    torch.testing.assert_close(square.double(), 0.3 * exact.square().sum(), rtol=1e-5, atol=0)
    assert twice.dtype == dtype
    # Triton's interpreter truncates values that a GPU would round.
    torch.testing.assert_close(twice.double(), 2 * exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


class NumbersAreRounded(TorchDispatchMode):
    """A dispatch mode that rounds scalar factors to the matrix's dtype, as GPUs do but CPUs do not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mul" in func.__name__ and isinstance(args[1], Tensor) and not args[1].dim():
            args = args[0], args[1].to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with use_kernels({RECONSTRUCTION_ERRORS: triton_errors, SPARSE_PRODUCTS: triton_sparse}):
        yield


@pytest.mark.usefixtures("gpu")
def test_the_factor_for_a_16_bit_gradient_is_not_rounded() -> None:
    explained, error = numbers(33, 40, seed=0).bfloat16(), numbers(33, 40, seed=1)
    weight = torch.full((), 0.3, device=DEVICE)
    _, twice = triton_errors.add_and_square(explained, error, weight)
    explained.requires_grad_()
    with NumbersAreRounded():  # type: ignore[no-untyped-call]
        found = losses.auxk_error(error, explained, weight)
        (2 * found).backward()
    torch.testing.assert_close(found.double(), 0.3 * (explained.double() + error).square().sum(), rtol=1e-5, atol=0)
    assert explained.grad is not None
    assert torch.equal(explained.grad, (twice.float() * (2 * weight)).bfloat16())


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_bf16_still_uses_the_kernels_that_do_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton 3.2 raises this error on GPUs older than sm_80.
    def fail(*_: Any) -> Any:
        raise RuntimeError("no bf16")

    narrow, error = numbers(5, 7, seed=0).bfloat16(), numbers(5, 7, seed=1)
    monkeypatch.setattr(torch.Tensor, "bfloat16", fail)
    triton_errors.try_out(DEVICE)
    monkeypatch.setattr(triton_errors, "add_and_square", fail)
    with use_kernels({SPARSE_PRODUCTS: None}):
        found = losses.auxk_error(error, narrow, torch.ones((), device=DEVICE))
    torch.testing.assert_close(found, (narrow + error).square().sum())


# Architectures that are tested only in slow tests, because BatchTopK uses the same kernels in half the time.
SLOW = ("topk", "hierarchical_topk", "matryoshka_batch_topk")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the test needs a CPU that pretends to be a GPU")
@pytest.mark.parametrize(
    ("architecture", "products"),
    [
        *(
            pytest.param(one, triton_sparse, marks=pytest.mark.slow if one in SLOW else ())
            for one in catalog.ARCHITECTURES
        ),
        # The error kernels are also tested without other kernels: for one level, for several levels, and with a
        # penalty.
        *((one, None) for one in ("batch_topk", "matryoshka_batch_topk", "jumprelu")),
        pytest.param("hierarchical_topk", None, marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else "with products" if one else "errors alone",
)
def test_an_sae_learns_and_reports_the_same_with_and_without_kernels(
    architecture: str, products: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    # The interpreter is slow, so the test uses few rows. By default, the kernels reject such a small batch.
    monkeypatch.setattr(triton_top_k, "LEAST_ROWS", 1)
    some = {RECONSTRUCTION_ERRORS: triton_errors, SPARSE_PRODUCTS: products, LATENT_SELECTIONS: triton_top_k}
    with use_kernels(NONE):
        with_kernels, without = learner(architecture), learner(architecture)
    # The second step also uses state that the first step has changed.
    for number in range(2):
        x = numbers(24, 20, seed=number)
        for one, kernels in ((with_kernels, NONE | some), (without, NONE)):
            with use_kernels(kernels):
                one.begin_step(number)
                # Each step has two micro-batches, and the sums cover both of them.
                for rows in x.split([14, 10]):
                    one.accumulate(rows, rows)
                one.update()
    expected = dict(without.state.tensors())
    for name, value in with_kernels.state.tensors():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    values, expected_values = (one.values(one.sums()) for one in (with_kernels, without))
    assert values == pytest.approx(expected_values, rel=1e-4)
    assert values.get("auxk", 1) > 0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the test needs a CPU that pretends to be a GPU")
def test_16_bit_gradients_for_levels_match_those_computed_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    x, gradients = numbers(24, 20, seed=0), []
    for some in ({RECONSTRUCTION_ERRORS: triton_errors, SPARSE_PRODUCTS: triton_sparse}, {}):
        with use_kernels(NONE | some):
            one = learner("matryoshka_batch_topk", "bf16")
            one.accumulate(x, x)
        gradients.append({name: weights.grad for name, weights in one.sae.named_parameters()})
    for name, expected in gradients[1].items():
        # The gradients may differ only by 16-bit rounding.
        assert (gradients[0][name] - expected).norm() < 0.01 * expected.norm(), name


def learner(architecture: str, precision: str = "fp32") -> Learner:
    job = job_of({"architecture": architecture, "d_sae": 48, "k": 3}, {"batch_size": 24, "precision": precision})
    one = Learner(job, 20, None, Parallel(DEVICE))
    one.initialise(numbers(90, 20, seed=7), numbers(90, 20, seed=7))
    # Some latents are dead, which makes AuxK active.
    one.sae.b_enc.data[:9], one.sae.n_tokens_since_fired[:9] = -100.0, 10**7
    one.sae.note_since_fired(one.sae.n_tokens_since_fired)
    return one


def test_the_kernel_passes_its_own_trial() -> None:
    triton_errors.try_out(DEVICE)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right, right_of_bags = triton_errors.errors_of, triton_errors.nested_bags
    monkeypatch.setattr(triton_errors, "errors_of", lambda y, x_hat, mean: right(y, x_hat + 1, mean))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_errors.try_out(DEVICE)
    monkeypatch.setattr(triton_errors, "errors_of", right)
    monkeypatch.setattr(triton_errors, "nested_bags", lambda acts, rows, *of: right_of_bags(acts, rows + 1, *of))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_errors.try_out(DEVICE)
