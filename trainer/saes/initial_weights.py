"""Sets an SAE's initial weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.settings.job import SaeSettings
from trainer.parallel.latents import Latents
from trainer.saes.base import Sae

# The largest allowed mean distance between the rows and their mean. It is limited because the sum of d squares must
# stay below fp32's maximum, 3e38.
LARGEST_SPREAD = 1e15
# Below this magnitude, a value's square loses precision in fp32.
SMALLEST_VALUE = 1e-18
# The number of random values generated at once. Generating all values at once for 2^20 latents of width 4,096 would
# take 16 GiB of host memory per rank.
_AT_ONCE = 2**24
# PyTorch generates normal values in groups of 16, so blocks whose row count is a multiple of 16 yield the same values
# as a single call.
_DRAWN_BY = 16


@torch.no_grad()
def initialise(
    sae: Sae,
    x: Tensor,
    y: Tensor,
    settings: SaeSettings,
    seed: int,
    dimensions: tuple[Tensor, Tensor] | None = None,
    parts: Sequence[int] = (),
) -> None:
    """Set scales, means and weights from sample rows x [n, d_in] and their targets y [n, d_out].

    For an SAE that is not a transcoder, the targets are x itself. `dimensions` contains the scale of each input
    dimension [d_in] and of each target dimension [d_out]; a scale of 0 leaves the dimension out. `parts` contains the
    widths of the parts of a crosscoder's rows. Raise `UserError` if the rows contain nothing to learn.
    """
    if dimensions is not None and sae.part_widths is not None:
        sae.part_widths.copy_(torch.tensor(parts))
        if settings.normalize == "mean_norm":
            dimensions = (scales := _part_scales(x, dimensions[0], parts), scales)
    if dimensions is not None and sae.dropped_mean is not None:
        sae.x_scale.copy_(dimensions[0])
        sae.y_scale.copy_(dimensions[1])
        sae.dropped_mean.copy_(y.mean(dim=0) * (sae.y_scale == 0))
        x, y = x * sae.x_scale, y * sae.y_scale
    _refuse_without_spread(y, "data.target_path" if sae.is_transcoder else "data.path")
    if x is not y:
        _refuse_without_spread(x, "data.path")
    generator = torch.Generator().manual_seed(seed)
    if settings.normalize == "mean_norm":
        is_one, of_x = x is y, unit_scale(x)
        of_y = of_x if is_one else unit_scale(y)
        sae.x_scale.mul_(of_x)
        sae.y_scale.mul_(of_y)
        x = x * of_x
        y = x if is_one else y * of_y
    _set_weights(sae, settings, generator)
    sae.y_mean.copy_(y.mean(dim=0))
    sae.y_variance.copy_((y - sae.y_mean).square().sum(dim=1).mean())
    sae.b_dec.copy_(_centre(y, settings.b_dec_init))
    if sae.is_transcoder:
        sae.x_mean.copy_(_centre(x, settings.b_dec_init))
    sae.calibrate(x)


def unit_scale(x: Tensor) -> Tensor:
    """Return the factor, 0-dim, that scales the mean distance of x [n, d] from its mean to √d.

    Every dimension then varies by about 1. Anthropic's April 2024 update scales the mean norm instead, but a mean far
    from 0, as in residual streams, then hides the spread that the SAE should explain. A few tokens with very large
    norms affect a mean of norms less than a mean of squares.
    """
    spread = (x - x.mean(dim=0)).norm(dim=1).mean()
    scale: Tensor = torch.tensor(x.shape[1] ** 0.5, device=x.device) / spread
    return scale


def _part_scales(x: Tensor, dimensions: Tensor, parts: Sequence[int]) -> Tensor:
    """Return the scale of each dimension [d_in], multiplied by a scale for its part, so that all parts vary alike.

    With a common scale, the part with the largest norms determines all latents: with layers 3 and 27 of SmolLM2, whose
    norms are 80 and 667, the FVU of layer 3 is 1.09 instead of 0.22.
    """
    scaled = (x * dimensions).split(tuple(parts), dim=1)
    for part in scaled:
        _refuse_without_spread(part, "data.path")
    return dimensions * torch.cat([unit_scale(part).expand(part.shape[1]) for part in scaled])


def _refuse_without_spread(x: Tensor, path: str) -> None:
    size = x.norm(dim=1).mean()
    spread = (x - x.mean(dim=0)).norm(dim=1).mean()
    if not spread <= LARGEST_SPREAD:
        raise UserError(f"{path}: activations of size {float(size):.2g} are too large for fp32; scale them down")
    if 0 < (largest := max(map(abs, (float(value) for value in x.aminmax())))) < SMALLEST_VALUE:
        raise UserError(f"{path}: values of at most {largest:.2g} are too small for fp32; scale them up")
    # If all rows are equal, the spread is pure rounding error, about 1e-6 times the size.
    if spread <= 1e-5 * size:
        raise UserError(f"{path}: all activations are the same, so there is nothing to learn; extract them again")


def _set_weights(sae: Sae, settings: SaeSettings, generator: torch.Generator) -> None:
    """Set the decoder to random unit vectors, and the encoder to scaled copies of these or of other unit vectors."""
    _draw_unit_rows(sae.W_dec, sae.latents, generator)
    directions: Tensor = sae.W_dec
    if settings.encoder_init != "tied" or sae.is_transcoder:
        directions = torch.empty_like(sae.W_enc.T)
        _draw_unit_rows(directions, sae.latents, generator)
    scale = sae.traits.encoder_scale if settings.encoder_scale == "auto" else settings.encoder_scale
    sae.W_enc.copy_(directions.T).mul_(scale)
    if sae.dropped_mean is not None:
        # Set the weights of left-out dimensions to 0. These weights stay 0, since the inputs and errors in these
        # dimensions are 0.
        sae.W_dec.mul_(sae.y_scale > 0)
        sae.normalise_decoder()
        sae.W_enc.mul_((sae.x_scale > 0)[:, None])


def _draw_unit_rows(own: Tensor, latents: Latents, generator: torch.Generator) -> None:
    """Set the rows of this rank's latents, `own` [n_own, d], to random unit vectors.

    Every rank generates the rows of all latents, block by block, and keeps its own rows, so that the result does not
    depend on how the latents are sharded.
    """
    ids, d = latents.own, own.shape[1]
    n_rows = max(_DRAWN_BY, _AT_ONCE // d // _DRAWN_BY * _DRAWN_BY)
    first = 0
    while first < latents.n_total:
        # The last block includes any remainder too small for a separate block.
        left = latents.n_total - first
        count = left if left < n_rows + _DRAWN_BY else n_rows
        rows = torch.nn.functional.normalize(torch.randn(count, d, generator=generator), dim=1)
        begin, end = torch.searchsorted(ids, torch.tensor([first, first + count])).tolist()
        own[begin:end] = rows if len(rows) == end - begin else rows[ids[begin:end] - first]
        first += count


def _centre(points: Tensor, how: str) -> Tensor:
    if how == "geometric_median":
        return geometric_median(points)
    return points.mean(dim=0) if how == "mean" else torch.zeros_like(points[0])


def geometric_median(points: Tensor, max_iterations: int = 100, tolerance: float = 1e-5) -> Tensor:
    """Return the point [d_in] with the smallest mean distance to `points` [n, d_in], found with Weiszfeld's algorithm.

    Unlike the mean, this point is not dominated by a few tokens with very large norms.
    """
    median = points.mean(dim=0)
    for _ in range(max_iterations):
        weights = 1 / (points - median).norm(dim=1).clamp_min(1e-12)
        moved = weights @ points / weights.sum()
        step, median = (moved - median).norm(), moved
        if step <= tolerance * median.norm():
            break
    return median
