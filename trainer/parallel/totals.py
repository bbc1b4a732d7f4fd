"""Sums vectors over ranks for the host to read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.group import Group
from trainer.runtime.device_queue import HostCopy, queued_copy


class Totals:
    """Sums float64 vectors over a group in a single exchange, and copies the sums to the host.

    All vectors are on one device. If the group exchanges tensors on another device, `by` is that device.
    """

    def __init__(self, parts: Mapping[str, Tensor], group: Group, by: torch.device | None = None) -> None:
        self._sizes = {name: len(part) for name, part in parts.items()}
        packed = torch.cat([part.double() for part in parts.values()]) if parts else torch.zeros(0)
        if by is not None and group.size > 1:
            packed = queued_copy(packed, by)
        group.sum_(packed)
        self._copy = HostCopy(packed)

    def read(self) -> dict[str, Tensor]:
        """Return a dict mapping each name to its sum on the CPU; this call is the only one that makes the host wait."""
        return dict(zip(self._sizes, self._copy.read().split([*self._sizes.values()]), strict=True))
