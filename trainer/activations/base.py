"""Interfaces for activation sources: stored rows with random access, and streams."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trainer.activations.permutation import Indices as Indices
from trainer.activations.texts import Texts
from trainer.contract.object_cache import RowCache
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.settings.shards import Shard
from trainer.contract.settings.sources import HoldOut
from trainer.parallel.group import Group

# Inputs [n, d_in] and their targets [n, d_out]; for an SAE, both are the same tensor.
Pair = tuple[Tensor, Tensor]
# The first row of a range of rows, and the row after its last.
Span = tuple[int, int]
# Allocates memory for rows, given their count, width and dtype.
Empty = Callable[[int, int, torch.dtype], Tensor]
_IDENTIFYING_ROWS = 16


def empty_rows(n: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised [n, width] tensor for rows."""
    return torch.empty(n, width, dtype=dtype)


def of_each_hook(pair: Pair, n_hooks: int) -> list[Pair]:
    """Split rows [n, n_hooks * d_in], concatenated over hooks, into inputs and targets for each hook."""
    x, y = pair
    if n_hooks == 1:
        return [pair]
    inputs = [columns.contiguous() for columns in x.chunk(n_hooks, dim=1)]
    targets = inputs if y is x else [columns.contiguous() for columns in y.chunk(n_hooks, dim=1)]
    return list(zip(inputs, targets, strict=True))


def on_device(pair: Pair, device: torch.device) -> Pair:
    """Return inputs and targets in fp32 on a device; if both are the same tensor, so are the results."""
    return in_fp32(to_device(pair, device))


def to_device(pair: Pair, device: torch.device) -> Pair:
    """Return inputs and targets on a device; if both are the same tensor, so are the results."""
    x, y = pair
    inputs = x.to(device)
    return inputs, inputs if y is x else y.to(device)


def in_fp32(pair: Pair) -> Pair:
    """Return inputs and targets in fp32; if both are the same tensor, so are the results."""
    x, y = pair
    inputs = x.float()
    return inputs, inputs if y is x else y.float()


