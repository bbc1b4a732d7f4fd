"""Tests that kernels work on a row that starts 2³¹ elements into a matrix, where the offset needs 64 bits.

`test_long_offsets.py` runs this file with TRITON_INTERPRET=1. All matrix rows except the last are 0, and only the last
programs of each launch are run. Each result must equal the result for the last row alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from support.programs import Programs
from support.virtual_memory import VirtualMemory
from torch import Tensor

from trainer.optimizers import triton_update
from trainer.optimizers.codecs import BLOCK
from trainer.optimizers.tiled import Betas
from trainer.optimizers.triton_update import Constants, Matrix
from trainer.saes.kernels import triton_encode, triton_errors, triton_sparse, triton_top_k
from trainer.saes.losses import Sums
from trainer.saes.sparse_acts import SparseActs, SparseIndices

# The shapes of a matrix and of a tensor with levels, in which the last row's offset needs 64 bits.
WIDTH, N_ROWS = 2**12, 2**19 + 1
N_LEVELS, LEVEL_WIDTH, N_TOKENS = 8, 2**8, 2**20 + 1


@pytest.fixture(autouse=True)
def last_programs(programs: Programs) -> Iterator[None]:
    """Run only the last programs of each launch, on matrices that use no memory."""
    programs.only_last = True
    with VirtualMemory():
        yield


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def below(n_rows: int, row: Tensor) -> Tensor:
    """Return a matrix with `n_rows` rows, ending with `row` [1, ...]."""
    whole = torch.empty(n_rows, *row.shape[1:], dtype=row.dtype)
    whole[-1:] = row
    return whole


def assert_alike(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert other.any()
        assert torch.equal(one, other)


def test_rows_are_centred() -> None:
    row, bias = numbers(1, WIDTH), numbers(WIDTH, seed=1)
    found, expected = (triton_encode.centre(x, bias, torch.float16) for x in (below(N_ROWS, row), row))
    assert_alike([found[-1:]], [expected])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [5, 3000], ids=["in groups", "of the whole row"])
def test_the_largest_values_in_each_row_are_found(k: int, dtype: torch.dtype) -> None:
    row = numbers(1, WIDTH, dtype=dtype)
    found, expected = (triton_top_k.largest_of_each(values, k) for values in (below(N_ROWS, row), row))
    assert_alike((one[-1:] for one in found), expected)


def test_the_largest_values_in_each_row_are_kept() -> None:
    row = numbers(1, WIDTH, dtype=torch.bfloat16)
    found, expected = (triton_top_k.strongest(values, 5) for values in (below(N_ROWS, row), row))
    assert_alike([found[-1:]], [expected])


def test_the_largest_values_in_each_row_are_marked() -> None:
    row = numbers(1, WIDTH, dtype=torch.bfloat16)
    found, expected = (triton_top_k.are_largest(values, 5) for values in (below(N_ROWS, row), row))
    assert_alike((one[-1:] for one in found), expected)


def last_active(n_bags: int, d_sae: int) -> SparseActs:
    """Return three activations that all belong to the last latent and the last bag."""
    indices = SparseIndices(
        torch.full((3,), d_sae - 1), torch.full((3,), n_bags - 1), torch.zeros(n_bags, dtype=torch.int64)
    )
    return SparseActs(numbers(3, seed=3), indices, d_sae)


@pytest.mark.parametrize("n_rows", [1, N_ROWS])
def test_weighted_sums_and_dot_products_of_rows_are_computed_per_bag(n_rows: int) -> None:
    row, dense = (numbers(1, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    acts = last_active(n_rows, n_rows)
    indices, rows = acts.indices, below(n_rows, row)
    sums = triton_sparse.bag_sums(acts.values, indices.latents, indices.starts, rows)
    torch.testing.assert_close(sums[-1], acts.values.sum() * row[0].float(), rtol=1e-5, atol=1e-5)
    products = triton_sparse.row_products(below(n_rows, dense), rows, indices.latents, indices.starts)
    torch.testing.assert_close(products, (dense.float() @ row.float().T)[0].expand(3), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("n_rows", [1, N_ROWS])
def test_weighted_sums_and_dot_products_of_rows_are_computed_per_latent(
    n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit, one program handles all columns.
    monkeypatch.setattr(triton_sparse, "DENSE_BYTES", 2**40)
    row, dense = (numbers(1, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    acts = last_active(n_rows, n_rows)
    found = triton_sparse.sum_by_latent(acts, below(n_rows, dense), below(n_rows, row), splits=False)
    torch.testing.assert_close(found.sums[-1], acts.values.sum() * dense[0].float(), rtol=1e-5, atol=1e-5)
    assert found.products is not None
    torch.testing.assert_close(found.products, (dense.float() @ row.float().T)[0].expand(3), rtol=1e-5, atol=1e-3)


def test_the_weighted_sum_of_rows_is_computed() -> None:
    row, weight = numbers(1, WIDTH, dtype=torch.bfloat16), numbers(1, seed=1)
    found = triton_sparse.weighted_sum(below(N_ROWS, weight), below(N_ROWS, row), -3.0)
    assert_alike([found], [triton_sparse.weighted_sum(weight, row, -3.0)])


def summed(sums: Sums) -> tuple[Tensor, ...]:
    assert sums.centred is not None
    return *sums.error, *sums.centred


def given(n_tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an offset, targets that are 0 except for the last row, and a random stand-in for the targets' mean."""
    return numbers(width, seed=4), below(n_tokens, numbers(1, width, seed=5)), numbers(width, seed=6)


