"""Finds the layers between a language model's last block and its logits: at most one norm, and the unembedding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.extraction.hook_points import BlockList

# The magnitude of the values in the rows used to probe a norm, and a relative tolerance. If adding a constant to a row
# changes the norm's output by less than this tolerance, the norm subtracts the mean.
_SIZE, _ROUNDING = 64.0, 1e-2


class Unembedding(NamedTuple):
    """The final norm, if any, and the unembedding's weight [n_ids, d_model]."""

    norm: nn.Module | None
    weight: Tensor


def find_ending(model: Any, blocks: BlockList, read: Callable[[], object]) -> Unembedding | None:
    """Find the norm and the unembedding after the last block by recording inputs and outputs while `read` runs.

    Return None if there is more than one norm between the last block and the unembedding.
    """
    unembedding = model.get_output_embeddings()
    weight = getattr(unembedding, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    norms = [one for name, one in model.named_modules() if blocks.number(name) is None and _scales(one)]
    last = model.get_submodule(f"{blocks.path}.{blocks.n - 1}")
    with _flows([last, unembedding, *norms]) as flows:
        read()
    if not {last, unembedding} <= flows.keys():
        return None
    (_, residual), (logits_of, _) = flows[last], flows[unembedding]
    if _same(residual, logits_of):
        return Unembedding(None, weight)
    fitting = [one for one in norms if one in flows and _same(flows[one][0], residual)]
    return next((Unembedding(one, weight) for one in fitting if _same(flows[one][1], logits_of)), None)


def _scales(module: nn.Module) -> bool:
    """Return whether all parameters of a module have one value per dimension, as in a norm."""
    own = [*module.parameters(recurse=False)]
    return bool(own) and not [*module.children()] and all(one.ndim == 1 for one in own)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


@contextlib.contextmanager
def _flows(modules: list[nn.Module]) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Record the input and output of each module whenever the model runs in the `with` block."""
    flows: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def take(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        first = given[0] if given else named.get("hidden_states", next(iter(named.values()), None))
        came = output if isinstance(output, Tensor) else output[0]
        if isinstance(first, Tensor) and isinstance(came, Tensor):
            flows[module] = first.clone(), came.clone()

    handles = [module.register_forward_hook(take, with_kwargs=True) for module in modules]
    try:
        yield flows
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def folded(ending: Unembedding) -> Tensor:
    """Return the unembedding [d_model, n_ids] in fp32 with the final norm folded into it.

    Like `fold_ln` in TransformerLens, the result includes the norm's weight and its mean subtraction, if any. It does
    not include the division by the row's magnitude, which is undefined for a direction.
    """
    w_u = ending.weight.detach().float().T
    if ending.norm is None:
        return w_u
    weight, subtracts_mean = _of_norm(ending.norm, len(w_u), ending.weight)
    w_u = weight[:, None] * w_u
    return w_u - w_u.mean(0) if subtracts_mean else w_u


def _of_norm(norm: nn.Module, d: int, like: Tensor) -> tuple[Tensor, bool]:
    """Return a norm's weight [d], and whether the norm subtracts the mean.

    The norm is probed, because norm classes name their parameters differently. A norm scales a row of mean 0,
    multiplies it by the weight and adds the bias. The bias cancels in the difference between the outputs for a row and
    its negative.
    """
    row = torch.ones(d, dtype=like.dtype, device=like.device)
    row[1::2] = -1
    if d % 2:
        row[-3:] = torch.tensor([1, 1, -2]).to(row)
    # The row is so large that the epsilon with which the norm avoids a division by zero has no effect.
    row *= _SIZE
    up, down, moved = (norm(one[None])[0].float() for one in (row, -row, row + 3 * _SIZE))
    weight = (up - down) / 2 * row.float().square().mean().sqrt() / row.float()
    return weight, bool((moved - up).abs().max() < _ROUNDING * (1 + up.abs().max()))
