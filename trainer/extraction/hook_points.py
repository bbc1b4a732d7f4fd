"""Finds each hook's module, and reads or replaces the module's input or output."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.contract.errors import UserError
from trainer.contract.settings.declare import show
from trainer.contract.settings.hooks import POST_NORM, Hook

_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "temporal_block")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "mlp_block")

Taken = Callable[[int, Tensor], None]


class HookPoint(NamedTuple):
    """A module's path, and whether the module's input or output is read."""

    path: str
    of_input: bool


class BlockList(NamedTuple):
    """A model's blocks: the path of the `ModuleList` that contains them, and the number of blocks."""

    path: str
    n: int

    def number(self, path: str) -> int | None:
        """Return the index of the block containing a module, or None for a module outside the blocks."""
        match = re.match(rf"{re.escape(self.path)}\.(\d+)(\.|$)", path)
        return int(match[1]) if match else None


def find_blocks(model: nn.Module) -> BlockList:
    """Return a model's list of blocks: the longest `ModuleList` whose modules all have the same class.

    Lists inside a block are ignored, because a block may have more experts than the model has blocks. Raise `UserError`
    if the model has no such list.
    """
    lists = [
        BlockList(path, len(module))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(one) for one in module}) == 1
    ]
    if not lists:
        raise UserError("model.hooks: the model has no list of blocks; give the paths of modules")
    outermost = [inner for inner in lists if not any(inner.path.startswith(f"{outer.path}.") for outer in lists)]
    return max(outermost, key=lambda blocks: blocks.n)


def find_point(model: nn.Module, blocks: BlockList, hook: Hook) -> HookPoint:
    """Return the module whose input or output a hook reads; raise `UserError` if the model has no such module."""
    if hook.path:
        paths = dict(model.named_modules())
        # A model with an unembedding contains its base model as a submodule, so the path may need a prefix.
        nested = f"{getattr(model, 'base_model_prefix', '')}.{hook.path}"
        if hook.path not in paths and nested not in paths:
            raise UserError(f"model.hooks: the model has no module {show(hook.path)}; it has {_examples(model)}")
        return HookPoint(hook.path if hook.path in paths else nested, of_input=False)
    if hook.layer >= blocks.n:
        raise UserError(f"model.hooks: {hook.name}: the model has blocks 0 to {blocks.n - 1}")
    path = f"{blocks.path}.{hook.layer}"
    if hook.site in ("resid_pre", "resid_post"):
        return HookPoint(path, of_input=hook.site == "resid_pre")
    block = model.get_submodule(path)
    inside = _branch(block, hook.site)
    if inside is None:
        children = ", ".join(name for name, _ in block.named_children())
        message = f"the blocks of this model have no {hook.site}; give the path of a module in {path}: {children}"
        raise UserError(f"model.hooks: {hook.name}: {message}")
    return HookPoint(f"{path}.{inside}", of_input=hook.site == "mlp_in")


def _branch(block: nn.Module, site: str) -> str | None:
    """Return the block-relative path of the module whose input or output is the site, or None if there is none.

    `attn_out` and `mlp_out` are the tensors added to the residual stream. If the block applies a norm before this
    addition, they are the norm's outputs.
    """
    children = dict(block.named_children())
    if "post_feedforward_layernorm" in children and site in ("attn_out", "mlp_out"):
        return "post_attention_layernorm" if site == "attn_out" else "post_feedforward_layernorm"
    # BERT's blocks have no single module for the MLP, and they add the residual inside `output`.
    if _is_berts(block):
        return {"attn_out": "attention.output.dense", "mlp_in": "intermediate", "mlp_out": "output.dense"}[site]
    names = _ATTENTION if site == "attn_out" else _MLP
    return next((name for name in names if name in children), None)


def _is_berts(block: nn.Module) -> bool:
    return {"attention", "intermediate", "output"} <= {name for name, _ in block.named_children()}


def name_of(model: nn.Module, blocks: BlockList, hook: Hook) -> str:
    """Return the TransformerLens name for a hook in this model, or our own name if TransformerLens has none."""
    if hook.site == "resid_post" and _is_berts(model.get_submodule(f"{blocks.path}.{hook.layer}")):
        return f"blocks.{hook.layer}.{POST_NORM}"
    return hook.transformer_lens or hook.name