def test_level_errors_and_their_gradients_are_computed() -> None:
    part, alike = numbers(1, N_LEVELS, LEVEL_WIDTH), []
    for n_tokens in (N_TOKENS, 1):
        found = triton_errors.nested(below(n_tokens, part), *given(n_tokens, LEVEL_WIDTH))
        of_whole, of_inner = torch.tensor([0.3, 0.7])
        gradients, total = triton_errors.nested_gradients(found.errors, of_whole, of_inner, torch.bfloat16)
        alike.append((found.errors[-1:], found.x_hat[-1:], found.inner, *summed(found.sums), gradients[-1:], total))
    assert_alike(*alike)


def test_level_errors_are_computed_from_sparse_activations() -> None:
    row, alike = numbers(1, LEVEL_WIDTH, dtype=torch.bfloat16), []
    for n_tokens in (N_TOKENS, 1):
        acts = last_active(n_tokens * N_LEVELS, 1)
        found = triton_errors.nested_bags(acts, row, N_LEVELS, *given(n_tokens, LEVEL_WIDTH))
        alike.append((found.errors[-1:], found.x_hat[-1:], found.inner, *summed(found.sums)))
    assert_alike(*alike)


def test_single_level_errors_are_computed_in_both_dtypes() -> None:
    row, alike = numbers(1, WIDTH, dtype=torch.bfloat16), []
    for n_tokens in (N_ROWS, 1):
        found = triton_errors.errors_of_bags(last_active(n_tokens, 1), row, *given(n_tokens, WIDTH))
        alike.append((found.errors[-1:], found.narrow[-1:], found.x_hat[-1:], *summed(found.sums)))
    assert_alike(*alike)


def test_the_auxk_reconstruction_error_is_computed() -> None:
    part, other = numbers(1, WIDTH, dtype=torch.bfloat16), numbers(1, WIDTH, seed=1)
    alike = []
    for n_tokens in (N_ROWS, 1):
        square, twice = triton_errors.add_and_square(below(n_tokens, part), below(n_tokens, other), numbers(1)[0])
        alike.append((square, twice[-1:]))
    assert_alike(*alike)


@pytest.mark.parametrize("rows", [None, numbers(1, WIDTH, seed=1)], ids=["of any length", "at length 1"])
def test_gradient_norms_are_measured(rows: Tensor | None) -> None:
    grad, alike = numbers(1, WIDTH), []
    for n_rows in (N_ROWS, 1):
        squares, dots = torch.zeros(2, n_rows)
        triton_update.measure(below(n_rows, grad), None if rows is None else below(n_rows, rows), squares, dots)
        alike.append((squares[-1:], dots[-1:]) if rows is not None else (squares[-1:],))
    assert_alike(*alike)


def moments(kind: str) -> dict[str, Tensor]:
    m, v = numbers(1, WIDTH, seed=7), numbers(1, WIDTH, seed=8).abs()
    if kind == "int8":
        scales = {f"{name}_scale": torch.rand(1, WIDTH // BLOCK) for name in ("exp_avg", "exp_avg_sq")}
        return {"exp_avg": (30 * m).to(torch.int8), "exp_avg_sq": (50 * v).to(torch.uint8)} | scales
    return {"exp_avg": m.to(KINDS[kind]), "exp_avg_sq": v.to(KINDS[kind])}


KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_updates_rows(kind: str) -> None:
    one, alike = torch.ones(()), []
    constants = Constants(Betas(0.9, 0.999, 1e-9), one, torch.zeros(()))
    of_row = {"weight": numbers(1, WIDTH), "grad": numbers(1, WIDTH, seed=1)} | moments(kind)
    for n_rows in (N_ROWS, 1):
        matrices = []
        for dots in (torch.ones(n_rows), None):
            weight, grad, *of_moments = (below(n_rows, row) for row in of_row.values())
            kept = dict(zip(moments(kind), of_moments, strict=True))
            narrow = torch.empty(n_rows, WIDTH, dtype=torch.bfloat16)
            matrices.append(Matrix(weight, grad, kept, 3 * one, one / 100, 0, dots, narrow))
        ids = torch.arange(N_ROWS - n_rows, N_ROWS)
        triton_update.step(matrices[0], ids, constants, matrices[1], 0.3)
        changed = [tensor for each in matrices for tensor in (each.weight, each.narrow, *each.moments.values())]
        alike.append([tensor[-1:] for tensor in changed])
    assert_alike(*alike)
