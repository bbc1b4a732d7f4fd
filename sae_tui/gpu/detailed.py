"""Optional interfaces for GPU sources that provide more than samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sae_tui.gpu.base import GpuSample, ProcessShares

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails
    from sae_tui.gpu.ring import RingReading


@runtime_checkable
class DetailedSource(Protocol):
    """A source that can also read GPU details, on each GPU's own thread."""

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        """Return a GPU's details, given its latest sample; may block like `sample`."""
        ...


@runtime_checkable
class SharesSource(Protocol):
    """A source that can also read GPU utilisation per process, on each GPU's own thread."""

    def shares(self, index: int, sample: GpuSample) -> Mapping[int, ProcessShares]:
        """Return a dict mapping each process's pid to its shares of the GPU; `sample` is the GPU's latest sample."""
        ...


@runtime_checkable
class MixedSource(Protocol):
    """A source with GPUs from several vendors."""

    def vendor(self, index: int) -> str:
        """Return the key of a GPU's vendor in `VENDORS`, without reading the GPU."""
        ...


def vendor_of(source: object, index: int) -> str:
    """Return a GPU's vendor if the source has GPUs from several vendors, or "" otherwise."""
    return source.vendor(index) if isinstance(source, MixedSource) else ""


@runtime_checkable
class RememberingSource(Protocol):
    """A source whose driver already holds buffered readings when the app first reads a GPU."""

    def buffered(self, index: int) -> tuple[RingReading, ...]:
        """Return a GPU's buffered readings, oldest first, after the GPU has been read once; may block like `sample`."""
        ...


@runtime_checkable
class HurriedSource(Protocol):
    """A source that can cut its current reads short before it is closed."""

    def hurry(self) -> None:
        """Omit the processes and the condition from all further reads; may be called from any thread."""
        ...


@runtime_checkable
class ReopeningSource(Protocol):
    """A source that detects when its driver must be reopened to see the current GPUs."""

    @property
    def must_reopen(self) -> bool:
        """True if the driver was reloaded, or if its GPUs or slices have changed since it was opened."""
        ...
