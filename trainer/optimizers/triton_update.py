"""Triton kernels for Adam's step, which read and write each latent's weights once.

A matrix is fp32 [n_latents, width] with contiguous rows, and each program handles one row. For unit-norm rows, the
kernels remove the gradient component along the row before the step, and normalise the row afterwards. Vectors, such as
biases, are split into parts of 1,024 values, one per program. In torch's fused Adam, parts have 65,536 values and take
0.07 ms each on an H200. Sums are in fp32 and are computed in a fixed order, since no two programs add to the same sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.optimizers.codecs import BLOCK
from trainer.optimizers.tiled import BY_COLUMN, BY_ROW, BY_STEP, Betas

# The maximum row width, limited by a program's registers, and the number of values per vectorised load.
_WIDEST, _VECTOR = 2**13, tl.constexpr(4)
# The number of vector elements per program, eight per thread.
_PART = 1024
# The number of row elements per thread, and the maximum number of warps per program (a warp on AMD has 64 threads).
_PER_THREAD, _MOST_WARPS = 8, 16
_BLOCK, _BY_STEP, _TINY = tl.constexpr(BLOCK), tl.constexpr(BY_STEP), tl.constexpr(2.0**-126)


class Matrix(NamedTuple):
    """A matrix to update: its weights and gradient [n_latents, width], and the moments in the codec's format.

    The codec's scales are not transposed: they have latents along `latent_dim`, like the SAE's matrix. `n_steps`
    (0-dim) includes this step; `lr` (0-dim) is the learning rate. `dots` are the dot products of rows and gradients if
    the rows have unit norm, otherwise None. The kernel writes a 16-bit copy of the weights to `narrow` (same shape).
    """

    weight: Tensor
    grad: Tensor
    moments: Mapping[str, Tensor]
    n_steps: Tensor
    lr: Tensor
    latent_dim: int
    dots: Tensor | None = None
    narrow: Tensor | None = None


class Vector(NamedTuple):
    """A vector to update: weights, gradient and moments, all fp32 [n]; for `n_steps` and `lr` see `Matrix`."""

    weight: Tensor
    grad: Tensor
    moments: Mapping[str, Tensor]
    n_steps: Tensor
    lr: Tensor


class Constants(NamedTuple):
    """Adam's constants, the gradient divisor and `found_inf` (both 0-dim fp32 on the device)."""

    betas: Betas
    divisor: Tensor
    found_inf: Tensor


def fits(width: int) -> bool:
    """Return whether a row fits into a program."""
    return width <= _WIDEST and width % _VECTOR.value == 0


def measure(
    grad: Tensor,
    unit_rows: Tensor | None,
    squares: Tensor,
    dots: Tensor | None,
    some_rows: Tensor | None = None,
    more_rows: Tensor | None = None,
) -> None:
    """Write the squared norm of each gradient row to `squares` [n].

    With `some_rows` and `more_rows` (row indices [m]), measure only these rows; an index of −1 is skipped. With
    `unit_rows`, also write the dot product of each gradient row and its unit row to `dots` [n]; `squares` then receives
    the squared norm of the orthogonal component only.
    """
    n_some = 0 if some_rows is None else len(some_rows)
    n_rows = len(grad) if some_rows is None else n_some + (0 if more_rows is None else len(more_rows))
    if n_rows:
        # Triton launches kernels on the current device, not necessarily on the tensors' device.
        with torch.cuda.device_of(grad):
            _measure_rows[n_rows,](grad, unit_rows, dots, squares, some_rows, more_rows, n_some, **_tile(grad.shape[1]))


