"""The interfaces of a source of activations: rows by number, or rows as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trainer.activations.permutation import Indices as Indices
from trainer.activations.texts import Texts
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.settings.sources import HoldOut
from trainer.parallel.group import Group

# Inputs [n, d_in] and their targets [n, d_out]: the same tensor for an SAE.
Pair = tuple[Tensor, Tensor]
# Gives the memory for rows that are read: how many, their width and type.
Empty = Callable[[int, int, torch.dtype], Tensor]


def empty_rows(n: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return memory for rows, [n, width]."""
    return torch.empty(n, width, dtype=dtype)


def of_each_hook(pair: Pair, n_hooks: int) -> list[Pair]:
    """Return the inputs and targets of each of the hooks that rows [n, n_hooks * d_in] hold side by side."""
    x, y = pair
    if n_hooks == 1:
        return [pair]
    inputs = [columns.contiguous() for columns in x.chunk(n_hooks, dim=1)]
    targets = inputs if y is x else [columns.contiguous() for columns in y.chunk(n_hooks, dim=1)]
    return list(zip(inputs, targets, strict=True))


def on_device(pair: Pair, device: torch.device) -> Pair:
    """Return inputs and targets in fp32 on a device: one tensor where they were one."""
    return in_fp32(to_device(pair, device))


def to_device(pair: Pair, device: torch.device) -> Pair:
    """Return inputs and targets on a device: one tensor where they were one."""
    x, y = pair
    inputs = x.to(device)
    return inputs, inputs if y is x else y.to(device)


def in_fp32(pair: Pair) -> Pair:
    """Return inputs and targets in fp32: one tensor where they were one."""
    x, y = pair
    inputs = x.float()
    return inputs, inputs if y is x else y.float()


def norms_of(rows: Tensor) -> Tensor:
    """Return the norm of each row [n, d], fp32; infinite or NaN where fp32 cannot compute with the row."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms


def are_finite(x: Tensor, y: Tensor) -> Tensor:
    """Return for each row, bool [n], whether fp32 can compute with it and with its target."""
    finite = norms_of(x) < torch.inf
    return finite if y is x else finite & (norms_of(y) < torch.inf)


class Source(ABC):
    """Activations; `place` is how to call them in a message and `meta` what is known of their origin.

    Where there is a `d_out`, every row has a target of that width beside it and a transcoder is trained. Where there
    are several hooks, a row is of one token, with what each of them gives side by side: [n_hooks * d_in], and likewise
    its target.
    """

    n_hooks: int = 1
    d_in: int
    d_out: int | None = None
    # How many rows there are; None where nobody knows.
    n_tokens: int | None = None
    place: str
    meta: dict[str, Any]
    # What a user should know about how it is read.
    notes: Sequence[str] = ()

    def of_hook(self, hook: int) -> Source:
        """Return the source of one hook's rows alone, by its number."""
        return self

    def beside(self, others: Sequence[Self]) -> Source:
        """Return this source and others, which differ in their hook alone, as one of several hooks.

        Only a source with a setting `hook` needs it.
        """
        raise NotImplementedError


class IndexedSource(Source):
    """Stored activations, of which any rows can be read at any time."""

    n_tokens: int
    # Where it is made of several sets, mixed: the rows of each, and their weights; None: as many as they have rows.
    sizes: Sequence[int] = ()
    weights: Sequence[float] | None = None
    # The texts of each of these sets; empty if a shard does not record them.
    texts: Sequence[Texts] = ()
    # How rows are held out if the job does not say.
    usual_hold_out: HoldOut = "rows"
    # For a set that has grown since the run began: its rows at that time. Held-out rows are drawn from these.
    split_sizes: Sequence[int] = ()
    # Rows beside each other that may be trained on together; more than 1 where they were shuffled as they were stored.
    run: int = 1

    def of_hook(self, hook: int) -> IndexedSource:
        return self

    def continue_from(self, before: DataRecord) -> None:
        """Keep the row numbers of a run that was trained on `before`; new rows follow them."""

    def read_by_all_threads(self) -> None:
        """Read with all threads of this process from now on: of a rank on a GPU they have nothing else to do."""

    @abstractmethod
    def rows(self, indices: Indices) -> Tensor:
        """Return these rows [n, d_in] as stored, in ascending order of their number: a batch has no order to keep."""

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        """Return inputs [n, d_in] and their targets [n, d_out] as `rows` gives them: the same tensor for an SAE.

        A source that can reads them straight into what `empty` gives.
        """
        x = self.rows(indices)
        return x, x

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Name a row for a message."""

    def first_not_finite(self, indices: Indices) -> int | None:
        """Read these rows again and return the lowest one that is not finite at one of the hooks, or None."""
        of_hooks = [are_finite(*pair) for pair in of_each_hook(self.pairs(indices), self.n_hooks)]
        bad = ~torch.stack(of_hooks).all(dim=0)
        return int(np.sort(indices)[int(bad.int().argmax())]) if bad.any() else None


class StreamSource(Source):
    """Activations that come once and in an order of their own, like those of a language model as it reads text.

    Ranks with tokens of their own read a part of the stream each; ranks with the same tokens read the same part. A part
    has to give the same rows in the same order every time: that is what makes a resumed run go on exactly.
    """

    # Rows of its part that a rank holds to mix them.
    shuffle_tokens: int
    # Whether rows cost so much that ranks with the same part make a share of them each; `divide` is then called.
    is_divided: bool = False
    # Whether `documents` returns the texts of rows.
    knows_texts: bool = False
    # Devices of this rank that only make rows, set before `begin`; without one they are made where they are trained on.
    own_devices: Sequence[torch.device] = ()

    @abstractmethod
    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        """Go to the first row of part `rank` of `n_ranks`; called once. No row is in two parts.

        `device` is where rows are trained on, and where they can be made if there are no `own_devices`.
        """

    @abstractmethod
    def next_rows(self) -> Pair | None:
        """Return the next rows of the part, as many as suit the stream, on any device; None where it has ended.

        They are never changed by the caller, and must not be changed later by the stream.
        """

    def documents(self) -> Tensor:
        """Return the text number of each row of the last `next_rows`, int64 [n] on the CPU.

        A text has the same number in all parts, and later texts mostly have higher numbers.
        """
        raise NotImplementedError

    def divide(self, peers: Group) -> None:
        """Make only a share of the rows, and get the others of `peers`, which read the same part; called after `begin`.

        From then on all of them go on and back at the same rows. They exchange tensors on the CPU.
        """
        raise NotImplementedError

    @abstractmethod
    def state(self) -> Any:
        """Return where in its part the stream is, in a few values that JSON can hold."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go where the stream was when `state` returned this, in this process or in an earlier one."""
