"""Adam's step tile by tile, so that moments stored in less than fp32 are never unpacked as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.optimizers.base import LatentAxis, Now
from trainer.optimizers.codecs import BLOCK, CODECS, Codec, State
from trainer.optimizers.compiled import Compiled

# Weights in a tile: on a CPU its twenty passes stay in the cache. A GPU steps by rows what Triton's kernels take: all
# but a skip connection, and latents of more than 8,192 weights or of no multiple of four. Where Triton fails nothing is
# compiled either, and a tile takes 200 MB while it is stepped.
_TILE = {"cpu": 2**16, "cuda": 2**23}
# Modulo 2^16 the multiples of these are spread evenly, so that the roundings of a weight are over its steps: 2^16
# over the plastic number and over its square (Roberts' R2 sequence), and over the golden ratio.
BY_STEP, BY_COLUMN, BY_ROW = 49471, 37345, 40503


class Betas(NamedTuple):
    """Adam's constants."""

    beta1: float
    beta2: float
    eps: float


def betas_of(group: dict[str, Any]) -> Betas:
    """Return the constants of a group of torch's Adam."""
    beta1, beta2 = group["betas"]
    return Betas(beta1, beta2, group["eps"])


@torch.no_grad()
def adam_step(
    weight: Tensor,
    grad: Tensor,
    state: State,
    codec: str,
    betas: Betas,
    now: Now,
    latents: LatentAxis | None = None,
) -> None:
    """Step one parameter, whose moments `state` holds from the first step on.

    A matrix's moments are stored as `codec` says, a vector's in fp32: all vectors together are a thousandth of an SAE.
    Without `latents` the latents lie along the longer dimension.
    """
    how = CODECS[codec if weight.dim() > 1 else "fp32"]
    axis = latents if latents and weight.dim() > 1 else _longer(_as_matrix(weight))
    dim = 1 - axis.dim
    if not state:
        state.update(step=weight.new_zeros(()), **how.new(weight, dim))
    step = state["step"] + 1
    whole, gradient = _as_matrix(weight), _as_matrix(grad)
    moments = {name: _as_matrix(moment) for name, moment in state.items() if name != "step"}
    correction1, correction2 = 1 - betas.beta1 ** step.double(), 1 - betas.beta2 ** step.double()
    # Computed once: compiled into a kernel, powers in float64 would be taken for every weight.
    rates = (~now.skips * now.lr / correction1).float(), correction2.sqrt().float()
    by_row, by_column = _dithers(whole, step, now.skips, axis)
    for rows, columns in _tiles(whole, dim):
        tile = {name: _part(moment, whole.shape, rows, columns) for name, moment in moments.items()}
        dithers = by_row[rows], by_column[columns]
        _update(whole[rows, columns], gradient[rows, columns], tile, dithers, rates, betas, now, how, dim)
    state["step"].copy_(torch.where(now.skips, state["step"], step))


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() > 1 else tensor[None]


def _tiles(matrix: Tensor, dim: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of each tile; a tile holds whole blocks along `dim`."""
    if not matrix.numel():
        # A rank may have no part in a dictionary that is smaller than their number.
        return
    n_rows, n_columns = matrix.shape
    size = _TILE[matrix.device.type]
    height, width = (BLOCK, max(1, size // BLOCK)) if dim == 0 else (max(1, size // n_columns), n_columns)
    for row in range(0, n_rows, height):
        for column in range(0, n_columns, width):
            yield slice(row, row + height), slice(column, column + width)


def _part(stored: Tensor, shape: torch.Size, rows: slice, columns: slice) -> Tensor:
    """Return a tile's part of a moment, or of its scales: one for every block of rows, or one for every row."""
    if stored.shape == shape:
        return stored[rows, columns]
    return stored[rows] if len(stored) == shape[0] else stored[rows.start // BLOCK, columns][None]


def _longer(matrix: Tensor) -> LatentAxis:
    dim = 1 if matrix.shape[0] < matrix.shape[1] else 0
    return LatentAxis(dim, torch.arange(matrix.shape[dim], device=matrix.device))


def _dithers(matrix: Tensor, step: Tensor, skips: Tensor, latents: LatentAxis) -> tuple[Tensor, Tensor]:
    """Return a column and a row of int32 whose sums modulo 2^16 are a step's dither; 2^15 throughout if it is skipped.

    A latent's dither goes by its number in the whole SAE, so that it does not depend on which rank holds it.
    """
    numbers = [torch.arange(size, device=matrix.device) for size in matrix.shape]
    numbers[latents.dim] = latents.ids
    rows = numbers[0][:, None] * BY_ROW + step.long() * BY_STEP
    columns = numbers[1] * BY_COLUMN
    rows, columns = torch.where(skips, 2**15, rows), torch.where(skips, 0, columns)
    return (rows & 0xFFFF).int(), (columns & 0xFFFF).int()


@Compiled
def _update(
    weight: Tensor,
    grad: Tensor,
    state: State,
    dithers: tuple[Tensor, Tensor],
    rates: tuple[Tensor, Tensor],
    betas: Betas,
    now: Now,
    codec: Codec,
    dim: int,
) -> None:
    """Apply Kingma & Ba's algorithm 1 in place; a step that is skipped adds 0 to everything.

    `rates` are the learning rate by the first moment's correction, and the root of the second's.
    """
    beta1, beta2, eps = betas
    taken, grad = ~now.skips, now.gradient(grad)
    m, v = codec.read(state)
    m.lerp_(grad, taken * (1 - beta1))
    v.lerp_(grad.square_(), taken * (1 - beta2))
    rate, root2 = rates
    weight.addcdiv_(m * rate, v.sqrt().div_(root2).add_(eps), value=-1)
    codec.write(state, m, v, dim, (dithers[0] + dithers[1]) & 0xFFFF)
