"""Checks the Triton kernels for sparse matmuls against dense matmuls in float64.

`test_triton_sparse.py` runs this file. With TRITON_INTERPRET=1, kernels run on a CPU; otherwise they need a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from support.combinations import combined
from support.kernels import use_kernels
from support.programs import Programs
from torch import Tensor

from trainer.runtime import narrow_copy
from trainer.runtime.triton_kernels import SPARSE_PRODUCTS
from trainer.saes.kernels import sparse, triton_sparse
from trainer.saes.kernels.encode import centre, encode
from trainer.saes.kernels.select import k_per_token
from trainer.saes.sparse_acts import Filled, SparseActs, SparseIndices

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# This tolerance is relative to the largest sum.
# The reference uses the same bf16 inputs, so only the sums are rounded differently.
TOLERANCE = 2e-6


class Case(NamedTuple):
    """Random activations with a given number of entries per token, and the rows to multiply by."""

    acts: SparseActs
    rows: Tensor
    dense: Tensor

    def matrix(self) -> Tensor:
        """Return the activations as a float64 matrix [n_tokens, d_sae], with repeated entries added up."""
        indices = self.acts.indices
        whole = torch.zeros(len(indices.starts), self.acts.d_sae, dtype=torch.float64, device=DEVICE)
        n = len(indices.tokens) if indices.filled is None else int(indices.filled.n)
        entries = (indices.tokens[:n], indices.latents[:n])
        return whole.index_put(entries, self.acts.values[:n].double(), accumulate=True)


def make(
    counts: list[int], d_sae: int, d: int, dtype: torch.dtype = torch.float32, latents: Tensor | None = None
) -> Case:
    generator = torch.Generator().manual_seed(d_sae + d)
    n = sum(counts)
    if latents is None:
        latents = torch.randint(d_sae, (n,), generator=generator)
    tokens = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    starts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)[:-1]
    indices = SparseIndices(latents.to(DEVICE), tokens.to(DEVICE), starts.to(DEVICE))
    values, rows, dense = (torch.randn(*shape, generator=generator) for shape in ((n,), (d_sae, d), (len(counts), d)))
    acts = SparseActs(values.to(DEVICE), indices, d_sae)
    return Case(acts, rows.to(DEVICE, dtype), dense.to(DEVICE, dtype))


def followed(case: Case) -> Case:
    """Append padding entries, which kernels must ignore.

    Padding values are normally 0, but not in this test.
    """
    acts, (n, most) = case.acts, (len(case.acts.values), case.acts.d_sae - 1)
    indices = acts.indices
    rest = torch.arange(5, device=DEVICE)
    latents, tokens = (
        torch.cat([one, rest.clamp_max(top)])
        for one, top in ((indices.latents, most), (indices.tokens, len(indices.starts) - 1))
    )
    filled = Filled(torch.tensor(n, device=DEVICE), n)
    values = torch.cat([acts.values, acts.values.new_full((5,), 9.0)])
    return case._replace(acts=SparseActs(values, SparseIndices(latents, tokens, indices.starts, filled), acts.d_sae))


def some_cases() -> Iterator[pytest.param]:
    yield pytest.param(make([3, 5, 1, 0, 2], 7, 16), id="few")
    yield pytest.param(followed(make([3, 5, 1, 0, 2], 7, 16)), id="a few entries before padding")
    yield pytest.param(followed(make([0, 0], 3, 8)), id="only padding")
    yield pytest.param(make([0, 33, 40, 0, 0], 9, 37), id="empty tokens, more entries than fit in a tile, odd widths")
    yield pytest.param(make([4] * 3, 40, 24), id="latents without entries")
    yield pytest.param(make([2, 2, 2], 5, 150, latents=torch.tensor([1, 1, 0, 4, 4, 4])), id="repeated entries")
    yield pytest.param(make([1], 1, 1), id="one number")
    yield pytest.param(make([0, 0], 3, 8), id="no entry")
    yield pytest.param(make([3, 5, 1, 0, 2], 7, 300, torch.bfloat16), id="bf16")
    yield pytest.param(make([6, 7], 7, 40, torch.float16), id="fp16")
    yield pytest.param(make([2, 9, 4], 5, 2304 // 8, torch.bfloat16), id="columns in two parts")


CASES = [*some_cases()]
OF_CASES = pytest.mark.parametrize("case", CASES)


@pytest.fixture(params=[False, True], ids=["atomic", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def always_triton() -> Iterator[None]:
    """Use Triton on every device, not only on GPUs."""
    with use_kernels({SPARSE_PRODUCTS: triton_sparse}):
        yield


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE * max(scale, 1.0))


@OF_CASES
def test_a_decoded_token_is_the_sum_of_its_rows(case: Case) -> None:
    assert_near(sparse.decode(case.acts, case.rows), case.matrix() @ case.rows.double())


@OF_CASES
@pytest.mark.parametrize("longest", [256, 3])
def test_activations_and_the_rows_multiplied_by_them_are_summed_for_each_latent(
    case: Case, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse, "LONGEST", longest)
    sums, totals = sparse.by_latent(case.acts, case.dense)
    assert_near(sums, case.matrix().T @ case.dense.double())
    assert_near(totals, case.matrix().sum(dim=0))


@OF_CASES
@pytest.mark.parametrize("slab_bytes", [2**24, 256], ids=["whole", "in parts"])
def test_an_entrys_gradient_is_the_dot_product_of_its_rows(
    case: Case, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse, "SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(triton_sparse, "TILE", 512)
    indices = case.acts.indices
    products = sparse.row_products(case.dense, case.rows, indices)
    expected = (case.dense.double() @ case.rows.double().T)[indices.tokens, indices.latents]
    if indices.filled is not None:
        expected[indices.filled.n :] = 0
    assert_near(products, expected)


def assert_both_are_right(case: Case) -> None:
    """Check the gradients of weights and entries, both multiplied by a factor.

    The gradient of the weights is a transposed product, and the gradients of the entries are dot products of rows.
    """
    indices = case.acts.indices
    expected = (case.dense.double() @ case.rows.double().T)[indices.tokens, indices.latents]
    if indices.filled is not None:
        expected[indices.filled.n :] = 0
    factor = torch.full((), -0.3, device=DEVICE)
    sums, products = sparse.both_products(case.acts, case.dense, case.rows, factor=factor)
    assert_near(sums, float(factor) * (case.matrix().T @ case.dense.double()))
    assert_near(products, float(factor) * expected)


@pytest.mark.parametrize(
    ("case", "limits", "deterministic"),
    [
        pytest.param(
            *case.values, limits, is_fixed, id=f"{case.id}-{limits}-{'deterministic' if is_fixed else 'atomic'}"
        )
        for case, limits, is_fixed in combined(CASES, [(2**24, 4096), (200, 4096), (2**24, 32)], [False, True])
    ],
    indirect=["deterministic"],
)
def test_gradients_by_latent_match_dense_matmuls(
    case: Case, limits: tuple[int, int], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_bytes, widest = limits
    monkeypatch.setattr(triton_sparse, "DENSE_BYTES", dense_bytes)
    monkeypatch.setattr(triton_sparse, "WIDEST", widest)
    assert_near(sparse.transposed_product(case.acts, case.dense), case.matrix().T @ case.dense.double())
    assert_both_are_right(case)


@pytest.mark.parametrize("across", [1.0, 1e-4, 0.0])
@pytest.mark.parametrize(("d", "widest"), [(48, 4096), (48, 32), (100, 32), (17, 16)], ids=str)
def test_the_component_of_a_sum_orthogonal_to_its_row_stays_precise_if_split(
    d: int, widest: int, across: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse, "WIDEST", widest)
    d_sae = 9
    case = make([1] * d_sae, d_sae, d, latents=torch.arange(d_sae))
    directions = torch.randn(d_sae, d, device=DEVICE)
    # The last column of row 3 is 0. In row 5, the sum has the row's sign in half of the columns and the opposite sign
    # in the other half.
    directions[3, -1:] = 0
    unit_rows = torch.nn.functional.normalize(directions, dim=1)
    along = unit_rows.clone()
    along[5, : d // 2] *= -1
    dense = along + across * case.dense
    squares, dots = torch.full((2, d_sae), torch.nan, device=DEVICE)
    measured = triton_sparse.SumBuffers(squares, dots, unit_rows)
    sums = triton_sparse.sum_by_latent(case.acts, dense, case.rows, splits=False, measured=measured).sums.double()
    exact_dots = (sums * unit_rows).sum(dim=1)
    exact = (sums - exact_dots[:, None] * unit_rows).square().sum(dim=1)
    torch.testing.assert_close(dots.double(), exact_dots, rtol=1e-5, atol=1e-5)
    # If the component is 1/10,000 of the sum, computing it as a difference of squares would have an error of 10 %.
    torch.testing.assert_close(squares.double(), exact, rtol=1e-3, atol=1e-12)


def test_squared_norms_of_split_sums_are_correct_without_unit_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sparse, "WIDEST", 32)
    case = make([3, 5, 1], 7, 80)
    squares = torch.full((7,), torch.nan, device=DEVICE)
    found = triton_sparse.sum_by_latent(case.acts, case.dense, splits=False, measured=triton_sparse.SumBuffers(squares))
    torch.testing.assert_close(squares, found.sums.square().sum(dim=1))


@pytest.mark.parametrize("longest", [1, 4, 7, 64])
def test_latents_with_any_number_of_tokens_are_split_across_programs(
    longest: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One latent is active on all tokens and other latents on few or none, so windows start and end at arbitrary
    # positions.
    monkeypatch.setattr(triton_sparse, "LONGEST", longest)
    latents = torch.tensor([[5, token % 3] for token in range(16)]).flatten()
    for width in (20, 48):
        assert_both_are_right(followed(make([2] * 16, 7, width, latents=latents)))


def test_only_the_atomic_kernel_splits_latents_and_only_those_with_many_tokens(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse, "LONGEST", 8)
    launches: list[int] = []

    class Counting:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            launches.append(grid[0])
            return sum_by_latent[grid]

    sum_by_latent = triton_sparse._sum_by_latent
    monkeypatch.setattr(triton_sparse, "_sum_by_latent", Counting())
    case = make([3] * 10, 4, 16)
    sparse.transposed_product(case.acts, case.dense)
    assert launches == ([4] if deterministic else [4, 4])
    launches.clear()
    few = make([2] * 4, 4, 16)
    sparse.transposed_product(few.acts, few.dense)
    assert launches == [4]


def test_sums_in_a_fixed_order_do_not_depend_on_the_order_of_programs(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make([3] * 20, 9, 48, torch.bfloat16)
    indices = case.acts.indices
    monkeypatch.setattr(triton_sparse, "DENSE_BYTES", 500)
    monkeypatch.setattr(triton_sparse, "WIDEST", 32)

    def sums() -> Iterator[Tensor]:
        yield from sparse.both_products(case.acts, case.dense, case.rows)
        yield from sparse.by_latent(case.acts, case.dense)
        yield sparse.decode(case.acts, case.rows)
        yield sparse.row_products(case.dense, case.rows, indices)
        yield sparse.weighted_sum(case.acts.values[:9], case.rows, -3.0)

    programs.assert_same_bits(sums)


def test_a_steps_gradients_match_those_of_a_dense_step(deterministic: bool) -> None:
    torch.manual_seed(0)
    n_tokens, d_in, d_sae, k = 5, 20, 16, 3
    shapes = {"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    weights = {name: torch.randn(shape, device=DEVICE, requires_grad=True) for name, shape in shapes.items()}
    x = torch.randn(n_tokens, d_in, device=DEVICE)

    W_enc, b_enc, W_dec, b_dec = weights.values()
    acts = encode(centre(x, b_dec), W_enc, b_enc, b_dec, partial(k_per_token, k=k))
    loss = (sparse.decode(acts.with_values(acts.values.relu()), W_dec) + b_dec - x).square().sum()
    grads = torch.autograd.grad(loss, list(weights.values()))

    exact = [weight.detach().double().requires_grad_() for weight in weights.values()]
    W_enc, b_enc, W_dec, b_dec = exact
    pre_acts = (x.double() - b_dec) @ W_enc + b_enc
    values, indices = pre_acts.topk(k, dim=1)
    x_hat = torch.zeros_like(pre_acts).scatter(1, indices, values.relu()) @ W_dec + b_dec
    expected = torch.autograd.grad((x_hat - x).square().sum(), exact)
    for gradient, reference in zip(grads, expected, strict=True):
        assert_near(gradient, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_rows_are_in_16_bits_and_sums_are_in_fp32(dtype: torch.dtype) -> None:
    case = make([3, 5, 1], 7, 30)
    rows, values = case.rows.clone().requires_grad_(), case.acts.values.clone().requires_grad_()
    with torch.autocast(DEVICE.type, dtype):
        decoded = sparse.decode(case.acts.with_values(values), rows)
    assert_near(decoded, case.matrix() @ case.rows.to(dtype).double())
    places = case.acts.indices
    sent = sparse.bag_sums(values.detach(), places.latents, places.starts, rows.detach().to(dtype), None, dtype)
    # Triton's interpreter truncates instead of rounding to bf16.
    torch.testing.assert_close(sent.float(), decoded.detach(), rtol=torch.finfo(dtype).eps, atol=0)
    decoded.backward(case.dense)
    assert rows.grad is not None
    assert_near(rows.grad, case.matrix().T @ case.dense.to(dtype).double())
    assert values.grad is not None
    # Both gradients use the same gathered 16-bit rows.
    indices = case.acts.indices
    products = case.dense.to(dtype).double() @ case.rows.to(dtype).double().T
    assert_near(values.grad, products[indices.tokens, indices.latents])


@pytest.mark.parametrize(("n", "width"), [(1, 40), (64, 256), (600, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_weighted_and_summed_in_fp32(n: int, width: int, dtype: torch.dtype) -> None:
    case = make([n], n, width, dtype, latents=torch.arange(n))
    weights, rows = case.acts.values, case.rows
    assert_near(sparse.weighted_sum(weights, rows, -3.0), -3 * (weights.double() @ rows.double()))
    assert_near(sparse.weighted_sum(weights[:0], rows[:0], -3.0), torch.zeros(width, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_input_bias_gradient_is_computed_from_the_16_bit_copy_of_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, W_enc, b_enc, b_dec = (
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((5, 20), (20, 16), (16,), (20,))
    )
    narrow_copy.keep(W_enc)
    with torch.autocast(DEVICE.type, dtype):
        encode(centre(x, b_dec), W_enc, b_enc, b_dec, partial(k_per_token, k=3)).values.sum().backward()
    assert b_enc.grad is not None
    assert b_dec.grad is not None
    assert_near(b_dec.grad, -W_enc.detach().to(dtype).double() @ b_enc.grad.double())


def test_non_contiguous_tensors_are_read_correctly() -> None:
    case = make([3, 5, 1], 7, 30)
    rows = case.rows.T.contiguous().T
    ones = torch.ones(1, 1, device=DEVICE).expand(3, 30)
    indices = case.acts.indices
    assert_near(sparse.decode(case.acts, rows), case.matrix() @ rows.double())
    assert_near(sparse.transposed_product(case.acts, ones), case.matrix().T @ ones.double())
    products = ones.double() @ rows.double().T
    for found in (sparse.row_products(ones, rows, indices), sparse.both_products(case.acts, ones, rows)[1]):
        assert_near(found, products[indices.tokens, indices.latents])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_pass_their_own_trial(dtype: torch.dtype) -> None:
    triton_sparse.try_out(DEVICE, dtype)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> Tensor:
        return torch.zeros(1, device=DEVICE)

    monkeypatch.setattr(triton_sparse, "row_products", wrong)
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_sparse.try_out(DEVICE, torch.float32)
