"""Tests transferring batches to a simulated GPU that performs each copy as late as possible."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.activations.base import IndexedSource, Indices
from trainer.activations.batches import Batches
from trainer.activations.micro_batches import Cut
from trainer.activations.shards import Shards
from trainer.activations.side_by_side import SideBySide
from trainer.activations.training_data import IndexedData
from trainer.activations.transfer import Overlapped, Sent, Transfer
from trainer.parallel.group import Group

CPU = torch.device("cpu")


class LateLane:
    """A simulated GPU that performs a copy only when a thread waits for it, as if busy with other copies."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.n_begun, self.pinned_bytes = 0, 0
        # The reader thread and the training thread both wait for copies, so the queue needs a lock.
        self.lock = threading.Lock()

    def pinned(self, n_bytes: int) -> Tensor:
        self.pinned_bytes += n_bytes
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy(self, rows: Tensor) -> Tensor:
        copied = torch.full_like(rows, -77)
        with self.lock:
            self.waiting.append(lambda: copied.copy_(rows))
            self.n_begun += 1
        return copied

    def mark(self) -> Mark:
        return Mark(self, self.n_begun)

    def meet(self, arrival: Mark, rows: tuple[Tensor, ...]) -> None:
        arrival.synchronize()
        assert all((one != -77).all() for one in rows)


class Mark:
    def __init__(self, lane: LateLane, n: int) -> None:
        self._lane, self._n = lane, n

    def synchronize(self) -> None:
        with self._lane.lock:
            while self._lane.n_begun - len(self._lane.waiting) < self._n:
                self._lane.waiting.popleft()()


def batches_of(source: IndexedSource, n: int, lane: LateLane | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the first n batches of 64 rows, transferred through `lane`, or read directly if `lane` is None."""
    transfer = Overlapped(CPU, lane) if lane else None
    opened = Batches(IndexedData(source, 0, 0, Group()), Cut(64), start=0, device=CPU, transfer=transfer)
    with contextlib.closing(opened) as batches:
        return [batches.next().hooks[0] for _ in range(n)]


def test_the_read_ahead_thread_uses_the_gpu_assigned_to_its_rank(
    activations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_current: list[tuple[str, torch.device]] = []

    def note(device: torch.device) -> None:
        made_current.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", note)
    second, source = torch.device("cuda:1"), Shards(path=str(activations))
    data = IndexedData(source, 0, 0, Group())
    with contextlib.closing(Batches(data, Cut(64), start=0, device=second, transfer=Transfer(CPU))) as batches:
        batches.next()
    assert made_current == [("read-ahead", second)]


class Unaware(Shards):
    """Shards that ignore the given buffer and allocate new memory for their rows."""

    def rows(self, indices: Indices) -> Tensor:
        return super().rows(indices)

    pairs = IndexedSource.pairs


@pytest.mark.parametrize("kind", [Shards, Unaware])
def test_rows_are_unchanged_even_if_copied_late(kind: type[Shards], activations: Path) -> None:
    source, lane = kind(path=str(activations)), LateLane()
    for (x, y), (expected, _) in zip(batches_of(source, 60, lane), batches_of(source, 60), strict=True):
        assert y is x
        assert torch.equal(x, expected)
    assert lane.n_begun >= 60
    # There are only two buffers for a batch's rows, and both are reused.
    row_bytes = source.rows(np.arange(1)).nbytes
    assert lane.pinned_bytes == 2 * 64 * row_bytes


def test_rows_from_several_hooks_and_dtypes_are_concatenated_in_place(tmp_path: Path) -> None:
    sources = []
    for name, dtype, width in (("one", torch.float16, 3), ("two", torch.float32, 2)):
        (tmp_path / name).mkdir()
        save_file({"activations": torch.randn(500, width).to(dtype)}, tmp_path / name / "a.safetensors")
        sources.append(Shards(path=str(tmp_path / name)))
    place = torch.empty(100, dtype=torch.uint8)

    def empty(n: int, width: int, dtype: torch.dtype) -> Tensor:
        return place.view(dtype).view(n, width)

    x, y = SideBySide(sources).pairs(np.arange(5), empty)
    assert y is x
    assert x.data_ptr() == place.data_ptr()
    assert torch.equal(x, torch.cat([one.rows(np.arange(5)) for one in sources], dim=1))


def test_transcoder_targets_arrive_with_their_inputs(activations: Path, tmp_path: Path) -> None:
    rows = Shards(path=str(activations)).rows(np.arange(3000)).float()
    (tmp_path / "targets").mkdir()
    save_file({"activations": (2 * rows[:, :5]).contiguous()}, tmp_path / "targets" / "one.safetensors")
    source = Shards(path=str(activations), target_path=str(tmp_path / "targets"))
    for x, y in batches_of(source, 50, LateLane()):
        assert torch.equal(y, 2 * x[:, :5])


def test_a_buffer_is_not_overwritten_before_it_has_been_copied() -> None:
    lane = LateLane()
    transfer = Overlapped(CPU, lane)
    sent: list[Sent] = []
    for number in range(5):
        rows = transfer.begin()(3, 2, torch.float32).fill_(number)
        sent.append(transfer.send((rows, rows)))
        # At this point, only the copies from the buffer needed next have been performed.
        assert len(lane.waiting) == min(number + 1, 2)
    for number, one in enumerate(sent):
        assert transfer.receive(one)[0].tolist() == [[number] * 2] * 3


def test_a_buffer_grows_to_the_size_of_the_largest_batch() -> None:
    lane = LateLane()
    transfer = Overlapped(CPU, lane)
    for n in (1, 1, 4, 4, 2, 2):
        assert transfer.begin()(n, 2, torch.float16).shape == (n, 2)
    assert lane.pinned_bytes == 2 * (4 + 16)
