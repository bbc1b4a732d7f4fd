"""Adam's step, tile by tile, so that the compressed moments are unpacked for only one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.optimizers.base import LatentAxis, Now
from trainer.optimizers.codecs import BLOCK, CODECS, Codec, State
from trainer.optimizers.compiled import Compiled

# The number of weights per tile. On CPU, the twenty passes over a tile stay in the cache. On a GPU, the Triton row
# kernels update most weights. Tiles are used for skip connections, for latents with more than 8,192 weights or a weight
# count not divisible by four, and if Triton fails. Without Triton, the step is not compiled either, and needs 200 MB of
# memory per tile.
_TILE = {"cpu": 2**16, "cuda": 2**23}
# Multiples of these numbers are evenly distributed modulo 2^16, so a weight's dithers cover their range evenly. The
# numbers are 2^16 divided by the plastic number, by its square (Roberts' R2 sequence), and by the golden ratio.
BY_STEP, BY_COLUMN, BY_ROW = 49471, 37345, 40503


class Betas(NamedTuple):
    """Adam's constants."""

    beta1: float
    beta2: float
    eps: float


def betas_of(group: dict[str, Any]) -> Betas:
    """Return the constants from a torch Adam parameter group."""
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
    """Update one parameter; the first step creates its moments in `state`.

    The moments of matrices are stored in the format `codec`. The moments of vectors stay in fp32, since vectors make up
    only a thousandth of an SAE's weights. Without `latents`, the longer dimension is assumed to index latents.
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
    # Compute the float64 powers here, since the compiled function would compute them for every weight.
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
    """Yield the rows and columns of each tile; tiles never split a block along `dim`."""
    if not matrix.numel():
        # A rank may have no latents if there are more ranks than latents.
        return
    n_rows, n_columns = matrix.shape
    size = _TILE[matrix.device.type]
    height, width = (BLOCK, max(1, size // BLOCK)) if dim == 0 else (max(1, size // n_columns), n_columns)
    for row in range(0, n_rows, height):
        for column in range(0, n_columns, width):
            yield slice(row, row + height), slice(column, column + width)


def _part(stored: Tensor, shape: torch.Size, rows: slice, columns: slice) -> Tensor:
    """Return a tile's slice of a moment or of its scales (one per block of rows or per row)."""
    if stored.shape == shape:
        return stored[rows, columns]
    return stored[rows] if len(stored) == shape[0] else stored[rows.start // BLOCK, columns][None]


def _longer(matrix: Tensor) -> LatentAxis:
    dim = 1 if matrix.shape[0] < matrix.shape[1] else 0
    return LatentAxis(dim, torch.arange(matrix.shape[dim], device=matrix.device))


def _dithers(matrix: Tensor, step: Tensor, skips: Tensor, latents: LatentAxis) -> tuple[Tensor, Tensor]:
    """Return int32 row offsets [n_rows, 1] and column offsets [n_columns]; the dither is their sum modulo 2^16.

    If the step is skipped, the dither is 2^15 everywhere. The dither is computed from each latent's index in the full
    SAE, so it does not depend on which rank holds the latent.
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
    """Apply Kingma & Ba's algorithm 1 in place; in a skipped step, all increments are 0.

    `rates` are the learning rate divided by the first moment's bias correction, and the square root of the second
    moment's bias correction.
    """
    beta1, beta2, eps = betas
    taken, grad = ~now.skips, now.gradient(grad)
    m, v = codec.read(state)
    m.lerp_(grad, taken * (1 - beta1))
    v.lerp_(grad.square_(), taken * (1 - beta2))
    rate, root2 = rates
    weight.addcdiv_(m * rate, v.sqrt().div_(root2).add_(eps), value=-1)
    codec.write(state, m, v, dim, (dithers[0] + dithers[1]) & 0xFFFF)
