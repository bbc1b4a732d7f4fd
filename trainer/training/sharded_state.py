"""Gathers an SAE's training state from all ranks into a checkpoint, and loads each rank's shard from it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.optimizers.base import Optimizer
from trainer.saes.base import Sae
from trainer.training.gradients import LossScale
from trainer.training.zero_shards import Stepped


class ShardedState:
    """This rank's shard of an SAE's weights and buffers, its optimizer state and its loss scale.

    The latents may be sharded over ranks, and their optimizer state over replicas.
    """

    def __init__(self, sae: Sae, stepped: Stepped, optimizer: Optimizer, loss_scale: LossScale) -> None:
        self._sae, self._stepped, self._optimizer, self._loss_scale = sae, stepped, optimizer, loss_scale

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor stored in a checkpoint."""
        yield from (("sae." + name, value) for name, value in self._sae.state_dict().items())
        for name, parameter in self._stepped.parameters.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{kind}.{name}", value
        yield from (("loss_scale." + name, value) for name, value in self._loss_scale.state().items())

    def collect(self, prefix: str = "") -> dict[str, Tensor] | None:
        """Return the `tensors` whose names start with `prefix`, for all latents; all ranks of the SAE must call this.

        Only the first rank of the first replica gets the tensors; all other ranks get None.
        """
        self._stepped.restore()
        own = ((name, tensor) for name, tensor in self.tensors() if name.startswith(prefix))
        of_replica = {name: self._of_replica(name, tensor) for name, tensor in own}
        # Only the first replica continues, since all replicas have the same tensors.
        if self._sae.data.index:
            return None
        whole = {name: self._whole(name, tensor) for name, tensor in of_replica.items() if tensor is not None}
        if self._sae.latents.group.index:
            return None
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    def _of_replica(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the tensor for all latents of this rank; optimizer state is gathered from the replicas."""
        dim = self._latent_dim(name, tensor) if name.startswith("optimizer.") else None
        return tensor if dim is None else self._stepped.collect(tensor, dim)

    def _whole(self, name: str, tensor: Tensor) -> Tensor | None:
        dim = self._latent_dim(name, tensor)
        return tensor if dim is None or not self._sae.latents.is_shared else self._sae.latents.collect(tensor, dim)

    def _latent_dim(self, name: str, tensor: Tensor) -> int | None:
        """Return the dimension of a saved tensor that indexes latents, or None; `name` ends with a weight's name."""
        dim = self._sae.latent_dims().get(name.rpartition(".")[2])
        return dim if dim is not None and tensor.dim() > dim else None

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load this rank's shard of the tensors from `collect`; raise `UserError` if they do not fit the SAE."""
        self._stepped.restore(fill=False)
        since_fired = tensors.get("sae.n_tokens_since_fired")
        tensors = {name: self._part(name, tensor) for name, tensor in tensors.items()}
        try:
            self._sae.load_state_dict(under(tensors, "sae."))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(f"the checkpoint does not fit this job's SAE: {reason}") from error
        if since_fired is not None:
            self._sae.note_since_fired(since_fired)
        self._load_optimizer_and_scale(tensors)

    def copy_from(self, other: ShardedState) -> None:
        """Copy the state of an SAE with the same settings and the same shards; all replicas must call this."""
        other._stepped.restore()
        tensors = dict(other.tensors())
        self._sae.load_state_dict(under(tensors, "sae."))
        self._sae.note_since_fired_of(other._sae)
        self._load_optimizer_and_scale(tensors)

    def _load_optimizer_and_scale(self, tensors: dict[str, Tensor]) -> None:
        self._load_optimizer(under(tensors, "optimizer."))
        self._loss_scale.load(under(tensors, "loss_scale."))

    def _load_optimizer(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self._stepped.parameters.items():
            values = {key.partition(".")[0]: value for key, value in state.items() if key.partition(".")[2] == name}
            if values:
                # The fused Adam keeps its step count on the parameters' device.
                placed = {kind: _copy_in_layout_of(parameter, value) for kind, value in values.items()}
                self._optimizer.state[parameter] = self._optimizer.adopted(parameter, placed)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        dim = self._latent_dim(name, tensor)
        if dim is None:
            return tensor
        if self._sae.latents.is_shared and tensor.shape[dim] != self._sae.d_sae:
            has = f"{name} has {tensor.shape[dim]} latents instead of {self._sae.d_sae}"
            raise UserError(f"the checkpoint does not fit this job's SAE: {has}")
        part = self._sae.latents.part(tensor, dim)
        return self._stepped.own(part, dim) if name.startswith("optimizer.") else part


def _copy_in_layout_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` on the parameter's device, in the parameter's memory layout if the shapes are the same.

    A fused optimizer requires the same memory layout for a parameter and its state, and a file does not store the
    layout.
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, with the prefix removed."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
