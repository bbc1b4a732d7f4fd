"""The held-out rows used for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.activations.base import Pair, in_fp32, to_device
from trainer.activations.outliers import LeftOut, Outliers
from trainer.contract.planning.rows_on_gpu import MOST_KEPT_BYTES
from trainer.runtime.out_of_memory import is_shortage


class HeldOutRows(Protocol):
    """The held-out rows for one hook."""

    def held_out(self, batch_size: int, half: int | None = None) -> Iterator[Pair]: ...


class HeldOutData(Protocol):
    """The held-out rows for all hooks."""

    def of_hook(self, hook: int) -> HeldOutRows: ...


class HeldOut:
    """This rank's held-out rows for each hook, on its device; outliers are left out and counted.

    On a CPU, the rows are read for every evaluation. A GPU keeps up to `MOST_KEPT_BYTES` of rows after the first
    evaluation, since rereading 151 MB takes a tenth of a second from the page cache, and longer from a disk.
    """

    def __init__(self, data: HeldOutData, outliers: Sequence[Outliers], device: torch.device) -> None:
        self._data, self._outliers, self._device = data, outliers, device
        self.keeps = device.type == "cuda"
        self._kept: dict[tuple[int, int | None], list[Pair]] = {}
        self._n_bytes = 0
        # The counts of rows left out in the last pass, by hook and half.
        self._left_out: dict[tuple[int, int | None], Tensor] = {}

    def left_out(self, hook: int) -> LeftOut:
        """Return the number of rows left out for a hook in the last pass, over both halves."""
        counts = [
            of_half for (of_hook, half), of_half in self._left_out.items() if of_hook == hook and half is not None
        ]
        return LeftOut.of(sum(counts, torch.zeros(4, dtype=torch.int64)))

    def batches(self, hook: int, batch_size: int, half: int | None = None) -> Iterator[Pair]:
        """Yield inputs and targets for a hook, up to `batch_size` rows at a time.

        The rows are in fp32 on a CPU, and in their stored dtype on a GPU. With `half`, yield only that half of the
        held-out rows.
        """
        if self.keeps and (hook, half) not in self._kept:
            self._keep(hook, batch_size, half)
        kept = self._kept.get((hook, half))
        for x, y in self._read(hook, batch_size, half) if kept is None else kept:
            inputs = x.split(batch_size)
            yield from zip(inputs, inputs if y is x else y.split(batch_size), strict=True)

    def _keep(self, hook: int, batch_size: int, half: int | None) -> None:
        """Keep a hook's rows on the device if they fit; otherwise, stop keeping rows."""
        rows: list[Pair] = []
        try:
            for x, y in self._read(hook, batch_size, half):
                self._n_bytes += x.nbytes if y is x else x.nbytes + y.nbytes
                self.keeps = self._n_bytes <= MOST_KEPT_BYTES
                if not self.keeps:
                    return
                rows.append((x, y))
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            self.keeps = False
            return
        self._kept[hook, half] = rows

    def _read(self, hook: int, batch_size: int, half: int | None) -> Iterator[Pair]:
        counts = torch.zeros(4, dtype=torch.int64)
        for stored in self._data.of_hook(hook).held_out(batch_size, half):
            moved = to_device(stored, self._device)
            pair = in_fp32(moved) if self._device.type == "cpu" else moved
            x, y = self._outliers[hook].leave_out(*pair)
            some = len(x) < len(pair[0])
            counts += torch.tensor(self._outliers[hook].count(*pair) if some else LeftOut(0, 0, 0, len(x)))
            self._left_out[hook, half] = counts
            if len(x):
                yield x, y