def norms_of(rows: Tensor) -> Tensor:
    """Return the norms [n] of rows [n, d] in fp32; overflowing norms and norms of non-finite rows are inf or NaN."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms


def are_finite(x: Tensor, y: Tensor) -> Tensor:
    """Return a mask [n] of the rows with a finite norm and a finite target norm in fp32."""
    finite = norms_of(x) < torch.inf
    return finite if y is x else finite & (norms_of(y) < torch.inf)


class Source(ABC):
    """An activation source; `place` is its name in messages, and `meta` describes its origin.

    If `d_out` is set (for a transcoder), every row has a target of this width. With several hooks, each row
    [n_hooks * d_in] concatenates one token's activations at all hooks; targets are concatenated in the same way.
    """

    n_hooks: int = 1
    d_in: int
    # The widths of the parts that a crosscoder's rows are joined from; their sum is `d_in`.
    part_widths: Sequence[int] = ()
    d_out: int | None = None
    # The number of rows, or None if unknown.
    n_tokens: int | None = None
    place: str
    meta: dict[str, Any]
    # Notes for the user on how the source is read.
    notes: Sequence[str] = ()
    # The caches that download rows from URLs.
    caches: Sequence[RowCache] = ()

    def of_hook(self, hook: int) -> Source:
        """Return a source containing only the rows for the hook at index `hook`."""
        return self

    def of_part(self, number: int) -> Source:
        """Return the source of one of the parts that rows are joined from."""
        raise NotImplementedError

    def beside(self, others: Sequence[Self]) -> Source:
        """Combine this source and `others`, which differ only in their hook, into one source with several hooks.

        Only sources with a `hook` setting need to implement this.
        """
        raise NotImplementedError

    def joined(self, others: Sequence[Self]) -> Source:
        """Join the rows of this source and `others` into the rows of a crosscoder; only for sources with parts."""
        raise NotImplementedError


class IndexedSource(Source):
    """Stored activations with random access to rows."""

    n_tokens: int
    # For a mixture of several sets of shards, the row count and weight of each set. Without weights, sets are mixed in
    # proportion to their row counts.
    sizes: Sequence[int] = ()
    weights: Sequence[float] | None = None
    # The texts in each set of shards; empty if a shard does not record its texts.
    texts: Sequence[Texts] = ()
    # The default of `data.hold_out` for this source.
    usual_hold_out: HoldOut = "rows"
    # The number of rows in each set when the run started, if the data has grown since then. Held-out rows are chosen
    # only from the original rows.
    split_sizes: Sequence[int] = ()
    # The number of neighbouring rows that stay together in a batch; more than 1 if the stored rows are shuffled.
    run: int = 1
    # The first row of each shard; empty if the rows are not read in windows of shards. `shuffle_shards` is the number
    # of shards in a window, or 0 if all rows are shuffled together.
    shard_starts: Sequence[int] = ()
    shuffle_shards: int = 0

    def of_hook(self, hook: int) -> IndexedSource:
        return self

    def continue_from(self, before: DataRecord) -> None:
        """Keep the row numbers of a run that was trained on `before`; rows added since then get higher numbers."""

    def read_by_all_threads(self) -> None:
        """From now on, read with all of this process's threads, which would otherwise be idle on a rank with a GPU."""

    def use_window(self, shuffle_shards: int, split_rows: int) -> None:
        """Shuffle the rows of this many shards together, and hold out only some of the first `split_rows` rows."""
        raise NotImplementedError

    def keep(self, spans: Sequence[Span]) -> None:
        """Download the rows in these spans in this order if they are stored at a URL, and release all others."""

    @abstractmethod
    def rows(self, indices: Indices) -> Tensor:
        """Return rows [n, d_in] in their stored dtype, in ascending order of row number.

        The order within a batch does not affect training.
        """

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        """Return inputs [n, d_in] and targets [n, d_out] in the order of `rows`; for an SAE, both are the same tensor.

        Rows are read directly into memory allocated by `empty` if the source supports it.
        """
        x = self.rows(indices)
        return x, x

    @property
    def stored_as(self) -> str:
        """The encoding of the rows and its noise, as a phrase for report cards; "" if rows are stored as numbers."""
        return ""

    @property
    def coded_bytes(self) -> tuple[int, int] | None:
        """The bytes of an encoded row and its target; None if rows are not encoded, and 0 for the target of an SAE."""
        return None

    def coded_pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        """Return the rows of `pairs`, encoded for the way to the device if the source stores them encoded."""
        return self.pairs(indices, empty)

    def decoded(self, pair: Pair) -> Pair:
        """Decode rows from `coded_pairs`, on the same device."""
        return pair

    def token_ids(self, indices: Indices) -> Indices | None:
        """Return the token of each of the given ascending rows, or None if the source does not store tokens."""
        return None

    def places(self) -> list[Indices] | None:
        """Return each shard's place in the text of every row, or None if the source does not store places."""
        return None

    def first_shards(self) -> Sequence[Shard]:
        """Return the shards of the first folder in the order of their rows."""
        return ()

    def of_first_folder(self, first: int, last: int) -> tuple[Indices, Indices]:
        """Return the rows that come from rows `first` to `last` - 1 of the first joined folder.

        The result contains their numbers in this source, and in the folder, counted from `first`.
        """
        return np.arange(first, last), np.arange(last - first)

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return the name to use for a row in messages."""

    def first_not_finite(self, indices: Indices) -> int | None:
        """Reread the rows and return the number of the first row with non-finite values, or None if all are finite."""
        of_hooks = [are_finite(*pair) for pair in of_each_hook(self.pairs(indices), self.n_hooks)]
        bad = ~torch.stack(of_hooks).all(dim=0)
        return int(np.sort(indices)[int(bad.int().argmax())]) if bad.any() else None


def data_digest(source: Source) -> dict[str, str]:
    """Return a digest of a source's first rows, which identifies data that does not name its hook; {} for a stream."""
    if not isinstance(source, IndexedSource):
        return {}
    pair = source.pairs(np.arange(min(_IDENTIFYING_ROWS, source.n_tokens)))
    return {"data_digest": hashlib.sha256(b"".join(one.float().numpy().tobytes() for one in pair)).hexdigest()[:16]}


class StreamSource(Source):
    """Activations that are read once, in a fixed order; for example, streamed from a language model.

    A stream is split into parts. Ranks with different tokens read different parts, and ranks with the same tokens read
    the same part. A part must return the same rows in the same order every time, so that runs can be resumed.
    """

    # The number of rows in each rank's shuffle buffer.
    shuffle_tokens: int
    # Whether rows are expensive to compute. If so, ranks reading the same part each compute a share of its rows; see
    # `divide`.
    is_divided: bool = False
    # Whether `documents` is available.
    knows_texts: bool = False
    # Called with the number of rows read so far, after each `next_rows`, possibly in another thread.
    report: Callable[[int], object] = staticmethod(lambda n_rows: None)
    # The devices that this rank uses exclusively for computing rows, set before `begin`; if empty, the training device
    # computes them.
    own_devices: Sequence[torch.device] = ()

    @abstractmethod
    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        """Start at the first row of part `rank` of `n_ranks`; parts do not overlap. This method is called once.

        Training runs on `device`, which also computes the rows if there are no `own_devices`.
        """

    @abstractmethod
    def next_rows(self) -> Pair | None:
        """Return the next rows of the part, or None at its end; the stream chooses the row count and the device.

        Neither the caller nor the stream may modify the returned rows.
        """

    def documents(self) -> Tensor:
        """Return the text numbers of the rows from the last `next_rows` call, int64 [n] on the CPU.

        A text has the same number in all parts. Text numbers mostly increase along the stream.
        """
        raise NotImplementedError

    def divide(self, peers: Group) -> None:
        """Compute only a share of the rows, and receive the rest from `peers`; called after `begin`.

        All peers read the same part, and from now on they must read and restore at the same positions. They exchange
        CPU tensors.
        """
        raise NotImplementedError

    @abstractmethod
    def state(self) -> Any:
        """Return the stream's position in its part, as a small JSON-compatible value."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Restore a position that `state` returned in this process or an earlier one."""
