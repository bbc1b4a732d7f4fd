"""The errors of reconstructions on a GPU, with all that is summed of them and of their targets, in one pass.

The order of the sums is fixed: a program adds up `ROWS_OF_PROGRAM` rows, and their sums are added afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.losses import Moments, Sums

# Rows that a program adds up, those and the columns that it holds at a time: 8 numbers of each of four sums a thread.
ROWS_OF_PROGRAM, ROWS, COLUMNS = 32, 16, 128


def fits(y: Tensor, x_hat: Tensor) -> bool:
    """Tell whether `errors_of` can take these."""
    return y.dtype == x_hat.dtype == torch.float32 and y.shape == x_hat.shape and y.numel() > 0


def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> tuple[Tensor, Sums]:
    """Return x_hat − y [n_tokens, d_out], for y_mean [d_out], and the sums of both over tokens."""
    n_rows, n_columns = y.shape
    errors = torch.empty_like(y, memory_format=torch.contiguous_format)
    n_parts = triton.cdiv(n_rows, ROWS_OF_PROGRAM)
    parts = y.new_empty(n_parts, 4, n_columns)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(y):
        _sum_errors[n_parts, triton.cdiv(n_columns, COLUMNS)](
            errors,
            parts,
            y.contiguous(),
            x_hat.contiguous(),
            y_mean,
            n_rows,
            n_columns,
            OF_PROGRAM=ROWS_OF_PROGRAM,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=8,
        )
    of_columns = parts.sum(dim=0)
    of_error, of_targets = of_columns[1::2].sum(dim=1)
    return errors, Sums(Moments(of_error, of_columns[0]), Moments(of_targets, of_columns[2]))


def try_out(device: torch.device) -> None:
    """Run the kernel once; raise what Triton raises where it cannot, and `RuntimeError` where results are wrong."""
    y = torch.arange(40 * 130, device=device).view(40, 130).remainder(7).float()
    errors, sums = errors_of(y, 3 - y, y[0])
    centred = y - y[0]
    expected = errors.square().sum(), -errors.sum(dim=0), centred.square().sum(), centred.sum(dim=0)
    assert sums.centred is not None, "the kernel sums both"
    are_right = [(one == other).all() for one, other in zip((*sums.error, *sums.centred), expected, strict=True)]
    if not (errors == 3 - 2 * y).all() or not all(are_right):
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _sum_errors(
    out_errors, out_parts, y, x_hat, y_mean, n_rows, n_columns,
    OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the errors of some rows and columns; sum them, the targets, and the squares of both over the rows."""
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mean = tl.load(y_mean + columns, mask=columns < n_columns, other=0)
    errors = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squared_errors, targets, squared_targets = errors, errors, errors
    for begin in tl.static_range(0, OF_PROGRAM, ROWS):
        rows = part * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        places = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
        target = tl.load(y + places, mask=inside, other=0)
        error = tl.load(x_hat + places, mask=inside, other=0) - target
        tl.store(out_errors + places, error, mask=inside)
        centred = tl.where(inside, target - mean[None, :], 0)
        errors -= error
        squared_errors += error * error
        targets += centred
        squared_targets += centred * centred
    at = out_parts + part.to(tl.int64) * 4 * n_columns + columns
    tl.store(at, tl.sum(errors, axis=0), mask=columns < n_columns)
    tl.store(at + n_columns, tl.sum(squared_errors, axis=0), mask=columns < n_columns)
    tl.store(at + 2 * n_columns, tl.sum(targets, axis=0), mask=columns < n_columns)
    tl.store(at + 3 * n_columns, tl.sum(squared_targets, axis=0), mask=columns < n_columns)
