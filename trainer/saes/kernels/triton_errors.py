"""Reconstruction errors on a GPU: one pass computes the errors and all sums over errors and targets.

The order of the additions is fixed: each program adds up a block of rows, and the programs' sums are added afterwards.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.kernels.triton_sparse import gather
from trainer.saes.losses import Moments, Sums
from trainer.saes.sparse_acts import Filled, SparseActs, SparseIndices

# The number of rows per program, and the number of columns it processes at a time. Each thread processes all rows of
# its columns: 16 numbers per sum, or 8 if there are several levels, so that no registers are spilled.
_TILE = {"OF_PROGRAM": 32, "COLUMNS": 256, "num_warps": 2}
# The numbers of rows and columns per program that adds two matrices, chosen so that each thread processes 16 numbers.
_ADDED = {"ROWS": 16, "COLUMNS": 256}
# The number of columns in a one-warp program, the number of bytes it gathers per column at a time, and the number of
# such programs that fill a GPU. The tokens are divided among about this number of programs; more of them would only
# write more partial sums.
_GATHERED, _AT_ONCE, _FULL = 128, 16, 8192


class OfBags(NamedTuple):
    """The errors x_hat − y [n_tokens, d_out], a copy of them in the decoder rows' dtype (`narrow`), x_hat and sums."""

    errors: Tensor
    narrow: Tensor
    x_hat: Tensor
    sums: Sums


class NestedErrors(NamedTuple):
    """The errors of the prefixes of 1, 2, … levels, and the reconstruction from all levels.

    `errors` is [n_tokens, n_levels, d_out]. `x_hat` [n_tokens, d_out] and `sums` are for the full set of levels.
    `inner`, 0-dim, is Σ‖error‖² over all shorter prefixes.
    """

    errors: Tensor
    x_hat: Tensor
    sums: Sums
    inner: Tensor


