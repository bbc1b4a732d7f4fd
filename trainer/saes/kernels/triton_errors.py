"""The errors of reconstructions on a GPU, with all that is summed of them and of their targets, in one pass.

The order of the sums is fixed: a program adds up some rows, and its sums are added to those of others afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.losses import Moments, Sums

# Rows that a program adds up, those and the columns that it holds at a time: 16 numbers of each sum a thread, which has
# all rows of its columns, or 8 where it has the sums of several levels, so that none spill.
_TILE = {"OF_PROGRAM": 32, "COLUMNS": 256, "num_warps": 2}
# Numbers of a program that sums two tensors, 16 a thread.
_SUMMED = 4096


class Nested(NamedTuple):
    """What the prefixes of 1, 2, ... levels miss, `errors` [n_tokens, n_levels, d_out]; the reconstruction by all of
    them, `x_hat` [n_tokens, d_out], with its sums; and Σ‖error‖² of all other prefixes together, `inner`, 0-dim."""

    errors: Tensor
    x_hat: Tensor
    sums: Sums
    inner: Tensor


def fits(y: Tensor, *others: Tensor) -> bool:
    """Tell whether the kernels can take targets y and what is of their kind."""
    return y.numel() > 0 and all(one.dtype == torch.float32 for one in (y, *others))


def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> tuple[Tensor, Sums]:
    """Return x_hat − y [n_tokens, d_out], for y_mean [d_out], and the sums of both over tokens."""
    errors = torch.empty_like(y, memory_format=torch.contiguous_format)
    error, centred, *_ = _summed(errors, None, y, x_hat[:, None], None, y_mean)
    return errors, Sums(error, centred)


def nested(parts: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor) -> Nested:
    """Sum what all levels add, parts [n_tokens, n_levels, d_out] to `offset`, [d_out] or [n_tokens, d_out]."""
    errors = torch.empty_like(parts, memory_format=torch.contiguous_format)
    x_hat = torch.empty_like(y, memory_format=torch.contiguous_format)
    error, centred, *inner = _summed(errors, x_hat, y, parts, offset, y_mean)
    return Nested(errors, x_hat, Sums(error, centred), inner[0].square if inner else error.square.new_zeros(()))


def nested_gradients(
    errors: Tensor, of_whole: Tensor, of_inner: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the gradients of parts [n_tokens, n_levels, d_out] from those of Σ‖error‖² of all levels and of the other
    prefixes, 0-dim; they have `dtype`. Summed over tokens those of an offset are fp32 [d_out]."""
    n_rows, n_levels, n_columns = errors.shape
    out, grid = torch.empty_like(errors, dtype=dtype), _grid(n_rows, n_columns)
    sums = errors.new_empty(grid[0], n_columns)
    with torch.cuda.device_of(errors):
        _sum_gradients[grid](out, sums, errors, of_whole, of_inner, n_rows, n_columns, LEVELS=n_levels, ROWS=2, **_TILE)
    return out, sums.sum(dim=0)


