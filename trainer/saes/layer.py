"""The layers of a cross-layer transcoder."""

from __future__ import annotations

from typing import Annotated

import msgspec
from torch import Tensor


class Layer(msgspec.Struct, frozen=True):
    """A layer of a cross-layer transcoder: its number, from 0, and the number of layers.

    An SAE's metadata stores it as {"layer": number, "n_layers": n_layers}.
    """

    number: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="layer")
    n_layers: Annotated[int, msgspec.Meta(ge=2)]

    @property
    def n_targets(self) -> int:
        """The number of layers that its latents write to."""
        return self.n_layers - self.number

    def own(self, rows: Tensor) -> Tensor:
        """Return this layer's part of the joined rows of all layers [n, n_layers * d]."""
        return rows.tensor_split(self.n_layers, dim=1)[self.number]
