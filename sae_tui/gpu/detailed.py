"""The interface of a GPU source that has more to tell of a card than its samples do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sae_tui.gpu.base import GpuSample

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails


@runtime_checkable
class DetailedSource(Protocol):
    """A source of samples that can also read the particulars of a card, from the card's own thread."""

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        """Return the particulars of a card whose newest sample is given; may block like `sample`."""
        ...