def n_parts(n: int) -> int:
    """Return the number of programs for a vector of `n` values."""
    return -(-n // _PART)


def measure_vector(grad: Tensor, squares: Tensor) -> None:
    """Write the squared norm of each part of a vector's gradient [n] to `squares` [n_parts].

    If `squares` has only one element, write the total.
    """
    if n := len(grad):
        with torch.cuda.device_of(grad):
            _measure_part[len(squares),](grad, squares, n, **_part(n if len(squares) == 1 else _PART))


def step(matrix: Matrix, ids: Tensor, constants: Constants, follower: Matrix | None = None, share: float = 0.0) -> None:
    """Apply Adam's step to a matrix; change nothing if `found_inf` is 1.

    `ids` (int64 [n_latents]) determine the dither. A `follower` of the same shape is updated by Adam's step for its
    gradient, plus `share` times the change in the matrix.
    """
    n_rows, width = matrix.weight.shape
    followers = dict.fromkeys(_FOLLOWER) if follower is None else _arguments(follower, "follower_")
    if n_rows:
        with torch.cuda.device_of(matrix.weight):
            _step_rows[n_rows,](
                **_arguments(matrix, ""),
                **followers,
                dots=matrix.dots,
                share=share,
                ids=ids,
                **_numbers(constants),
                **_tile(width),
            )


def step_vector(vector: Vector, constants: Constants) -> None:
    """Apply Adam's step to a vector; change nothing if `found_inf` is 1."""
    if n := len(vector.weight):
        moments = vector.moments
        with torch.cuda.device_of(vector.weight):
            _step_part[n_parts(n),](
                vector.weight,
                vector.grad,
                vector.n_steps,
                vector.lr,
                moments["exp_avg"],
                moments["exp_avg_sq"],
                **_numbers(constants),
                n=n,
                **_part(_PART),
            )


def try_out(device: torch.device) -> None:
    """Run each kernel once, letting Triton errors propagate; raise `RuntimeError` if the results are wrong."""
    weight, grad = torch.eye(2, 16, device=device), torch.ones(2, 16, device=device)
    squares, dots, one = torch.empty(2, device=device), torch.empty(2, device=device), torch.ones((), device=device)
    parts = torch.empty(1, device=device, dtype=torch.float64)
    measure(grad, weight, squares, dots)
    measure_vector(grad[0], parts)
    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
    matrix = Matrix(weight, grad, moments, one, one, latent_dim=0, dots=dots)
    constants = Constants(Betas(0.9, 0.999, 1e-9), one, torch.zeros_like(one))
    step(matrix, torch.arange(2, device=device), constants)
    vector = Vector(torch.full((2,), 1.25, device=device), grad[0, :2], {name: dots * 0 for name in moments}, one, one)
    step_vector(vector, constants)
    measured = torch.allclose(squares, 15 * one) and bool(parts == 16)
    if not measured or not all(torch.allclose(w.abs(), one / 4, rtol=1e-4) for w in (weight, vector.weight)):
        raise RuntimeError("the kernels give wrong results")


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _numbers(constants: Constants) -> dict[str, Any]:
    """Return the arguments common to all step kernels."""
    betas = constants.betas
    return {
        "divisor": constants.divisor,
        "found_inf": constants.found_inf,
        "ln_beta1": _log(betas.beta1),
        "ln_beta2": _log(betas.beta2),
        "share1": 1 - betas.beta1,
        "share2": 1 - betas.beta2,
        "eps": betas.eps,
    }


def _part(n: int) -> dict[str, Any]:
    size = max(_PART, triton.next_power_of_2(n))
    return {"PART": size, "num_warps": min(size // (32 * _PER_THREAD), _MOST_WARPS), "enable_fp_fusion": True}


def _tile(width: int) -> dict[str, Any]:
    columns = max(BLOCK, triton.next_power_of_2(width))
    warps = min(columns // (32 * _PER_THREAD) or 1, _MOST_WARPS)
    # `enable_fp_fusion` is set explicitly, since it is no longer the default in Triton 3.10.
    return {"vectors": width // _VECTOR.value, "BLOCKS": columns // BLOCK, "num_warps": warps, "enable_fp_fusion": True}


def _arguments(matrix: Matrix, prefix: str) -> dict[str, Any]:
    """Return the kernel's arguments for a matrix; tensors that it both reads and writes have the prefix `inout_`."""
    moments, across = matrix.moments, 1 - matrix.latent_dim
    m, v, scale = moments["exp_avg"], moments["exp_avg_sq"], moments.get("exp_avg_scale")
    return {
        f"inout_{prefix}weight": matrix.weight,
        f"out_{prefix}narrow": None if matrix.narrow is None else _bits(matrix.narrow),
        f"{prefix}grad": matrix.grad,
        f"{prefix}n_steps": matrix.n_steps,
        f"{prefix}lr": matrix.lr,
        f"inout_{prefix}m": _bits(m),
        f"inout_{prefix}v": _bits(v),
        f"inout_{prefix}m_scale": scale,
        f"inout_{prefix}v_scale": moments.get("exp_avg_sq_scale"),
        f"{prefix}latent_stride": 0 if scale is None else scale.stride(matrix.latent_dim),
        # A stride of 0 means that all blocks share a single scale.
        f"{prefix}block_stride": 0 if scale is None or scale.shape[across] == 1 else scale.stride(across),
        f"{prefix}BY_LATENT": BY_COLUMN if matrix.latent_dim else BY_ROW,
        f"{prefix}BY_WEIGHT": BY_ROW if matrix.latent_dim else BY_COLUMN,
        f"{prefix}ONE_SCALE": scale is not None and scale.shape[across] == 1,
    }


def _bits(moment: Tensor) -> Tensor:
    return moment.view(torch.int16) if moment.dtype == torch.bfloat16 else moment


@triton.jit
def _measure_rows(grad, unit_rows, out_dots, out_squares, some_rows, more_rows, n_some, vectors, BLOCKS: tl.constexpr):
    """Compute a gradient row's dot product with its unit row, and its sum of squares; skip row index -1."""
    row, width = tl.program_id(0), vectors * _VECTOR
    if more_rows is not None:
        is_more = row >= n_some
        more = tl.load(more_rows + row - n_some, mask=is_more, other=0)
        row = tl.where(is_more, more, tl.load(some_rows + row, mask=row < n_some, other=0))
    elif some_rows is not None:
        row = tl.load(some_rows + row)
    columns = tl.arange(0, BLOCKS * _BLOCK)
    start, inside = row.to(tl.int64) * width, (columns < width) & (row >= 0)
    g = tl.load(grad + start + columns, mask=inside, other=0)
    if unit_rows is not None:
        unit = tl.load(unit_rows + start + columns, mask=inside, other=0)
        dot = tl.sum(g * unit, axis=0)
        tl.store(out_dots + row, dot, mask=row >= 0)
        # Subtract before squaring: a difference of two squares would be imprecise if the result is small.
        g -= dot * unit
    tl.store(out_squares + row, tl.sum(g * g, axis=0), mask=row >= 0)


@triton.jit
def _measure_part(grad, out_squares, n, PART: tl.constexpr):
    """Compute the squared norm of one part of a vector's gradient."""
    part = tl.program_id(0)
    at = part * PART + tl.arange(0, PART)
    g = tl.load(grad + at, mask=at < n, other=0)
    tl.store(out_squares + part, tl.sum(g * g, axis=0))


@triton.jit
def _step_rows(
    inout_weight, out_narrow, grad, dots, n_steps, lr,
    inout_m, inout_v, inout_m_scale, inout_v_scale, latent_stride, block_stride,
    inout_follower_weight, out_follower_narrow, follower_grad, follower_n_steps, follower_lr,
    inout_follower_m, inout_follower_v, inout_follower_m_scale, inout_follower_v_scale,
    follower_latent_stride, follower_block_stride,
    share, ids, divisor, found_inf, ln_beta1, ln_beta2, share1, share2, eps, vectors,
    BY_LATENT: tl.constexpr, BY_WEIGHT: tl.constexpr, ONE_SCALE: tl.constexpr,
    follower_BY_LATENT: tl.constexpr, follower_BY_WEIGHT: tl.constexpr, follower_ONE_SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Update one row of a matrix and the same row of its follower."""
    if tl.load(found_inf) == 0:
        row, width = tl.program_id(0).to(tl.int64), vectors * _VECTOR
        scale = tl.load(divisor)
        latent = tl.load(ids + row) & 0xFFFF
        columns = (tl.arange(0, BLOCKS) * _BLOCK)[:, None] + tl.arange(0, _BLOCK)[None, :]
        # The row's offset needs 64 bits, but the columns need only 32, so add them to the pointers separately.
        start, inside = row * width, columns < width

        weight = tl.load(inout_weight + start + columns, mask=inside, other=0)
        g = tl.load(grad + start + columns, mask=inside, other=0)
        if dots is not None:
            g -= tl.load(dots + row) * weight
        now = tl.load(n_steps)
        dither = _dither(latent, now, columns, BY_LATENT, BY_WEIGHT)
        scales_at = row * latent_stride + (tl.arange(0, BLOCKS) * block_stride)[:, None]
        change = _change(
            g / scale, inout_m, inout_v, inout_m_scale, inout_v_scale, scales_at, start, columns, inside, dither, now,
            lr, ln_beta1, ln_beta2, share1, share2, eps, ONE_SCALE,
        )  # fmt: skip
        stepped = weight - change
        if dots is not None:
            stepped /= tl.sqrt(tl.sum(tl.sum(stepped * stepped, axis=1), axis=0))
        tl.store(inout_weight + start + columns, stepped, mask=inside)
        _store_narrow(out_narrow, start, columns, stepped, inside)

        if inout_follower_weight is not None:
            way = share * (stepped - weight)
            g = tl.load(follower_grad + start + columns, mask=inside, other=0)
            now = tl.load(follower_n_steps)
            dither = _dither(latent, now, columns, follower_BY_LATENT, follower_BY_WEIGHT)
            scales_at = row * follower_latent_stride + (tl.arange(0, BLOCKS) * follower_block_stride)[:, None]
            change = _change(
                g / scale, inout_follower_m, inout_follower_v, inout_follower_m_scale, inout_follower_v_scale,
                scales_at, start, columns, inside, dither, now,
                follower_lr, ln_beta1, ln_beta2, share1, share2, eps, follower_ONE_SCALE,
            )  # fmt: skip
            follower = tl.load(inout_follower_weight + start + columns, mask=inside, other=0)
            follower += way - change
            tl.store(inout_follower_weight + start + columns, follower, mask=inside)
            _store_narrow(out_follower_narrow, start, columns, follower, inside)


@triton.jit
def _step_part(
    inout_weight, grad, n_steps, lr, inout_m, inout_v,
    divisor, found_inf, ln_beta1, ln_beta2, share1, share2, eps, n, PART: tl.constexpr,
):  # fmt: skip
    """Apply Adam's step to one part of a vector."""
    if tl.load(found_inf) == 0:
        start, columns = tl.program_id(0) * PART, tl.arange(0, PART)
        inside = start + columns < n
        g = tl.load(grad + start + columns, mask=inside, other=0) / tl.load(divisor)
        change = _change(
            g, inout_m, inout_v, None, None, None, start, columns, inside, None, tl.load(n_steps),
            lr, ln_beta1, ln_beta2, share1, share2, eps, False,
        )  # fmt: skip
        weight = tl.load(inout_weight + start + columns, mask=inside, other=0)
        tl.store(inout_weight + start + columns, weight - change, mask=inside)


@triton.jit
def _store_narrow(out_narrow, start, columns, weights, inside):
    """Store weights in 16 bits, rounded to nearest as torch does; bf16 is stored through an int16 pointer."""
    if out_narrow is not None:
        if out_narrow.dtype.element_ty == tl.int16:
            weights = _upper_half(weights, _to_nearest(weights))
        tl.store(out_narrow + start + columns, weights.to(out_narrow.dtype.element_ty), mask=inside)


@triton.jit
def _change(
    g, inout_m, inout_v, inout_m_scale, inout_v_scale, scales_at, start, columns, inside, dither, n_steps,
    lr, ln_beta1, ln_beta2, share1, share2, eps, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    """Return the amount subtracted from the weights by Kingma & Ba's algorithm 1, and store the encoded moments."""
    m = tl.load(inout_m + start + columns, mask=inside, other=0)
    v = tl.load(inout_v + start + columns, mask=inside, other=0)
    if inout_m_scale is not None:
        # Blocks past the end of the row have no scale.
        has_scale = tl.max(inside.to(tl.int32), axis=1)[:, None] != 0
        root, fourth_root = m.to(tl.float32) / 127, v.to(tl.float32) / 255
        m = root * tl.abs(root) * tl.load(inout_m_scale + scales_at, mask=has_scale, other=0)
        square = fourth_root * fourth_root
        v = square * square * tl.load(inout_v_scale + scales_at, mask=has_scale, other=0)
    elif inout_v.dtype.element_ty == tl.int16:
        m, v = _of_upper_half(m), _of_upper_half(v)
    m += (g - m) * share1
    v += (g * g - v) * share2
    rate, root2 = tl.load(lr) / _rest_of_power(ln_beta1, n_steps), tl.sqrt(_rest_of_power(ln_beta2, n_steps))
    change = rate * m / (tl.sqrt(v) / root2 + eps)
    if inout_m_scale is not None:
        up = dither * (1 / 65536)
        size = tl.abs(m)
        largest = _largest(size, ONE_SCALE)
        tl.store(inout_m_scale + scales_at, largest, mask=has_scale)
        # The conversion to integers truncates towards 0. A quotient can slightly exceed 1, so take the minimum.
        code = tl.minimum(tl.sqrt(size / tl.maximum(largest, _TINY)) * 127 + up, 127)
        tl.store(inout_m + start + columns, tl.where(m < 0, -code, code).to(tl.int8), mask=inside)
        largest = _largest(v, ONE_SCALE)
        tl.store(inout_v_scale + scales_at, largest, mask=has_scale)
        code = tl.sqrt(tl.sqrt(v / tl.maximum(largest, _TINY))) * 255 + up
        # A code of 0 would decode to 0, and the step divides by the square root of the second moment.
        tl.store(inout_v + start + columns, tl.minimum(tl.maximum(code, 1), 255).to(tl.uint8), mask=inside)
    elif inout_v.dtype.element_ty == tl.int16:
        tl.store(inout_m + start + columns, _upper_half(m, _to_nearest(m)), mask=inside)
        tl.store(inout_v + start + columns, _upper_half(v, dither), mask=inside)
    else:
        tl.store(inout_m + start + columns, m, mask=inside)
        tl.store(inout_v + start + columns, v, mask=inside)
    return change


@triton.jit
def _of_upper_half(bits):
    """Convert the bits of bf16 numbers to fp32; GPUs before sm_80 have no bf16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _upper_half(numbers, rounding):
    return ((numbers.to(tl.int32, bitcast=True) + rounding) >> 16).to(tl.int16)


@triton.jit
def _to_nearest(numbers):
    """Return the increment that makes truncation round to nearest, ties to even."""
    return 0x7FFF + ((numbers.to(tl.int32, bitcast=True) >> 16) & 1)


@triton.jit
def _dither(latent, n_steps, columns, BY_LATENT: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """Return the dither for one latent's weights, the same as in `tiled`."""
    of_latent = ((latent * BY_LATENT + n_steps.to(tl.int64) * _BY_STEP) & 0xFFFF).to(tl.int32)
    return (of_latent + columns * BY_WEIGHT) & 0xFFFF


@triton.jit
def _largest(sizes, ONE_SCALE: tl.constexpr):
    """Return the maximum of each block [BLOCKS, 1] or, with ONE_SCALE, the maximum of the row for every block."""
    of_blocks = tl.max(sizes, axis=1)
    if ONE_SCALE:
        of_blocks = tl.zeros_like(of_blocks) + tl.max(of_blocks, axis=0)
    return of_blocks[:, None]


@triton.jit
def _rest_of_power(ln_beta, n):
    """Return 1 - beta^n to full fp32 precision; subtracting the power from 1 would lose precision for small n."""
    x = ln_beta * n
    series = 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    return tl.where(x > -0.5, -x * series, 1 - tl.exp(x))


# Names of the kernel arguments for a follower.
_FOLLOWER = tuple(name for name in _step_rows.arg_names if "follower" in name)
