"""Selects the tokens whose rows are kept; excludes special tokens and each document's first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.settings.extract import Extract
from trainer.extraction.packing import PADDING, ContextBatch


class KeptPositions(NamedTuple):
    """The kept tokens' indices in the flattened batch, int64 [n], and the counts of excluded tokens by kind."""

    indices: Tensor
    n_special: int
    n_first: int


def kept_positions(batch: ContextBatch, special_ids: Sequence[int], settings: Extract) -> KeptPositions:
    """Select a batch's tokens according to the settings `skip_first` and `keep_special`."""
    ids, positions = (torch.from_numpy(one).flatten() for one in batch[:2])
    is_token = positions != PADDING
    special = is_token & torch.isin(ids, torch.tensor(special_ids, dtype=torch.int64))
    is_special = special & (not settings.keep_special)
    is_first = is_token & ~special & (positions < settings.skip_first)
    indices = torch.nonzero(is_token & ~is_special & ~is_first).flatten()
    return KeptPositions(indices, int(is_special.sum()), int(is_first.sum()))
