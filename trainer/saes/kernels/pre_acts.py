"""A batch's pre-activations; only the requested values are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.contract.planning import first_look
from trainer.saes.kernels import reused_buffer, rounded_top_k, top_k
from trainer.saes.kernels.rounded_top_k import Candidates, FirstLook


class PreActs:
    """A batch's pre-activations [n_tokens, d_sae]; callers usually need only the largest values."""

    # Whether a rounded product may be used first; all ranks on a host must agree on this.
    may_be_rounded = False

    def __init__(self, matrix: Tensor) -> None:
        self.shape, self.matrix = matrix.shape, matrix

    def largest(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the columns and values of each token's k largest pre-activations, unordered, both [n_tokens, k]."""
        return top_k.largest_of_each(self.matrix, k)

    def look(self, n: int, n_seen: int) -> Candidates | FirstLook:
        """Return the n largest values for each token, or the `n_seen` largest values in a rounded product."""
        columns, values = PreActs.largest(self, n)
        ceiling = values.amin(dim=1) if n < self.shape[1] else values.new_full((len(values),), -torch.inf)
        return Candidates(columns, values, ceiling)

    def of(self, tokens: Tensor) -> PreActs:
        """Return the pre-activations of the tokens with these indices [n]."""
        return PreActs(self.matrix[tokens])

    def largest_of_all(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the ascending indices and the values of the n largest elements of the flattened matrix, both [n]."""
        flat = top_k.of_all(self.matrix, n)
        return flat, self.matrix.flatten().index_select(0, flat)


class Product(PreActs):
    """x W_enc + b_enc for x [n_tokens, d_in]; the exact matrix is computed only on request or if that is faster."""

    def __init__(self, x: Tensor, W_enc: Tensor, b_enc: Tensor) -> None:
        self.shape = torch.Size((len(x), W_enc.shape[1]))
        self._factors = rounded_top_k.Factors(x, W_enc, b_enc)
        self._exact: Tensor | None = None
        self.may_be_rounded = rounded_top_k.may_be_used(self._factors)

    @property
    def matrix(self) -> Tensor:  # type: ignore[override]
        if self._exact is None:
            self._exact = self._factors.product()
        return self._exact

    def largest(self, k: int) -> tuple[Tensor, Tensor]:
        if self._may_screen(first_look.EXACT * first_look.n_seen(k, 1)):
            return rounded_top_k.largest_of_each(self._factors, k)
        return super().largest(k)

    def look(self, n: int, n_seen: int) -> Candidates | FirstLook:
        if not self._may_screen(first_look.EXACT * n_seen):
            return super().look(n, n_seen)
        return rounded_top_k.look(self._factors, n_seen)

    def of(self, tokens: Tensor) -> PreActs:
        return PreActs(self._factors.product_of(tokens)) if self._exact is None else super().of(tokens)

    def largest_of_all(self, n: int) -> tuple[Tensor, Tensor]:
        may = n and self._may_screen(first_look.MARGIN * n / self.shape[0], of_batch=True)
        largest = rounded_top_k.largest_of_all(self._factors, n) if may else None
        return largest or super().largest_of_all(n)

    def _may_screen(self, n_exact: float, *, of_batch: bool = False) -> bool:
        return self._exact is None and rounded_top_k.pays(self._factors, n_exact, of_batch=of_batch)

    def let_go(self) -> None:
        """Let the next matmul reuse the matrix's memory; the caller must copy any values it needs first."""
        if self._exact is not None:
            reused_buffer.put_back(self._exact)
