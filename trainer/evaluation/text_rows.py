"""Computes a language model's row at a hook for the last token of each text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.progress import advance
from trainer.contract.settings.declare import show
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import ContextBatch, Tokenizer

# Tokens in one forward pass of the model.
TOKENS_AT_ONCE = 4096


def last_rows(model: LanguageModel, texts: Sequence[str], context: int) -> Tensor:
    """Return the rows [n, d] of the texts' last tokens at the model's first hook, fp32 on the CPU.

    The tokenizer's special tokens surround each text, but the row is for the last token of the text itself. A text of
    more than `context` tokens loses its beginning.
    """
    pieces, places = _pieces(model.tokenizer, texts, context)
    # Batches of texts of equal length need no padding, which would change the rows of some models.
    groups = list(_of_one_length(pieces))
    rows: dict[int, Tensor] = {}
    for numbers in groups:
        batch = _batch([pieces[number] for number in numbers])
        length = batch.ids.shape[1]
        flat = torch.tensor([at * length + places[number] for at, number in enumerate(numbers)])
        rows |= dict(zip(numbers, model.rows(batch, flat)[0].float().cpu(), strict=True))
        advance(len(numbers))
    return torch.stack([rows[number] for number in range(len(texts))])


def _pieces(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each text, and the index of the last token of the text itself."""
    pieces, places = [], []
    for text, (ids, before, after) in zip(texts, tokenizer.tokens(texts), strict=True):
        if not ids:
            raise UserError(
                f"--probe: the model's tokenizer makes no tokens from the text {show(text)}; give fewer --sets"
            )
        kept = ids[-(context - len(before) - len(after)) :]
        pieces.append(before + kept + after)
        places.append(len(before) + len(kept) - 1)
    return pieces, places


def _of_one_length(pieces: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the indices of pieces of equal length that are read together."""
    by_length = sorted(range(len(pieces)), key=lambda number: len(pieces[number]))
    for length, numbers in itertools.groupby(by_length, key=lambda number: len(pieces[number])):
        remaining = iter(numbers)
        while some := list(itertools.islice(remaining, max(1, TOKENS_AT_ONCE // length))):
            yield some


def _batch(pieces: list[list[int]]) -> ContextBatch:
    ids = np.array(pieces, np.int64)
    positions = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    return ContextBatch(ids, positions, np.zeros_like(ids))
