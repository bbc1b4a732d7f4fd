"""Activations of a language model as it reads: a stream, nothing of which is stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from trainer.activations.base import Pair, StreamSource
from trainer.contract.errors import UserError
from trainer.contract.settings.extract import Extract, ExtractJob
from trainer.contract.settings.language import Model, Text
from trainer.contract.settings.model_source import ModelKnobs
from trainer.extraction.extraction import contexts_at_once, contexts_of
from trainer.extraction.kept_rows import kept_places
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import Batch, batches


class ModelStream(StreamSource):
    """The rows of one hook, a forward pass after the other; part r of n has the contexts r, r + n, r + 2n and so on.

    Each part goes through the whole text and has a model of its own. To go on, the text is tokenized again from its
    start, which the model does not read again.
    """

    def __init__(self, **settings: Any) -> None:
        self._knobs = knobs = ModelKnobs(**settings)
        self.d_in, self.place, self.shuffle_tokens = knobs.shape().d_in, knobs.place, knobs.shuffle_tokens
        self._job = job = _job_of(knobs)
        hook = knobs.place_in_model
        self.meta = {
            "model_name": knobs.model,
            "model_revision": knobs.revision,
            "hook_name": hook.transformer_lens or hook.name,
            "hook": hook.name,
            "context_size": job.text.context,
            "dataset_path": knobs.place,
            "special_tokens_dropped": not knobs.keep_special,
        }

    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self._rank, self._n_ranks = rank, n_ranks
        self._model = LanguageModel(self._job, device)
        self.restore({"batch": 0})

    def next_rows(self) -> Pair | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        self._n_read += 1
        places = kept_places(batch, self._model.tokenizer.special, self._job.extract).places
        (rows,) = self._model.rows(batch, places)
        if rows.shape[1] != self.d_in:
            raise UserError(f"data.d_in: a row of {self._knobs.hook} has {rows.shape[1]} numbers, not {self.d_in}")
        return rows, rows

    def state(self) -> dict[str, int]:
        return {"batch": self._n_read}

    def restore(self, state: dict[str, int]) -> None:
        self._n_read = state["batch"]
        self._batches = itertools.islice(self._all_batches(), self._n_read, None)

    def _all_batches(self) -> Iterator[Batch]:
        contexts = itertools.islice(contexts_of(self._job, self._model), self._rank, None, self._n_ranks)
        return batches(contexts, contexts_at_once(self._job), fills=not self._model.packs)


def _job_of(knobs: ModelKnobs) -> ExtractJob:
    """Return the extraction that would store the same rows."""
    return ExtractJob(
        model=Model(knobs.model, [knobs.hook], knobs.revision, knobs.dtype, knobs.remote_code),
        text=Text(knobs.text, knobs.dataset, knobs.subset, knobs.split, knobs.column, knobs.context),
        extract=Extract(batch_tokens=knobs.batch_tokens, skip_first=knobs.skip_first, keep_special=knobs.keep_special),
    )
