"""Sparse products on a GPU. Inputs are fp32, bf16 or fp16; every sum is fp32.

No kernel waits for the host: grids follow from shapes. A program takes some of the columns, and programs of the same
columns run one after the other, so that the part of the rows they gather from is small enough for the L2 cache: of
65,536 bf16 rows 128 columns are 16 MiB, and of 4,096 all of 2,304 are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.saes.sparse_acts import Filled, Places, SparseActs

# Entries of a latent that one program adds up; one of more is shared by several. A latent active for every one of 4,096
# tokens would else keep one program busy long after all others are done.
LONGEST = 256
# Rows that a program weighs, those and the columns that it holds at a time: 32 numbers a thread. In parts of 256 rows,
# one after the other, an H200 took 0.13 ms for 65,536 rows of 2,304, whose bytes take 0.08.
_WEIGHED = {"OF_PROGRAM": 64, "ROWS": 16, "COLUMNS": 256, "num_warps": 4}
# Latents of which a program joins the measures of parts.
JOINED = 256
# Activations whose sum is taken at a time.
OF_TOTAL = tl.constexpr(32)
# Numbers a program holds at a time, 32 for each of its threads.
TILE = 4096
# Where as many programs fill a GPU, each holds so few numbers that one warp has them: an H200 took 0.14 ms for the sums
# of 4,096 bags of 32 rows of 768 with 4 warps, 0.03 with one, and 0.50 and 0.16 for bags of 64 rows of 2,304.
MANY, FEW_ENTRIES, FEW_COLUMNS = 4096, 4, 256
# Half of the L2 cache of the smallest data-centre card still in use (A100: 40 MB) holds this and what passes by.
SLAB_BYTES = 16 * 2**20
# Where all that passes by is read or written once, and marked so, half of it holds this.
DENSE_BYTES = 20 * 10**6
# The most columns of a latent whose sums a program holds, and about how many of those each of its threads has, or half
# as many where rows do not begin at whole vectors: Triton 3.6 spilled registers there. On an H200 few warps with an
# entry at a time are fastest: for 65,536 latents of 4,096 tokens, k 64, width 2,304, two took 0.59 ms with products and
# 0.25 without; 8 and 4 warps with four entries at a time took 1.63 and 1.07.
WIDEST, PER_THREAD, VECTOR = 4096, 40, 16


def bag_sums(values: Tensor, indices: Tensor, starts: Tensor, rows: Tensor, filled: Filled | None = None) -> Tensor:
    """Sum values[i] · rows[indices[i]] over each bag's entries: fp32 [n_bags, d]; bag b's entries begin at `starts[b]`.

    The order of the sums is fixed. Entries that are not `filled` are in no bag.
    """
    n_entries, n_bags, n_columns = len(values), len(starts), rows.shape[1]
    n_filled, n_expected = filled or (None, n_entries)
    out = rows.new_empty(n_bags, n_columns, dtype=torch.float32)
    shape = _tile(_power_of_two(n_expected // max(n_bags, 1), least=4, most=32), n_columns, n_bags)
    if out.numel():
        grid = n_bags, triton.cdiv(n_columns, shape["COLUMNS"])
        tensors = out, values.contiguous(), indices, starts, rows.contiguous(), n_filled
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(rows):
            _sum_bags[grid](*tensors, n_entries, n_columns, **shape)
    return out


class Measured(NamedTuple):
    """Where the measures of each latent's sum go, fp32 [d_sae]: its squared length, or with `unit_rows` [d_sae, d] that
    of the part across its row, and the product with it.

    Of parts of rows they are [n_parts, d_sae], as of rows of their own; those have the `out_lengths` that are told.
    """

    out_squares: Tensor
    out_dots: Tensor | None = None
    unit_rows: Tensor | None = None
    out_lengths: Tensor | None = None


class Summed(NamedTuple):
    """Sums of latents, fp32 [d_sae, d], and products of entries, fp32 [n], or else sums of activations, fp32 [d_sae].

    `shared` [m] are latents that several programs have summed, together with some that one has.
    """

    sums: Tensor
    products: Tensor | None
    totals: Tensor | None
    shared: Tensor | None


def sum_by_latent(
    acts: SparseActs,
    dense: Tensor,
    rows: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    splits: bool,
    measured: Measured | None = None,
) -> Summed:
    """Return actsᵀ dense, for `dense` [n_tokens, d], which is to be multiplied by a `factor`, 0-dim.

    Without `rows` also return the sum of each latent's activations. With `rows` [d_sae, d] also return the product of
    each entry's row of `dense` and its latent's row: what is gathered serves both. The order of these sums is fixed.
    With `splits` a latent's entries beyond its first `LONGEST` are added to its row atomically, in any order. Entries
    that are not `filled` are no latent's and get 0. The sums may be `measured`, all but those that are shared.
    """
    places, d_sae = acts.places, acts.d_sae
    (order, starts), filled = places.by_latent(d_sae), places.filled
    n_entries, (n_parts, _) = len(order), _parts(dense)
    shape = _pieces(dense)
    sums = dense.new_empty(d_sae, dense.shape[1], dtype=torch.float32)
    totals = dense.new_empty(d_sae, dtype=torch.float32) if rows is None else None
    make = dense.new_empty if filled is None else dense.new_zeros
    products = None if rows is None else make(n_parts, n_entries, dtype=torch.float32)
    tensors = {
        "out": sums,
        "out_products": products,
        "out_totals": totals,
        "values": acts.values.index_select(0, order),
        "tokens": places.tokens_by_latent(d_sae),
        "order": order,
        "starts": starts,
        "dense": dense.contiguous(),
        "rows": None if rows is None else rows.contiguous(),
        "factor": factor,
        "n_filled": None if filled is None else filled.n,
    }
    longest = LONGEST if splits else n_entries
    sizes = {"n_entries": n_entries, "n_latents": d_sae, "n_columns": dense.shape[1], "longest": longest}
    of_parts = measured if measured is None or n_parts == 1 else _of_parts(measured, n_parts)
    unmeasured = dict.fromkeys(Measured._fields)
    measuring = of_parts._asdict() if of_parts else unmeasured
    # Only these have entries in a window beyond their first `longest`.
    shared = places.latents_of_windows(d_sae, longest) if n_entries > longest else None
    if sums.numel():
        with torch.cuda.device_of(dense):
            _sum_by_latent[d_sae, n_parts](**tensors, **measuring, latents=None, **sizes, **shape)
            if shared is not None:
                _sum_by_latent[len(shared), n_parts](**tensors, **unmeasured, latents=shared, **sizes, **shape)
            if measured and of_parts and n_parts > 1:
                _join(of_parts, measured)
    if products is not None:
        products = products[0] if n_parts == 1 else products.sum(dim=0)
    return Summed(sums, products, totals, shared)


def _of_parts(measured: Measured, n_parts: int) -> Measured:
    """Return room for the measures of parts of rows."""
    squares, dots, lengths = measured.out_squares.new_empty(3, n_parts, len(measured.out_squares))
    return Measured(squares) if measured.out_dots is None else Measured(squares, dots, measured.unit_rows, lengths)


def _join(of_parts: Measured, measured: Measured) -> None:
    """Write the measures of rows from those of their parts."""
    squares, dots, _, lengths = of_parts
    n_parts, n_latents = squares.shape
    tensors = measured.out_squares, measured.out_dots, squares, dots, lengths
    _join_measures[triton.cdiv(n_latents, JOINED),](*tensors, n_parts, n_latents, LATENTS=JOINED, num_warps=4)


def _parts(dense: Tensor) -> tuple[int, int]:
    """Return into how many parts the columns of `dense` are cut, and of how many columns: whole vectors."""
    n_columns = max(dense.shape[1], 1)
    n_parts = max(triton.cdiv(n_columns, WIDEST), triton.cdiv(dense.nbytes, DENSE_BYTES))
    of_part = VECTOR * triton.cdiv(triton.cdiv(n_columns, n_parts), VECTOR)
    return triton.cdiv(n_columns, of_part), of_part


def _pieces(dense: Tensor) -> dict[str, int]:
    """Return how a program holds a part of the columns: in two pieces, since the sizes of pieces are powers of two.

    Of 2,304 columns they are 2,048 and 256, where one would be of 4,096.
    """
    _, of_part = _parts(dense)
    near = triton.next_power_of_2(of_part // 2 + 1)
    far = triton.next_power_of_2(max(of_part - near, 1))
    warps = triton.cdiv(near + far, 32 * (PER_THREAD if dense.shape[1] % VECTOR == 0 else PER_THREAD // 2))
    shape = {"of_part": of_part, "NEAR": near, "FAR": far}
    return shape | {"num_warps": triton.next_power_of_2(warps), "enable_fp_fusion": True}


def row_products(dense: Tensor, rows: Tensor, indices: Tensor, starts: Tensor, filled: Filled | None = None) -> Tensor:
    """Return dense[b] · rows[indices[i]] for each entry i of bag b, fp32 [n]; the order of the sums is fixed.

    Entries that are not `filled` are in no bag and get 0.
    """
    n_entries, n_bags, n_columns = len(indices), len(starts), rows.shape[1]
    n_filled, n_expected = filled or (None, n_entries)
    # Short bags would leave most of a taller tile empty.
    shape = _tile(_power_of_two(n_expected // max(n_bags, 1), least=8, most=32), n_columns, n_bags)
    # Where all rows are more than the cache holds, each program multiplies a part of the columns.
    n_blocks = triton.cdiv(n_columns, shape["COLUMNS"])
    blocks_per_part = triton.cdiv(n_blocks, triton.cdiv(rows.nbytes, SLAB_BYTES))
    n_parts = triton.cdiv(n_blocks, blocks_per_part)
    make = rows.new_empty if filled is None else rows.new_zeros
    out = make(n_parts, n_entries, dtype=torch.float32)
    if n_entries:
        tensors = out, dense.contiguous(), rows.contiguous(), indices, starts, n_filled
        with torch.cuda.device_of(rows):
            _multiply_rows[n_bags, n_parts](*tensors, n_entries, n_columns, blocks_per_part * shape["COLUMNS"], **shape)
    return out[0] if n_parts == 1 else out.sum(dim=0)


def weighted_sum(weights: Tensor, rows: Tensor, factor: float) -> Tensor:
    """Return factor · Σ weights[i] · rows[i] of rows [n, d]: fp32 [d]; the order of the sums is fixed."""
    n_rows, n_columns = rows.shape
    grid = triton.cdiv(n_rows, _WEIGHED["OF_PROGRAM"]), triton.cdiv(n_columns, _WEIGHED["COLUMNS"])
    out = rows.new_empty(grid[0], n_columns, dtype=torch.float32)
    if out.numel():
        with torch.cuda.device_of(rows):
            _weigh_rows[grid](out, weights, rows.contiguous(), n_rows, n_columns, factor, **_WEIGHED)
    return out.sum(dim=0)


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Run every kernel once with rows of this type.

    Raise what Triton raises where it cannot, and `RuntimeError` where results are wrong.
    """
    n = LONGEST + 1
    values, rows = torch.ones(n, device=device), torch.ones(1, 16, device=device, dtype=dtype)
    zeros = torch.zeros(n, dtype=torch.int64, device=device)
    starts = zeros[:1]
    sums, products = bag_sums(values, zeros, starts, rows), row_products(rows, rows, zeros, starts)
    # As a whole, and in parts.
    of_both = (n, 48), (1, WIDEST + VECTOR)
    are_right = [_sums_of_latents_are_right(device, dtype, *of_one) for of_one in of_both]
    are_right += [bool((weighted_sum(values, rows.expand(n, -1), -2.0) == -2 * n).all())]
    if not (sums == n).all() or not (products == 16).all() or not all(are_right):
        raise RuntimeError("the kernels give wrong results")


