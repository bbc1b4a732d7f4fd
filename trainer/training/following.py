"""Makes each latent's encoder follow its decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Following:
    """Splits W_enc into share · W_decᵀ and a remainder; within `apart`, the optimizer updates W_dec and the remainder.

    The encoder decides on which tokens a latent fires, and each of these tokens corrects the decoder. If the encoder
    were changed only by its own gradient, it would lag behind the decoder. The catalog states the measured benefit next
    to Adam's learning rates.
    """

    def __init__(self, share: float, parameters: Mapping[str, nn.Parameter]) -> None:
        self._share, self._encoder, self._decoder = share, parameters["W_enc"], parameters["W_dec"]

    @contextlib.contextmanager
    def apart(self, skips: Tensor) -> Iterator[None]:
        """Within the context, subtract share · W_decᵀ from W_enc, unless `skips` (0-dim bool) is true."""
        share = torch.where(skips, 0.0, self._share).to(self._encoder.dtype)
        self._add(-share)
        try:
            yield
        finally:
            self._add(share)

    @torch.no_grad()
    def _add(self, share: Tensor) -> None:
        # This takes a single pass, without a temporary matrix.
        self._encoder.addcmul_(self._decoder.T, share)