def output_paths(model: nn.Module, points: Sequence[HookPoint], read: Callable[[], object]) -> list[str | None]:
    """Return, for each point, the path of a module whose output is the tensor at that point, or None if none exists.

    `read` must run the model. It is called only if a point is a module's input, to find the module that produces that
    input.
    """
    paths: list[str | None] = [None if point.of_input else point.path for point in points]
    inputs = [number for number, point in enumerate(points) if point.of_input]
    given: list[tuple[str, Any]] = []

    def note(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, __, output: given.append((path, output[0] if isinstance(output, tuple) and output else output))

    def look(number: int, tensor: Tensor) -> None:
        paths[inputs[number]] = next((path for path, output in reversed(given) if output is tensor), None)

    if inputs:
        handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules() if path]
        try:
            with taking(model, [points[number] for number in inputs], look):
                read()
        finally:
            for handle in handles:
                handle.remove()
    return paths


@contextlib.contextmanager
def taking(model: nn.Module, points: Sequence[HookPoint], take: Taken) -> Iterator[None]:
    """Call `take(number, tensor)` with the tensor at each point whenever the model runs in the `with` block.

    The model continues with the same tensor, and may modify it once `take` has returned.
    """
    handles = [_watch(model.get_submodule(point.path), point, number, take) for number, point in enumerate(points)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(module: nn.Module, point: HookPoint, number: int, take: Taken) -> Any:
    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(number, arguments[0] if arguments else named["hidden_states"])

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        take(number, output if isinstance(output, Tensor) else output[0])

    return (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if point.of_input
        else module.register_forward_hook(after)
    )


@contextlib.contextmanager
def replacing(model: nn.Module, point: HookPoint, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the tensor at a point with `change(tensor)` whenever the model runs in the `with` block."""

    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), named
        return arguments, named | {"hidden_states": change(named["hidden_states"])}

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    module = model.get_submodule(point.path)
    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if point.of_input
        else module.register_forward_hook(after)
    )
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def skipping(model: nn.Module, blocks: BlockList, n: int, read: Callable[[], object]) -> Iterator[None]:
    """Skip the first `n` blocks whenever the model runs in the `with` block.

    They return what the last of them returns while `read` runs the model, so the model must run on the same batch.
    """
    skipped = [model.get_submodule(f"{blocks.path}.{number}") for number in range(n)]
    # Other libraries may have replaced a block's `forward`, too.
    own = [vars(block).get("forward") for block in skipped]
    outputs: list[Any] = []

    def record(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        outputs.append(output)
        raise _Recorded

    if skipped:
        handle = skipped[-1].register_forward_hook(record)
        try:
            with contextlib.suppress(_Recorded):
                read()
        finally:
            handle.remove()
    for block in skipped if outputs else []:
        block.forward = lambda *_, **__: _copied(outputs[0])
    try:
        yield
    finally:
        for block, forward in zip(skipped, own, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


class _Recorded(Exception):
    """Raised to end a forward pass early, once the output of the last skipped block is known."""


def _copied(output: Any) -> Any:
    # Later blocks may overwrite the tensors.
    if isinstance(output, tuple):
        return tuple(map(_copied, output))
    return output.clone() if isinstance(output, Tensor) else output


def drop_blocks_above(model: nn.Module, blocks: BlockList, points: Sequence[HookPoint]) -> int:
    """Remove the blocks above the highest hook point, and return the number of remaining blocks.

    If a point is outside the blocks, keep all blocks.
    """
    numbers = [blocks.number(point.path) for point in points]
    if None in numbers:
        return blocks.n
    n = 1 + max(number for number in numbers if number is not None)
    parent, _, name = blocks.path.rpartition(".")
    of_model = model.get_submodule(blocks.path)
    assert isinstance(of_model, nn.ModuleList)
    setattr(model.get_submodule(parent), name, of_model[:n])
    return n


def _examples(model: nn.Module) -> str:
    paths = [path for path, _ in model.named_modules() if path]
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def rows_of(tensor: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a copy of a tensor's rows [n, d] at `indices`, which index into the flattened batch.

    `shape` is (n_contexts, n_tokens). Raise `ValueError` unless the tensor has the shape [n_contexts, n_tokens, ...] or
    [n_contexts * n_tokens, d].
    """
    n = shape[0] * shape[1]
    if tensor.shape[:2] != shape and (tensor.ndim != 2 or len(tensor) != n):
        raise ValueError(f"outputs a tensor of shape {list(tensor.shape)} for {list(shape)} tokens")
    return torch.index_select(tensor.reshape(n, -1), 0, indices.to(tensor.device))
