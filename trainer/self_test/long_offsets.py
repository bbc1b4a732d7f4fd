"""Checks matmuls and selections in matrices with more than 2^31 elements, which need 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.saes.kernels import sparse, top_k
from trainer.saes.sparse_acts import SparseActs, SparseIndices
from trainer.self_test.base import Check
from trainer.self_test.products import TOLERANCE, share_off

PART = "long offsets"
# The shapes of weights and pre-activations. The last `N_LAST` rows start beyond 2^31 elements; all other rows are zero.
WEIGHTS, PRE_ACTS = (2**20 + 64, 2304), (2**15 + 8, 65536)
N_LAST = 8
# The memory for 16-bit weights and fp32 sums of the same shape, plus a third of that for intermediate results.
NEEDED_BYTES = 20 * 10**9


def check_long_offsets(device: torch.device) -> Iterator[Check]:
    """Compare matmuls and selections at the end of huge matrices with exact results, if the GPU has enough memory."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < NEEDED_BYTES:
        return
    for product, off in product_errors(*WEIGHTS, device).items():
        yield Check(PART, product, off < TOLERANCE, {"off": off})
    torch.cuda.empty_cache()
    for choice, is_right in right_choices(*PRE_ACTS, device).items():
        yield Check(PART, choice, is_right, {})
    torch.cuda.empty_cache()


def product_errors(n_rows: int, width: int, device: torch.device) -> dict[str, float]:
    """Return the relative error of each matmul with the last rows, compared with float64."""
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if device.type == "cuda" else torch.float32
    last, dense = (torch.randn(n, width, generator=generator).to(dtype) for n in (N_LAST, 2))
    values, entries = torch.randn(N_LAST, generator=generator), torch.arange(N_LAST)
    latents, tokens, starts = n_rows - N_LAST + entries, 2 * entries // N_LAST, torch.tensor([0, N_LAST // 2])
    acts = SparseActs(
        values.to(device), SparseIndices(latents.to(device), tokens.to(device), starts.to(device)), n_rows
    )
    exact = torch.zeros(2, N_LAST, dtype=torch.float64).index_put((tokens, entries), values.double())
    rows = _ending_with(last, n_rows, device)
    with torch.no_grad():
        sums, products = sparse.both_products(acts, dense.to(device), rows)
        # Check slices, because a mask over all elements would take gigabytes.
        are_others_0 = not any(bool(part.any()) for part in sums[:-N_LAST].split(2**16))
        of_weights = share_off(sums[-N_LAST:], exact.T @ dense.double())
        return {
            "decoding": share_off(sparse.decode(acts, rows), exact @ last.double()),
            "gradient of weights": of_weights if are_others_0 else float("inf"),
            "gradient of activations": share_off(products, (dense.double()[tokens] * last.double()).sum(dim=1)),
        }


def right_choices(n_rows: int, n_columns: int, device: torch.device, k: int = 32) -> dict[str, bool]:
    """Return whether the k largest values in each of the last rows, and in the full matrix, are selected.

    The k largest values in the full matrix are all in the last rows.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    last = torch.randn(N_LAST, n_columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    matrix = _ending_with(last, n_rows, device)
    of_each = last.gather(1, top_k.of_each(matrix, k)[-N_LAST:].cpu()).sort(dim=1, descending=True).values
    of_all = top_k.of_all(matrix, k).cpu() - (matrix.numel() - last.numel())
    is_last = bool((of_all >= 0).all())
    found = last.flatten()[of_all if is_last else of_all[:0]].sort(descending=True).values
    return {
        f"the {k} largest of each token": torch.equal(of_each, last.sort(dim=1, descending=True).values[:, :k]),
        f"the {k} largest of a batch": torch.equal(found, last.flatten().sort(descending=True).values[:k]),
    }


def _ending_with(last: Tensor, n_rows: int, device: torch.device) -> Tensor:
    whole = torch.zeros(n_rows, last.shape[1], dtype=last.dtype, device=device)
    whole[-len(last) :] = last.to(device)
    return whole
