"""Moves the encoder of a latent together with its decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Following:
    """Splits W_enc into share · W_decᵀ and a remainder; within `apart` the optimizer steps W_dec and the remainder.

    The encoder decides on which tokens a latent fires. If it moves only by its own gradient, it lags behind the
    decoder, which every such token corrects. The catalog gives the measured benefit next to Adam's rates.
    """

    def __init__(self, share: float, parameters: Mapping[str, nn.Parameter]) -> None:
        self._share, self._encoder, self._decoder = share, parameters["W_enc"], parameters["W_dec"]

    @contextlib.contextmanager
    def apart(self, skips: Tensor) -> Iterator[None]:
        """Subtract the decoder's share from W_enc within the context; change nothing if `skips` (0-dim bool)."""
        share = torch.where(skips, 0.0, self._share).to(self._encoder.dtype)
        self._add(-share)
        try:
            yield
        finally:
            self._add(share)

    @torch.no_grad()
    def _add(self, share: Tensor) -> None:
        # One pass, without a temporary matrix.
        self._encoder.addcmul_(self._decoder.T, share)
