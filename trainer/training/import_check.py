"""Checks an imported SAE's L0 and FVU on rows that should resemble its training rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainer.contract.runs.import_check import ImportCheck
from trainer.contract.wording import number
from trainer.sharing.base import SharedSae
from trainer.sharing.reading import with_input_bias, with_row_scale, without_input_bias
from trainer.training.learner import Learner

# 1,000 rows determine L0 to within a few percent, and take a second. Small batches save memory for large SAEs.
N_ROWS, _AT_ONCE = 1000, 100
# If L0 differs from the expected L0 by more than this factor, it must be wrong.
_FAR = 2.0
# Without an expected L0, report that activations are not sparse if both the fraction of active latents and the FVU
# exceed these values.
_DENSE, _POOR = 0.25, 0.5
# Suggest another interpretation of the files if it reduces the FVU to this fraction or less.
_BETTER = 0.5


def check(
    learner: Learner, shared: SharedSae, x: Tensor, y: Tensor, set_weights: Callable[[SharedSae], None]
) -> tuple[ImportCheck, list[str]]:
    """Measure an SAE on raw rows x [n, d_in] and their targets; return L0 and FVU, and reasons why they look wrong.

    `set_weights` copies weights into the learner. If the values look wrong, other interpretations of the files are
    tried. The weights of `shared` are restored at the end.
    """
    places = torch.linspace(0, len(x) - 1, min(N_ROWS, len(x))).long()
    x, y = x[places], (x if y is x else y)[places]
    found = _measured(learner, x, y)
    doubts = list(_doubts(found, shared))
    if doubts:
        doubts.append(_cause(learner, shared, x, y, found, set_weights))
    return found, doubts


@torch.no_grad()
def _measured(learner: Learner, x: Tensor, y: Tensor) -> ImportCheck:
    sae, error, active = learner.sae, 0.0, 0
    with learner.evaluating():
        for rows, targets in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
            output = sae(rows * sae.x_scale, targets * sae.y_scale)
            error += float((targets.double() - output.x_hat.double() / sae.y_scale).square().sum())
            active += int((output.acts.dense() > 0).sum())
    spread = float((y.double() - y.double().mean(0)).square().sum())
    fvu = error / spread if spread else float(error > 0)
    return ImportCheck(len(x), active / len(x), fvu if math.isfinite(fvu) else None)


def _doubts(found: ImportCheck, shared: SharedSae) -> Iterator[str]:
    expected = shared.l0 or shared.k
    if not found.l0:
        yield "no latent fires on these rows"
    elif expected and not expected / _FAR <= found.l0 <= expected * _FAR:
        yield f"L0 is {found.l0:.1f} on these rows, but {number(expected)} according to its files"
    elif not expected and found.l0 > _DENSE * shared.d_sae and _error(found) > _POOR:
        yield f"{found.l0:.0f} of {shared.d_sae:,} latents fire per row, which is not sparse"
    if found.fvu is None or found.fvu > 1:
        fvu = "not finite" if found.fvu is None else number(found.fvu)
        yield f"FVU is {fvu} on these rows: the mean of the rows would reconstruct them better than the SAE"


def _cause(
    learner: Learner,
    shared: SharedSae,
    x: Tensor,
    y: Tensor,
    found: ImportCheck,
    set_weights: Callable[[SharedSae], None],
) -> str:
    """Return a clause naming an interpretation of the files that fits the rows better, or other possible causes."""
    tried = {}
    for name, other in _other_ways(shared, x):
        set_weights(other)
        tried[name] = _measured(learner, x, y)
    set_weights(shared)
    name, best = min(tried.items(), key=lambda one: _error(one[1]))
    if _error(best) < min(1.0, _BETTER * _error(found)):
        return f"{name} its FVU is {number(_error(best))} and its L0 {best.l0:.1f}"
    return "the rows may be from another hook, model or layer, or be scaled differently from the SAE's training rows"


def _error(found: ImportCheck) -> float:
    return math.inf if found.fvu is None else found.fvu


def _other_ways(shared: SharedSae, x: Tensor) -> Iterator[tuple[str, SharedSae]]:
    factor = float(shared.d_in**0.5 / x.norm(dim=1).mean().clamp_min(1e-9))
    setting = f"with --config norm_scaling_factor={factor:.4g}, for rows scaled to a mean norm of √d_in,"
    yield setting, shared._replace(weights=with_row_scale(shared.weights, factor))
    if not shared.is_transcoder:
        encoder_of_x = with_input_bias(shared.weights)
        yield "read as an encoder of x, not of x − b_dec,", shared._replace(weights=encoder_of_x)
        if shared.form != "gated":
            encoder_of_rest = without_input_bias(shared.weights)
            yield "read as an encoder of x − b_dec, not of x,", shared._replace(weights=encoder_of_rest)
