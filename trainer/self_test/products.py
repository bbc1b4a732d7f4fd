"""Compares sparse matmuls with float64, and selections with a full sort."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.runtime.triton_kernels import SPARSE_PRODUCTS
from trainer.saes.kernels import sparse, top_k
from trainer.saes.sparse_acts import SparseActs, SparseIndices
from trainer.self_test.base import CPU, Check

PART = "products"
# The allowed relative error: fp32 sums of a thousand terms lose their last few bits to rounding.
TOLERANCE = 1e-5
# For each case: the number of active latents per token, the number of latents, and the width. If a latent is active on
# all tokens, its entries are split among programs. The last two cases have the widths of real models.
CASES: dict[str, tuple[list[int], int, int]] = {
    "few entries": ([3, 5, 1, 0, 2], 7, 16),
    "odd widths and empty tokens": ([0, 33, 40, 0, 0], 9, 37),
    "one number": ([1], 1, 1),
    "a latent active everywhere": ([300] * 40, 1, 96),
    "d_in 2304": ([64] * 512, 4096, 2304),
    "d_in 768, uneven": ([0, 64] * 256, 24576, 768),
}


def check_products(device: torch.device) -> Iterator[Check]:
    """Compare sparse matmuls with float64 in every dtype used on the device, with and without deterministic mode."""
    types = (torch.float32, torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,)
    if device.type == "cuda":
        compiles = SPARSE_PRODUCTS.on(torch.zeros(2, 2, device=device)) is not None
        yield Check(PART, "Triton compiles kernels", compiles, {})
    was = torch.are_deterministic_algorithms_enabled()
    try:
        for repeatable, (name, case), dtype in itertools.product((False, True), CASES.items(), types):
            torch.use_deterministic_algorithms(repeatable, warn_only=True)
            label = f"{name}, {str(dtype).removeprefix('torch.')}{', repeatable' if repeatable else ''}"
            for product, off in _errors(*case, dtype, device).items():
                yield Check(PART, f"{product}: {label}", off < TOLERANCE, {"off": off})
    finally:
        torch.use_deterministic_algorithms(was)


def _errors(counts: list[int], d_sae: int, d: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return the relative error of each matmul, compared with float64."""
    generator = torch.Generator().manual_seed(0)
    per_token = torch.tensor(counts)
    n = int(per_token.sum())
    latents = torch.randint(d_sae, (n,), generator=generator)
    tokens, starts = torch.arange(len(counts)).repeat_interleave(per_token), per_token.cumsum(0) - per_token
    values = torch.randn(n, generator=generator)
    rows, dense = (torch.randn(length, d, generator=generator).to(dtype) for length in (d_sae, len(counts)))
    indices = SparseIndices(latents.to(device), tokens.to(device), starts.to(device))
    acts = SparseActs(values.to(device), indices, d_sae)
    exact = torch.zeros(len(counts), d_sae, dtype=torch.float64)
    exact.index_put_((tokens, latents), values.double(), accumulate=True)
    on_device = rows.to(device), dense.to(device)
    of_weights, of_acts = exact.T @ dense.double(), (dense.double()[tokens] * rows.double()[latents]).sum(dim=1)
    with torch.no_grad():
        both = sparse.both_products(acts, on_device[1], on_device[0])
        return {
            "decoding": share_off(sparse.decode(acts, on_device[0]), exact @ rows.double()),
            "gradient of weights": share_off(sparse.transposed_product(acts, on_device[1]), of_weights),
            "gradient of activations": share_off(sparse.row_products(on_device[1], on_device[0], indices), of_acts),
            "both gradients": max(map(share_off, both, (of_weights, of_acts))),
        }


def share_off(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error relative to the norm of the exact result; infinity if a value is not finite."""
    found = found.to(CPU, torch.float64)
    return float((found - exact).norm() / exact.norm()) if bool(found.isfinite().all()) else float("inf")


def check_selections(device: torch.device) -> Iterator[Check]:
    """Compare selections with a full sort that treats NaN as the largest value."""
    types = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    matrix = torch.randn(257, 6144, generator=torch.Generator().manual_seed(0))
    matrix[3, 5] = float("nan")
    for dtype, k in itertools.product(types, (1, 32, 100)):
        values = matrix.to(dtype)
        chosen = values.gather(1, top_k.of_each(values.to(device), k).to(CPU))
        expected = values.nan_to_num(1e9).sort(dim=1, descending=True).values[:, :k]
        is_same = bool((chosen.nan_to_num(1e9).sort(dim=1, descending=True).values == expected).all())
        yield Check(PART, f"the {k} largest of each token, {dtype}".replace("torch.", ""), is_same, {})
        finite, n = values.nan_to_num(0), k * len(values)
        flat = top_k.of_all(finite.to(device), n).to(CPU)
        best = finite.flatten().sort(descending=True).values[:n]
        is_same = len(flat) == n and bool((flat.diff() > 0).all())
        is_same = is_same and bool((finite.flatten()[flat].sort(descending=True).values == best).all())
        yield Check(PART, f"the {n} largest of a batch, {dtype}".replace("torch.", ""), is_same, {})
