"""The interfaces of GPU sources that have more to tell of a card than its samples do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sae_tui.gpu.base import GpuSample

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails
    from sae_tui.gpu.ring import Reading


@runtime_checkable
class DetailedSource(Protocol):
    """A source of samples that can also read the particulars of a card, from the card's own thread."""

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        """Return the particulars of a card whose newest sample is given; may block like `sample`."""
        ...


@runtime_checkable
class SharesSource(Protocol):
    """A source that can also tell how much of a card each of its processes takes, from the card's own thread."""

    def sm_percents(self, index: int, sample: GpuSample) -> Mapping[int, int]:
        """Return by pid the shares of the multiprocessors of a card whose newest sample is given, in percent."""
        ...


@runtime_checkable
class MixedSource(Protocol):
    """A source of several vendors' cards."""

    def vendor(self, index: int) -> str:
        """Return whose card it is, by its name in `VENDORS`, without asking the card."""
        ...


def vendor_of(source: object, index: int) -> str:
    """Return whose card it is, where the source has cards of several vendors, and "" where it does not."""
    return source.vendor(index) if isinstance(source, MixedSource) else ""


@runtime_checkable
class RememberingSource(Protocol):
    """A source of which the driver remembers how a card was before it was asked."""

    def buffered(self, index: int) -> tuple[Reading, ...]:
        """Return what is remembered of a card that was read before, oldest first; may block like `sample`."""
        ...


@runtime_checkable
class HurriedSource(Protocol):
    """A source that can shorten the reads that are under way, because it will be closed."""

    def hurry(self) -> None:
        """Let reads return without processes and condition; called from another thread than theirs."""
        ...


@runtime_checkable
class ReopeningSource(Protocol):
    """A source that notices when its driver must be reopened to see the present GPUs."""

    @property
    def must_reopen(self) -> bool:
        """Whether the driver was reloaded, or has other GPUs or slices than when it was opened."""
        ...