def _sums_of_latents_are_right(device: torch.device, dtype: torch.dtype, n: int, width: int) -> bool:
    """Try both pieces of a row, an entry of no latent, measures, and a latent of odd n entries, shared by programs."""
    entries = torch.arange(n + 2, device=device)
    latents, tokens, filled = (entries >= n).long(), entries % 2, Filled(torch.tensor(n + 1, device=device), n + 1)
    acts = SparseActs(torch.ones(n + 2, device=device), Places(latents, tokens, entries[:2], filled), 2)
    dense = torch.tensor([[1.0], [3.0]], device=device, dtype=dtype).expand(2, width)
    unit_rows = torch.full((2, width), width**-0.5, device=device)
    squares, dots = torch.empty(2, device=device), torch.empty(2, device=device)
    measured = Measured(squares, dots, unit_rows)
    factor = torch.full((), 0.5, device=device)
    given = acts, 2 * dense, torch.ones_like(dense), factor
    sums, products, *_ = sum_by_latent(*given, splits=True, measured=measured)
    assert products is not None, "rows were given"
    whole = torch.tensor([[n // 2 * 4 + 1.0], [3.0]], device=device)
    are_right = (sums == whole).all() & (products[: n + 1] == width * (1 + 2 * tokens[: n + 1])).all()
    totals = sum_by_latent(acts, dense, splits=True).totals
    assert totals is not None, "no rows were given"
    are_right &= (totals == torch.tensor([n, 1.0], device=device)).all()
    # Those of the first latent are to be measured once more.
    return bool(are_right & (squares[1] < 1e-3) & ((dots[1] / width**0.5 - 3).abs() < 1e-3))


def _power_of_two(number: int, *, least: int, most: int) -> int:
    power: int = triton.next_power_of_2(max(number, 1))
    return min(max(power, least), most)


def _tile(entries: int, n_columns: int, n_bags: int) -> dict[str, int]:
    most = TILE // max(entries, 8)
    if n_bags * triton.cdiv(n_columns, FEW_COLUMNS) >= MANY:
        entries, most = FEW_ENTRIES, FEW_COLUMNS
    columns = _power_of_two(n_columns, least=16, most=most)
    warps = max(1, entries * columns // 1024)
    # Set explicitly, since Triton 3.10 no longer does so by itself.
    return {"ENTRIES": entries, "COLUMNS": columns, "num_warps": warps, "enable_fp_fusion": True}


@triton.jit
def _sum_bags(
    out, values, indices, starts, rows, n_filled, n_entries, n_columns,
    ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum one bag in one block of columns."""
    bag = tl.program_id(0)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + bag).to(tl.int32)
    last = tl.load(starts + bag + 1, mask=bag + 1 < tl.num_programs(0), other=end).to(tl.int32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ENTRIES, COLUMNS], dtype=tl.float32)
    for begin in range(first, last, ENTRIES):
        entries = begin + tl.arange(0, ENTRIES)
        value = tl.load(values + entries, mask=entries < last, other=0).to(tl.float32)
        total += value[:, None] * gather(rows, indices, entries, last, columns, n_columns)
    tl.store(out + bag.to(tl.int64) * n_columns + columns, tl.sum(total, axis=0), mask=columns < n_columns)


@triton.jit
def _sum_by_latent(
    out, out_products, out_totals, out_squares, out_dots, out_lengths, values, tokens, order, starts, dense,
    rows, factor, unit_rows, latents, n_filled, n_entries, n_latents, n_columns, longest, of_part,
    NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Sum one latent's first `longest` entries in one part of the columns, and multiply each with the latent's row.

    Both are multiplied by the `factor`, where there is one. With `latents`, add what a window of `longest` entries has
    beyond the first `longest` of a latent. It is of one latent at most, the one with which the window begins: any other
    begins later.
    """
    latent, part = tl.program_id(0), tl.program_id(1)
    if latents is not None:
        window = latent
        latent = tl.load(latents + window).to(tl.int32)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + latent).to(tl.int32)
    last = tl.load(starts + latent + 1, mask=latent + 1 < n_latents, other=end).to(tl.int32)
    if latents is None:
        last = tl.minimum(last, first + longest)
    else:
        first = tl.maximum(window * longest, first + longest)
        last = tl.minimum((window + 1) * longest, last)

    left = part * of_part
    near, far = left + tl.arange(0, NEAR), left + NEAR + tl.arange(0, FAR)
    right = tl.minimum(left + of_part, n_columns)
    # Of a window that adds nothing no column is read or written.
    right = tl.where((first < last) | (latents is None), right, left)
    row = latent.to(tl.int64) * n_columns
    near_total, far_total = tl.zeros([NEAR], dtype=tl.float32), tl.zeros([FAR], dtype=tl.float32)
    times = 1.0 if factor is None else tl.load(factor)
    if rows is not None:
        near_row, far_row = _once(rows + row + near, near < right), _once(rows + row + far, far < right)
    for entry in range(first, last):
        value = tl.load(values + entry).to(tl.float32)
        token = tl.load(tokens + entry).to(tl.int64) * n_columns
        product = 0.0
        # The small piece first: in the other order sm_120 spills.
        if FAR > 1:
            numbers = _gathered(dense + token + far, far < right)
            far_total += value * numbers
            if rows is not None:
                product += tl.sum(numbers * far_row, axis=0)
        numbers = _gathered(dense + token + near, near < right)
        near_total += value * numbers
        if rows is not None:
            product += tl.sum(numbers * near_row, axis=0)
            tl.store(out_products + part.to(tl.int64) * n_entries + tl.load(order + entry), product * times)
    near_total *= times
    far_total *= times
    # Neither in the loop nor beside products: sm_80 and sm_90 spilled. One after the other, or Triton 3.2 compiles it
    # where there are none.
    if out_totals is not None:  # noqa: SIM102
        if part == 0:
            total = _total(values, first, last)
            _put(out_totals + latent, total, (first < last) | (latents is None), latents is not None)
    _put(out + row + near, near_total, near < right, latents is not None)
    if FAR > 1:
        _put(out + row + far, far_total, far < right, latents is not None)
    if out_squares is not None:
        measures = part * n_latents + latent
        if unit_rows is not None:
            # Not before the loop, which would hold twice the registers; in the other order sm_86 and sm_89 spilled.
            far_row = _once(unit_rows + row + far, far < right)
            near_row = _once(unit_rows + row + near, near < right)
            if out_lengths is not None:
                length = tl.sqrt(tl.sum(near_row * near_row, axis=0) + tl.sum(far_row * far_row, axis=0))
                tl.store(out_lengths + measures, length)
                length = tl.where(length > 0, length, 1)
                near_row /= length
                far_row /= length
            dot = tl.sum(near_total * near_row, axis=0) + tl.sum(far_total * far_row, axis=0)
            tl.store(out_dots + measures, dot)
            # Taken out before it is squared: the difference of two squares would lose the digits of what is small.
            near_total -= dot * near_row
            far_total -= dot * far_row
        square = tl.sum(near_total * near_total, axis=0) + tl.sum(far_total * far_total, axis=0)
        tl.store(out_squares + measures, square)


@triton.jit
def _total(values, first, last):
    """Sum some values, one after the other."""
    total = 0.0
    for entry in range(first, last, OF_TOTAL):
        entries = entry + tl.arange(0, OF_TOTAL)
        total += tl.sum(tl.load(values + entries, mask=entries < last, other=0).to(tl.float32), axis=0)
    return total


@triton.jit
def _join_measures(
    out_squares, out_dots, squares, dots, lengths, n_parts, n_latents, LATENTS: tl.constexpr
):  # fmt: skip
    """Join measures of parts of some latents' rows."""
    latents = tl.program_id(0) * LATENTS + tl.arange(0, LATENTS)
    inside = latents < n_latents
    square, whole = tl.zeros([LATENTS], dtype=tl.float32), tl.zeros([LATENTS], dtype=tl.float32)
    if dots is not None:
        for part in range(n_parts):
            at = part * n_latents + latents
            whole += tl.load(dots + at, mask=inside, other=0) * tl.load(lengths + at, mask=inside, other=0)
        tl.store(out_dots + latents, whole, mask=inside)
    for part in range(n_parts):
        at = part * n_latents + latents
        square += tl.load(squares + at, mask=inside, other=0)
        if dots is not None:
            # Beside what is across its own part of the row, a part is along it by more or less than all together are.
            own = tl.load(dots + at, mask=inside, other=0)
            beside = own - whole * tl.load(lengths + at, mask=inside, other=0)
            square += beside * beside
    tl.store(out_squares + latents, square, mask=inside)


@triton.jit
def _weigh_rows(
    out, weights, rows, n_rows, n_columns, factor,
    OF_PROGRAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum some columns of some rows, each times its weight."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in tl.static_range(0, OF_PROGRAM, ROWS):
        row = tl.program_id(0) * OF_PROGRAM + begin + tl.arange(0, ROWS)
        inside = (row < n_rows)[:, None] & (columns < n_columns)[None, :]
        weight = tl.load(weights + row, mask=row < n_rows, other=0).to(tl.float32)
        total += weight[:, None] * _once(rows + row.to(tl.int64)[:, None] * n_columns + columns[None, :], inside)
    at = out + tl.program_id(0).to(tl.int64) * n_columns + columns
    tl.store(at, factor * tl.sum(total, axis=0), mask=columns < n_columns)


@triton.jit
def _once(places, mask):
    """Return what nobody else reads, as fp32."""
    return tl.load(places, mask=mask, other=0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _gathered(places, mask):
    """Return, as fp32, what the cache is to keep for others: all else is read or written once."""
    return tl.load(places, mask=mask, other=0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _put(places, totals, mask, ADDS: tl.constexpr):
    if ADDS:
        tl.atomic_add(places, totals, mask=mask, sem="relaxed")
    else:
        tl.store(places, totals, mask=mask, eviction_policy="evict_first")


@triton.jit
def _multiply_rows(
    out,
    dense,
    rows,
    indices,
    starts,
    n_filled,
    n_entries,
    n_columns,
    columns_per_part,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply the rows of one bag's entries in one part of the columns."""
    bag, part = tl.program_id(0), tl.program_id(1)
    end = n_entries if n_filled is None else tl.load(n_filled)
    first = tl.load(starts + bag).to(tl.int32)
    last = tl.load(starts + bag + 1, mask=bag + 1 < tl.num_programs(0), other=end).to(tl.int32)
    left = part * columns_per_part
    for begin in range(first, last, ENTRIES):
        entries = begin + tl.arange(0, ENTRIES)
        total = tl.zeros([ENTRIES, COLUMNS], dtype=tl.float32)
        for offset in range(0, columns_per_part, COLUMNS):
            columns = left + offset + tl.arange(0, COLUMNS)
            whole = tl.load(dense + bag.to(tl.int64) * n_columns + columns, mask=columns < n_columns, other=0)
            total += whole.to(tl.float32)[None, :] * gather(rows, indices, entries, last, columns, n_columns)
        tl.store(out + part.to(tl.int64) * n_entries + entries, tl.sum(total, axis=1), mask=entries < last)


@triton.jit
def gather(rows, indices, entries, last, columns, n_columns):
    """Return rows[indices[entries]] in some columns, as fp32; 0 outside."""
    row = tl.load(indices + entries, mask=entries < last, other=0).to(tl.int64)
    inside = (entries < last)[:, None] & (columns < n_columns)[None, :]
    return tl.load(rows + row[:, None] * n_columns + columns[None, :], mask=inside, other=0).to(tl.float32)
