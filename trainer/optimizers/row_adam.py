"""Adam on a GPU in one pass over each latent's weights, with gradient projection and row normalisation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optimizers.base import Optimizer, RowStep, rate_of
from trainer.optimizers.codecs import CODECS
from trainer.optimizers.tiled import betas_of
from trainer.runtime import narrow_copy, row_measures
from trainer.runtime.narrow_copy import NarrowCopy
from trainer.runtime.row_measures import RowMeasures
from trainer.runtime.triton_kernels import OPTIMIZER_STEPS


class RowAdam(RowStep):
    """Adam's step in Triton kernels; the state stays in the optimizer, in the same format as without kernels."""

    def __init__(self, optimizer: Optimizer, codec: str, kernels: ModuleType) -> None:
        self._optimizer, self._codec, self._kernels = optimizer, CODECS[codec], kernels
        groups = {one: group for group, one in optimizer.with_group()}
        self._matrices = {one: groups[one] for one in optimizer.latent_axes if one.dim() == 2}
        self._vectors = {one: group for one, group in groups.items() if self._takes(one)}
        self._measures: dict[nn.Parameter, RowMeasures] = {}
        # Partial squared gradient norms of each vector, as views of the two buffers below. `_of_latents` also contains
        # the norms of matrix rows; `_of_all` has one value for each vector that all latents share.
        self._parts: dict[nn.Parameter, Tensor] = {}
        self._of_latents = torch.empty(0)
        self._of_all = torch.empty(0)
        self._copies: dict[nn.Parameter, NarrowCopy] = {}

    @classmethod
    def of(cls, optimizer: Optimizer, codec: str) -> RowAdam | None:
        """Return the Triton step for an optimizer's parameters, or None if the kernels do not support its matrices."""
        kernels = next((OPTIMIZER_STEPS.on(one) for one in optimizer.latent_axes), None)
        step = cls(optimizer, codec, kernels) if kernels else None
        if step is None or not step._may_have_all():
            return None
        step._copies = {one: narrow_copy.keep(one) for one in step._matrices}
        step._make_room_for_measures()
        return step

    def _may_have_all(self) -> bool:
        """Return whether all matrices are in fp32 and each latent's weights are contiguous and fit into one program."""
        rows = [self._by_latent(one, one) for one in self._matrices]
        fits = (one.is_contiguous() and self._kernels.fits(one.shape[1]) for one in rows)
        return bool(rows) and all(fits) and all(one.dtype == torch.float32 for one in rows)

    def _takes(self, one: nn.Parameter) -> bool:
        """Return whether this object updates a vector; a vector that all latents share must fit into one program."""
        is_vector = one.dim() == 1 and one.dtype == torch.float32 and one.is_contiguous()
        return is_vector and (one in self._optimizer.latent_axes or self._kernels.fits(len(one)))

    def _make_room_for_measures(self) -> None:
        axes = self._optimizer.latent_axes
        of_latents = {one: one.shape[self._dim(one)] for one in self._matrices}
        of_latents |= {one: self._kernels.n_parts(len(one)) for one in self._vectors if one in axes}
        others = [one for one in self._vectors if one not in axes]
        like = next(iter(self._matrices))
        self._of_latents = like.new_zeros(sum(of_latents.values()))
        self._of_all = like.new_zeros(len(others), dtype=torch.float64)
        parts = dict(zip(of_latents, self._of_latents.split([*of_latents.values()]), strict=True))
        for one in self._matrices:
            is_unit = self._unit_rows(one) is not None
            self._measures[one] = RowMeasures(parts[one], torch.zeros_like(parts[one]) if is_unit else None)
        self._parts = {one: parts[one] for one in self._vectors if one in axes}
        self._shared_parts = dict(zip(others, self._of_all[:, None].unbind(), strict=True))

    def steps(self, parameter: nn.Parameter) -> bool:
        return parameter in self._matrices or parameter in self._vectors

    def allow_fused_norms(self) -> None:
        for parameter, measures in self._measures.items():
            row_measures.keep(parameter, measures)

    @torch.no_grad()
    def measure_latents(self) -> Tensor:
        for one, measures in self._measures.items():
            if one.grad is None:
                measures.squares.zero_()
            else:
                self._measure(one, measures)
        self._measure_vectors(self._parts)
        return self._of_latents.sum(dtype=torch.float64)

    @torch.no_grad()
    def measure_shared(self) -> Tensor:
        self._measure_vectors(self._shared_parts)
        # If b_dec is the only shared vector, there is nothing to sum.
        return self._of_all[0] if len(self._of_all) == 1 else self._of_all.sum()

    def _measure_vectors(self, parts_of: dict[nn.Parameter, Tensor]) -> None:
        for one, parts in parts_of.items():
            if one.grad is None:
                parts.zero_()
            else:
                self._kernels.measure_vector(one.grad.contiguous(), parts)

    def _measure(self, matrix: nn.Parameter, measures: RowMeasures) -> None:
        """Measure those rows of a matrix's gradient that were not measured while the gradient was being summed."""
        gradient, unit_rows = self._gradient(matrix), self._unit_rows(matrix)
        unsure = measures.take(gradient)
        # Each launch accepts two lists of rows: latents whose sums were split among programs, and dead latents.
        pairs = [()] if unsure is None else [unsure[at : at + 2] for at in range(0, len(unsure), 2)]
        for rows in pairs:
            self._kernels.measure(gradient, unit_rows, measures.squares, measures.dots, *rows)

    @torch.no_grad()
    def step(self, taken: Tensor) -> None:
        found_inf, divisor = self._optimizer.found_inf, self._optimizer.grad_scale
        assert found_inf is not None, "`found_inf` must be set before a step"
        divisor = torch.ones_like(found_inf) if divisor is None else divisor
        matrices = {one: self._matrix(one) for one in self._matrices if one.grad is not None}
        vectors = {one: self._vector(one) for one in self._vectors if one.grad is not None}
        n_steps = [one.n_steps for one in (*matrices.values(), *vectors.values())]
        torch._foreach_add_(n_steps, [taken] * len(n_steps))
        following = {one: by for one, by in self._optimizer.followers.items() if {one, by.parameter} <= matrices.keys()}
        led = {by.parameter for by in following.values()}
        for one, matrix in matrices.items():
            if one not in led:
                constants = self._kernels.Constants(betas_of(self._matrices[one]), divisor, found_inf)
                by, ids = following.get(one), self._optimizer.latent_axes[one].ids
                self._kernels.step(matrix, ids, constants, *((matrices[by.parameter], by.share) if by else ()))
        for one, vector in vectors.items():
            constants = self._kernels.Constants(betas_of(self._vectors[one]), divisor, found_inf)
            self._kernels.step_vector(vector, constants)
        for one in (*matrices, *vectors):
            one.grad = None

    def _matrix(self, parameter: nn.Parameter) -> Any:
        state, dim = self._optimizer.state[parameter], self._dim(parameter)
        if not state:
            state.update(step=parameter.new_zeros(()), **self._codec.new(parameter, 1 - dim))
        moments = {name: self._by_latent(parameter, state[name]) for name in ("exp_avg", "exp_avg_sq")}
        narrow = self._copies[parameter].to_renew(parameter)
        return self._kernels.Matrix(
            self._by_latent(parameter, parameter.detach()),
            self._gradient(parameter),
            state | moments,
            state["step"],
            rate_of(self._matrices[parameter], parameter),
            dim,
            self._measures[parameter].dots,
            None if narrow is None else self._by_latent(parameter, narrow),
        )

    def _vector(self, parameter: nn.Parameter) -> Any:
        state, grad = self._optimizer.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            # Use the same layout as torch's Adam, which takes over this state if there are no kernels.
            state.update(step=parameter.new_zeros(()), **CODECS["fp32"].new(parameter, 0))
        rate = rate_of(self._vectors[parameter], parameter)
        return self._kernels.Vector(parameter.detach(), grad.contiguous(), state, state["step"], rate)

    def _unit_rows(self, parameter: nn.Parameter) -> Tensor | None:
        is_unit = any(parameter is held for held in self._optimizer.unit_rows)
        return self._by_latent(parameter, parameter.detach()) if is_unit else None

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return self._by_latent(parameter, parameter.grad).contiguous()

    def _by_latent(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """Return a view with latents as rows; `tensor` has the shape of the parameter."""
        return tensor.T if self._dim(parameter) else tensor

    def _dim(self, parameter: nn.Parameter) -> int:
        return self._optimizer.latent_axes[parameter].dim