def add_and_square(part: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight · Σ(part + other)², 0-dim, and 2 · (part + other) in the type of `part`, which may have 16 bits.

    The weight, 0-dim, is no part of what is to be the gradient, which would be rounded twice; 2 rounds nothing.
    """
    twice, n_values = torch.empty_like(part, memory_format=torch.contiguous_format), part.numel()
    n_programs = triton.cdiv(n_values, _SUMMED)
    squares = other.new_empty(n_programs)
    if n_programs:
        with torch.cuda.device_of(part):
            tensors = twice, squares, part.contiguous(), other.contiguous(), weight
            _add_and_square[n_programs,](*tensors, n_values, TILE=_SUMMED, num_warps=8)
    return squares.sum(), twice


def _summed(
    errors: Tensor, x_hat: Tensor | None, y: Tensor, parts: Tensor, offset: Tensor | None, y_mean: Tensor
) -> list[Moments]:
    """Fill `errors` and `x_hat`; return the moments of y − x_hat, of y − y_mean and, of several levels, of the others'
    errors, which have no total."""
    (n_rows, n_columns), n_levels = y.shape, parts.shape[1]
    n_moments = 2 if n_levels == 1 else 3
    grid = _grid(n_rows, n_columns)
    sums = y.new_empty(grid[0], 2 * n_moments, n_columns)
    stride = 0 if offset is None or offset.dim() == 1 else n_columns
    offset = None if offset is None else offset.contiguous()
    tensors = errors, sums, x_hat, y.contiguous(), parts.contiguous(), offset, y_mean
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(y):
        sizes = {"LEVELS": n_levels, "MOMENTS": n_moments, "ROWS": 4 if n_levels == 1 else 2}
        _sum_errors[grid](*tensors, stride, n_rows, n_columns, **sizes, **_TILE)
    totals, squares = sums.sum(dim=0).chunk(2)
    return [Moments(*pair) for pair in zip(squares.sum(dim=1), totals, strict=True)]


def _grid(n_rows: int, n_columns: int) -> tuple[int, int]:
    return triton.cdiv(n_rows, _TILE["OF_PROGRAM"]), triton.cdiv(n_columns, _TILE["COLUMNS"])


def try_out(device: torch.device) -> None:
    """Run the kernel once; raise what Triton raises where it cannot, and `RuntimeError` where results are wrong."""
    y = torch.arange(40 * 130, device=device).view(40, 130).remainder(7).float()
    errors, sums = errors_of(y, 3 - y, y[0])
    centred = y - y[0]
    expected = errors.square().sum(), -errors.sum(dim=0), centred.square().sum(), centred.sum(dim=0)
    assert sums.centred is not None, "the kernel sums both"
    are_right = [(one == other).all() for one, other in zip((*sums.error, *sums.centred), expected, strict=True)]
    levels = nested(y[:, None].expand(-1, 2, -1), y[0], y, y[0])
    gradients, total = nested_gradients(levels.errors, y.new_ones(()), y.new_ones(()))
    # Every card knows fp16; Triton 3.2 compiles no bf16 for those before sm_80.
    square, twice = add_and_square(y.half(), y, y[0, 2])
    are_right += [(levels.x_hat == 2 * y + y[0]).all(), levels.inner == (y[0].square().sum() * len(y))]
    are_right += [(gradients[:, 1] == 2 * (y + y[0])).all(), (gradients[:, 0] == 2 * y + 4 * y[0]).all()]
    are_right += [(total == gradients[:, 0].sum(dim=0)).all(), square == 8 * y.square().sum(), (twice == 4 * y).all()]
    if not (errors == 3 - 2 * y).all() or not all(are_right):
        raise RuntimeError("the kernels give wrong results")


@triton.jit
def _sum_errors(
    out_errors, out_sums, out_x_hat, y, parts, offset, y_mean, offset_stride, n_rows, n_columns,
    LEVELS: tl.constexpr, MOMENTS: tl.constexpr, OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the errors of some rows and columns; sum them, the targets, and the squares of both over the rows."""
    program = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mean = tl.load(y_mean + columns, mask=columns < n_columns, other=0)
    errors = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squared_errors, targets, squared_targets, inner = errors, errors, errors, errors
    for begin in range(0, OF_PROGRAM, ROWS):
        rows = program * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        rows = rows.to(tl.int64)[:, None]
        target = tl.load(y + rows * n_columns + columns[None, :], mask=inside, other=0)
        error = -target
        if offset is not None:
            error += tl.load(offset + rows * offset_stride + columns[None, :], mask=inside, other=0)
        for level in tl.static_range(LEVELS):
            places = (rows * LEVELS + level) * n_columns + columns[None, :]
            error += tl.load(parts + places, mask=inside, other=0)
            tl.store(out_errors + places, error, mask=inside)
            if level < LEVELS - 1:
                inner += error * error
        if out_x_hat is not None:
            tl.store(out_x_hat + rows * n_columns + columns[None, :], target + error, mask=inside)
        centred = tl.where(inside, target - mean[None, :], 0)
        errors -= error
        squared_errors += error * error
        targets += centred
        squared_targets += centred * centred
    at = out_sums + program.to(tl.int64) * 2 * MOMENTS * n_columns + columns
    tl.store(at, tl.sum(errors, axis=0), mask=columns < n_columns)
    tl.store(at + n_columns, tl.sum(targets, axis=0), mask=columns < n_columns)
    squares = at + MOMENTS * n_columns
    tl.store(squares, tl.sum(squared_errors, axis=0), mask=columns < n_columns)
    tl.store(squares + n_columns, tl.sum(squared_targets, axis=0), mask=columns < n_columns)
    if MOMENTS == 3:
        tl.store(at + 2 * n_columns, tl.zeros([COLUMNS], dtype=tl.float32), mask=columns < n_columns)
        tl.store(squares + 2 * n_columns, tl.sum(inner, axis=0), mask=columns < n_columns)


@triton.jit
def _sum_gradients(
    out, out_sums, errors, of_whole, of_inner, n_rows, n_columns,
    LEVELS: tl.constexpr, OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all levels: each is that of the next one, and what its own prefix adds; sum the first."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    whole, inner = 2 * tl.load(of_whole), 2 * tl.load(of_inner)
    totals = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, OF_PROGRAM, ROWS):
        rows = tl.program_id(0) * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        gradient = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for below in tl.static_range(LEVELS):
            places = (rows.to(tl.int64)[:, None] * LEVELS + LEVELS - 1 - below) * n_columns + columns[None, :]
            error = tl.load(errors + places, mask=inside, other=0)
            if below == 0:
                gradient = whole * error
            else:
                gradient += inner * error
            tl.store(out + places, gradient.to(out.dtype.element_ty), mask=inside)
        totals += gradient
    at = out_sums + tl.program_id(0).to(tl.int64) * n_columns + columns
    tl.store(at, tl.sum(totals, axis=0), mask=columns < n_columns)


@triton.jit
def _add_and_square(out_twice, out_squares, part, other, weight, n_values, TILE: tl.constexpr):
    """Add some numbers of two tensors; write it twice as large, and sum its squares with their weight."""
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < n_values
    each = tl.load(part + places, mask=inside, other=0).to(tl.float32) + tl.load(other + places, mask=inside, other=0)
    tl.store(out_twice + places, (2 * each).to(out_twice.dtype.element_ty), mask=inside)
    tl.store(out_squares + tl.program_id(0), tl.sum(each * each, axis=0) * tl.load(weight))