def fits(y: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels support the targets y and the other tensors."""
    return y.numel() > 0 and all(one.dtype == torch.float32 for one in (y, *others))


def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> tuple[Tensor, Sums]:
    """Return the errors x_hat − y [n_tokens, d_out], and the moments of x_hat − y and of y − y_mean."""
    errors = torch.empty_like(y, memory_format=torch.contiguous_format)
    error, centred, *_ = _summed(errors, None, y, x_hat[:, None], None, y_mean)
    return errors, Sums(error, centred)


def nested(parts: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor) -> NestedErrors:
    """Add the levels' outputs, `parts` [n_tokens, n_levels, d_out], to `offset`, [d_out] or [n_tokens, d_out]."""
    errors = torch.empty_like(parts, memory_format=torch.contiguous_format)
    x_hat = torch.empty_like(y, memory_format=torch.contiguous_format)
    error, centred, *inner = _summed(errors, x_hat, y, parts, offset, y_mean)
    return NestedErrors(errors, x_hat, Sums(error, centred), inner[0].square if inner else error.square.new_zeros(()))


def nested_bags(
    acts: SparseActs, rows: Tensor, n_levels: int, offset: Tensor, y: Tensor, y_mean: Tensor
) -> NestedErrors:
    """Like `nested`, but for activations whose token indices represent (token, level) pairs.

    `rows` is [d_sae, d_out] and `offset` is [d_out]. The levels' outputs are accumulated entry by entry, and are never
    written to memory.
    """
    errors, x_hat = (
        y.new_empty(len(y), n_levels, y.shape[1]),
        torch.empty_like(y, memory_format=torch.contiguous_format),
    )
    return NestedErrors(errors, x_hat, *_fill_of_bags(errors, x_hat, None, acts, rows, offset, y, y_mean))


def errors_of_bags(acts: SparseActs, rows: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor) -> OfBags:
    """Return the errors of the reconstruction from the activations, `rows` [d_sae, d_out] and `offset` [d_out]."""
    errors, x_hat = (torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(2))
    narrow = None if rows.dtype == y.dtype else torch.empty_like(errors, dtype=rows.dtype)
    sums, _ = _fill_of_bags(errors[:, None], x_hat, narrow, acts, rows, offset, y, y_mean)
    return OfBags(errors, errors if narrow is None else narrow, x_hat, sums)


def _fill_of_bags(
    errors: Tensor,
    x_hat: Tensor,
    narrow: Tensor | None,
    acts: SparseActs,
    rows: Tensor,
    offset: Tensor,
    y: Tensor,
    y_mean: Tensor,
) -> tuple[Sums, Tensor]:
    """Fill `errors` [n_tokens, n_levels, d_out], `narrow` (the errors of all levels) and `x_hat`; return the sums."""
    (n_tokens, n_columns), n_levels, indices = y.shape, errors.shape[1], acts.indices
    n_blocks = triton.cdiv(n_columns, _GATHERED)
    of_program = max(n_tokens * n_blocks // _FULL, 1)
    grid = triton.cdiv(n_tokens, of_program), n_blocks
    totals, squares = y.new_empty(grid[0], 2, n_columns), y.new_empty(3, *grid)
    entries = acts.values.contiguous(), indices.latents, indices.starts, rows.contiguous()
    tensors = errors, x_hat, narrow, totals, squares, y.contiguous(), y_mean, offset.contiguous(), *entries
    n_filled = None if indices.filled is None else indices.filled.n
    sizes = len(acts.values), n_tokens, n_levels, n_columns, of_program
    shape = {"ENTRIES": _AT_ONCE // rows.itemsize, "COLUMNS": _GATHERED, "num_warps": 1, "enable_fp_fusion": True}
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(y):
        _nest_bags[grid](*tensors, n_filled, *sizes, **shape)
    error, centred, inner = squares.sum(dim=(1, 2))
    of_errors, of_targets = totals.sum(dim=0)
    return Sums(Moments(error, of_errors), Moments(centred, of_targets)), inner


def nested_gradients(
    errors: Tensor, of_whole: Tensor, of_inner: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `parts` [n_tokens, n_levels, d_out], in `dtype`, and of an offset, fp32 [d_out].

    `of_whole` and `of_inner`, 0-dim, are the gradients of Σ‖error‖² of the full dictionary and of the shorter prefixes.
    The gradient of the offset is summed over tokens.
    """
    n_rows, n_levels, n_columns = errors.shape
    out, grid = torch.empty_like(errors, dtype=dtype), _grid(n_rows, n_columns)
    sums = errors.new_empty(grid[0], n_columns)
    with torch.cuda.device_of(errors):
        _sum_gradients[grid](out, sums, errors, of_whole, of_inner, n_rows, n_columns, LEVELS=n_levels, ROWS=2, **_TILE)
    return out, sums.sum(dim=0)


def add_and_square(part: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight · Σ(part + other)², 0-dim, and 2 · (part + other) in the dtype of `part`, which may be 16-bit.

    The second result becomes the gradient. The weight (0-dim) is not applied to this result, since that would round it
    a second time, whereas a factor of 2 is exact. Both matrices are [n_rows, n_columns]. The rows of `other` do not
    have to be adjacent in memory; for example, they may be the errors of one level.
    """
    twice, (n_rows, n_columns) = torch.empty_like(part, memory_format=torch.contiguous_format), part.shape
    other = other if other.stride(1) == 1 else other.contiguous()
    grid = triton.cdiv(n_rows, _ADDED["ROWS"]), triton.cdiv(n_columns, _ADDED["COLUMNS"])
    squares = other.new_empty(grid)
    if part.numel():
        with torch.cuda.device_of(part):
            tensors, sizes = (twice, squares, part.contiguous(), other, weight), (other.stride(0), n_rows, n_columns)
            _add_and_square[grid](*tensors, *sizes, **_ADDED, num_warps=8)
    return squares.sum(), twice


def _summed(
    errors: Tensor, x_hat: Tensor | None, y: Tensor, parts: Tensor, offset: Tensor | None, y_mean: Tensor
) -> list[Moments]:
    """Fill `errors` and `x_hat`; return the moments of x_hat − y and of y − y_mean.

    With several levels, also return the moments of the errors of the shorter prefixes; their `total` is set to 0.
    """
    (n_rows, n_columns), n_levels = y.shape, parts.shape[1]
    n_moments = 2 if n_levels == 1 else 3
    grid = _grid(n_rows, n_columns)
    sums = y.new_empty(grid[0], 2 * n_moments, n_columns)
    stride = 0 if offset is None or offset.dim() == 1 else n_columns
    offset = None if offset is None else offset.contiguous()
    tensors = errors, sums, x_hat, y.contiguous(), parts.contiguous(), offset, y_mean
    # Triton launches kernels on the current device, not necessarily on the tensors' device.
    with torch.cuda.device_of(y):
        sizes = {"LEVELS": n_levels, "MOMENTS": n_moments, "ROWS": 4 if n_levels == 1 else 2}
        _sum_errors[grid](*tensors, stride, n_rows, n_columns, **sizes, **_TILE)
    totals, squares = sums.sum(dim=0).chunk(2)
    return [Moments(*pair) for pair in zip(squares.sum(dim=1), totals, strict=True)]


def _grid(n_rows: int, n_columns: int) -> tuple[int, int]:
    return triton.cdiv(n_rows, _TILE["OF_PROGRAM"]), triton.cdiv(n_columns, _TILE["COLUMNS"])


def try_out(device: torch.device) -> None:
    """Run each kernel once, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    y = torch.arange(40 * 130, device=device).view(40, 130).remainder(7).float()
    errors, sums = errors_of(y, 3 - y, y[0])
    centred = y - y[0]
    expected = errors.square().sum(), errors.sum(dim=0), centred.square().sum(), centred.sum(dim=0)
    assert sums.centred is not None, "the kernel returns both sums"
    are_right = [(one == other).all() for one, other in zip((*sums.error, *sums.centred), expected, strict=True)]
    levels = nested(y[:, None].expand(-1, 2, -1), y[0], y, y[0])
    are_right += _are_right_of_bags(y[:5])
    gradients, total = nested_gradients(levels.errors, y.new_ones(()), y.new_ones(()))
    # Use fp16, which every GPU supports; Triton 3.2 cannot compile bf16 for GPUs older than sm_80.
    square, twice = add_and_square(y.half(), y, y[0, 2])
    are_right += [(levels.x_hat == 2 * y + y[0]).all(), levels.inner == (y[0].square().sum() * len(y))]
    are_right += [(gradients[:, 1] == 2 * (y + y[0])).all(), (gradients[:, 0] == 2 * y + 4 * y[0]).all()]
    are_right += [(total == gradients[:, 0].sum(dim=0)).all(), square == 8 * y.square().sum(), (twice == 4 * y).all()]
    if not (errors == 3 - 2 * y).all() or not all(are_right):
        raise RuntimeError("the kernels give wrong results")


def _are_right_of_bags(y: Tensor) -> list[Tensor]:
    """Test the kernel with one entry for each of two levels of every token, plus one padding entry."""
    entries = torch.arange(2 * len(y) + 1, device=y.device)
    filled = Filled(entries[-1], len(entries) - 1)
    acts = SparseActs(1.0 + entries % 2, SparseIndices(entries % 2, entries // 2, entries[:-1], filled), 2)
    found = nested_bags(acts, y[:2].half(), 2, y[2], y, y[0])
    expected = nested(torch.stack([y[0], 2 * y[1]]).expand(len(y), -1, -1), y[2], y, y[0])
    return [(one == other).all() for one, other in zip(_tensors(found), _tensors(expected), strict=True)]


def _tensors(found: NestedErrors) -> tuple[Tensor, ...]:
    assert found.sums.centred is not None, "the kernels return both sums"
    return found.errors, found.x_hat, found.inner, *found.sums.error, *found.sums.centred


@triton.jit
def _sum_errors(
    out_errors, out_sums, out_x_hat, y, parts, offset, y_mean, offset_stride, n_rows, n_columns,
    LEVELS: tl.constexpr, MOMENTS: tl.constexpr, OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the errors of one block of rows and columns; sum the errors, targets and their squares over the rows."""
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
            indices = (rows * LEVELS + level) * n_columns + columns[None, :]
            error += tl.load(parts + indices, mask=inside, other=0)
            tl.store(out_errors + indices, error, mask=inside)
            if level < LEVELS - 1:
                inner += error * error
        if out_x_hat is not None:
            tl.store(out_x_hat + rows * n_columns + columns[None, :], target + error, mask=inside)
        centred = tl.where(inside, target - mean[None, :], 0)
        errors += error
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
def _nest_bags(
    out_errors, out_x_hat, out_narrow, out_totals, out_squares, y, y_mean, offset, values, indices, starts, rows,
    n_filled, n_entries, n_tokens, n_levels, n_columns, of_program, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode one block of tokens and columns, entry by entry; write the error after each level.

    Sum the final errors, the targets, the squares of both, and the squares of the other levels' errors over the tokens.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    first_token, n_bags = program * of_program, n_tokens * n_levels
    # Each thread processes four columns: with a full 16-byte load of bf16, two threads would compute the same sums.
    columns = tl.max_contiguous(block * COLUMNS + tl.arange(0, COLUMNS), 4)
    inside = columns < n_columns
    end = n_entries if n_filled is None else tl.load(n_filled)
    before = first_token.to(tl.int64) * n_columns
    y, out_x_hat, out_errors = y + before, out_x_hat + before, out_errors + before * n_levels
    errors = tl.zeros([COLUMNS], dtype=tl.float32)
    targets, squared_errors, squared_targets, inner = errors, errors, errors, errors
    last = tl.load(starts + first_token * n_levels).to(tl.int32)
    for token in range(tl.minimum(of_program, n_tokens - first_token)):
        target = tl.load(y + token * n_columns + columns, mask=inside, other=0)
        error = tl.load(offset + columns, mask=inside, other=0) - target
        for level in range(n_levels):
            # Here, `error` still belongs to the previous level. If this addition is at the end of the loop body, sm_70
            # spills registers.
            if level > 0:
                inner += error * error
            first, after = last, (first_token + token) * n_levels + level + 1
            last = tl.load(starts + after, mask=after < n_bags, other=end).to(tl.int32)
            for begin in range(first, last, ENTRIES):
                entries = begin + tl.arange(0, ENTRIES)
                value = tl.load(values + entries, mask=entries < last, other=0).to(tl.float32)
                error += tl.sum(value[:, None] * gather(rows, indices, entries, last, columns, n_columns), axis=0)
            tl.store(out_errors + (token * n_levels + level) * n_columns + columns, error, mask=inside)
        tl.store(out_x_hat + token * n_columns + columns, target + error, mask=inside)
        if out_narrow is not None:
            place = out_narrow + before + token * n_columns + columns
            tl.store(place, error.to(out_narrow.dtype.element_ty), mask=inside)
        centred = target - tl.load(y_mean + columns, mask=inside, other=0)
        errors += error
        targets += centred
        squared_errors += error * error
        squared_targets += centred * centred
    at = out_totals + program.to(tl.int64) * 2 * n_columns + columns
    tl.store(at, errors, mask=inside)
    tl.store(at + n_columns, targets, mask=inside)
    at, n_programs = out_squares + program * tl.num_programs(1) + block, tl.num_programs(0) * tl.num_programs(1)
    tl.store(at, tl.sum(squared_errors, axis=0))
    tl.store(at + n_programs, tl.sum(squared_targets, axis=0))
    tl.store(at + 2 * n_programs, tl.sum(inner, axis=0))


@triton.jit
def _sum_gradients(
    out, out_sums, errors, of_whole, of_inner, n_rows, n_columns,
    LEVELS: tl.constexpr, OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all levels, from the last to the first; sum the first level's gradients over the rows.

    A level's gradient is the next level's gradient plus the contribution from the prefix that ends with this level.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    whole, inner = 2 * tl.load(of_whole), 2 * tl.load(of_inner)
    totals = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, OF_PROGRAM, ROWS):
        rows = tl.program_id(0) * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        gradient = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for below in tl.static_range(LEVELS):
            indices = (rows.to(tl.int64)[:, None] * LEVELS + LEVELS - 1 - below) * n_columns + columns[None, :]
            error = tl.load(errors + indices, mask=inside, other=0)
            if below == 0:
                gradient = whole * error
            else:
                gradient += inner * error
            tl.store(out + indices, gradient.to(out.dtype.element_ty), mask=inside)
        totals += gradient
    at = out_sums + tl.program_id(0).to(tl.int64) * n_columns + columns
    tl.store(at, tl.sum(totals, axis=0), mask=columns < n_columns)


@triton.jit
def _add_and_square(
    out_twice, out_squares, part, other, weight, other_stride, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add one block of each of two matrices; write twice the result, and the weighted sum of its squares."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    indices, inside = rows * n_columns + columns, (rows < n_rows) & (columns < n_columns)
    each = tl.load(part + indices, mask=inside, other=0).to(tl.float32)
    each += tl.load(other + rows * other_stride + columns, mask=inside, other=0)
    tl.store(out_twice + indices, (2 * each).to(out_twice.dtype.element_ty), mask=inside)
    square = tl.sum(tl.sum(each * each, axis=1), axis=0)
    tl.store(out_squares + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), square * tl.load(weight))
