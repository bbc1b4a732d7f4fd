"""Lets the encoder of a latent move with its decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Following:
    """W_enc as share · W_decᵀ and a rest: while they are `apart` the optimizer steps W_dec and that rest.

    The encoder decides on which tokens a latent fires, and where it moves by its own gradient alone it lags behind a
    decoder that every such token corrects. What following is worth is told beside Adam's rates in the catalog.
    """

    def __init__(self, share: float, parameters: Mapping[str, nn.Parameter]) -> None:
        self._share, self._encoder, self._decoder = share, parameters["W_enc"], parameters["W_dec"]

    @contextlib.contextmanager
    def apart(self, skips: Tensor) -> Iterator[None]:
        """Take the decoder's share out of W_enc while the context lasts; where `skips` (0-dim bool), change no bit."""
        share = torch.where(skips, 0.0, self._share).to(self._encoder.dtype)
        self._add(-share)
        try:
            yield
        finally:
            self._add(share)

    @torch.no_grad()
    def _add(self, share: Tensor) -> None:
        # In one pass, without a matrix in between.
        self._encoder.addcmul_(self._decoder.T, share)
