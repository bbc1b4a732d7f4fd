"""An example of a new stream of activations: settings and class in one file."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import StreamSource
from trainer.activations.synthetic import Synthetic
from trainer.contract.settings.catalog import SourceEntry
from trainer.contract.settings.declare import about
from trainer.contract.settings.sources import DataShape, StreamSettings, SyntheticSettings

# The number of rows per chunk. No batch size is a multiple of this number.
CHUNK = 37


class ToySettings(StreamSettings, frozen=True, kw_only=True):
    d_in: Annotated[int, about("Width of a row.", ge=1)] = 16
    ends_after: Annotated[int, about("Rows until the stream ends; none: never.", ge=0)] | None = None
    first_bad: Annotated[int, about("The first row that is not finite; none: all are.", ge=0)] | None = None
    text_rows: Annotated[int, about("Rows of each text, over all parts together; 0: texts are not known.", ge=0)] = 0
    bad_rows: Annotated[int, about("Rows that are not finite, one after the other.", ge=1)] = 1

    @property
    def place(self) -> str:
        return "a toy stream"

    def shape(self) -> DataShape:
        return DataShape(self.d_in, None, None)


class ToyStream(StreamSource):
    """A stream of rows from a known dictionary. Part r of n consists of rows r, r + n, r + 2n and so on."""

    def __init__(self, **values: Any) -> None:
        self._settings = settings = ToySettings(**values)
        self.d_in, self.place, self.meta = settings.d_in, settings.place, {"model_name": "toy"}
        self.shuffle_tokens, self.knows_texts = settings.shuffle_tokens, settings.text_rows > 0
        of_dictionary = SyntheticSettings(d_in=settings.d_in, n_features=40, active=4.0, noise=0.05)
        self._made = Synthetic(**{name: getattr(of_dictionary, name) for name in of_dictionary.__struct_fields__})

    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self._rank, self._n_ranks, self._next = rank, n_ranks, 0

    def next_rows(self) -> tuple[Tensor, Tensor] | None:
        numbers = np.arange(self._next, self._next + CHUNK) * self._n_ranks + self._rank
        if self._settings.ends_after is not None:
            numbers = numbers[numbers < self._settings.ends_after]
        if not len(numbers):
            return None
        self._next += len(numbers)
        self._numbers = numbers
        rows = self._made.rows(numbers)
        if (first := self._settings.first_bad) is not None:
            rows[(numbers >= first) & (numbers < first + self._settings.bad_rows)] = torch.nan
        return rows, rows

    def documents(self) -> Tensor:
        return torch.from_numpy(self._numbers // self._settings.text_rows)

    def state(self) -> dict[str, int]:
        return {"next": self._next}

    def restore(self, state: dict[str, int]) -> None:
        self._next = state["next"]


ENTRY = SourceEntry("support.toy_stream:ToyStream", "Rows from a known dictionary.", ToySettings)
