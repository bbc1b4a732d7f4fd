"""Streams a language model's activations on a text, without storing them."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.base import Pair, StreamSource, to_device
from trainer.activations.side_by_side import joined_meta
from trainer.contract.errors import UserError
from trainer.contract.progress import Progress
from trainer.contract.settings.extract import Extract, ExtractJob
from trainer.contract.settings.hooks import ends_of, parse_hook
from trainer.contract.settings.language import Model, TextSettings
from trainer.contract.settings.model_source import ModelSettings
from trainer.extraction.extraction import contexts_at_once, contexts_of
from trainer.extraction.kept_rows import kept_positions
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import ContextBatch, batches
from trainer.extraction.read_ahead import ReadAhead
from trainer.extraction.readers import Readers
from trainer.parallel.group import Group, gather_rows
from trainer.runtime.device_queue import HostCopy
from trainer.runtime.out_of_memory import is_shortage

_CPU = torch.device("cpu")
_NO_DOCUMENTS = torch.zeros(0, dtype=torch.int64)


class ModelStream(StreamSource):
    """A stream of rows from a language model; part r of n reads contexts r, r + n, r + 2n and so on of the text.

    Each rank has one model on its training device, or one model on each of its `own_devices`. Models on `own_devices`
    read ahead. If several ranks need the same part, they take turns reading its batches and exchange the rows. The rows
    and their order do not depend on the devices. A resumed run retokenizes the text from the start, but its model does
    not reread the contexts of earlier batches.
    """

    is_divided = True
    knows_texts = True

    def __init__(self, **values: Any) -> None:
        self._settings = settings = ModelSettings(**values)
        self.d_in, self.d_out = settings.shape()[:2]
        self._width = self.d_in
        self.place, self.shuffle_tokens = settings.place, settings.shuffle_tokens
        self._of_hooks = [self]
        self._readers: Readers | None = None
        self._batches: ReadAhead[ContextBatch] | None = None
        self._documents = _NO_DOCUMENTS
        hook, target = map(parse_hook, ends_of(settings.hook))
        self.meta = {
            "model_name": settings.model,
            "model_revision": settings.revision,
            "hook_name": hook.transformer_lens or hook.name,
            "hook": hook.name,
            "context_size": settings.context,
            "dataset_path": settings.place,
            "special_tokens_dropped": not settings.keep_special,
        }
        if self.d_out is not None:
            self.meta["hook_name_out"] = target.transformer_lens

    def of_hook(self, hook: int) -> ModelStream:
        return self if self.part_widths else self._of_hooks[hook]

    def beside(self, others: Sequence[ModelStream]) -> ModelStream:
        together = ModelStream(**msgspec.structs.asdict(self._settings))
        together._of_hooks = [self, *others]
        together.n_hooks = len(together._of_hooks)
        return together

    def joined(self, others: Sequence[ModelStream]) -> ModelStream:
        together = self.beside(others)
        together.n_hooks, together.part_widths = 1, [one.d_in for one in together._of_hooks]
        together.d_in = sum(together.part_widths)
        together.meta = joined_meta([one.meta for one in together._of_hooks])
        return together

    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self._rank, self._n_ranks, self._peers = rank, n_ranks, Group()
        self._job = job_of_stream(self._settings, self._hooks)
        # Load the models sequentially, so that host memory holds only one model's weights at a time.
        models = [_load(self._job, one) for one in self.own_devices or [device]]
        self._model = models[0]
        # The number of batches queued on a GPU before the host waits for the oldest batch's rows. A CPU runs each batch
        # immediately.
        self._ahead = 0 if device.type == "cpu" else 1
        self._models = [
            _BatchReader(model, self._job, self._width, len(self._of_hooks), self.d_out is not None) for model in models
        ]
        for number, stream in enumerate(self._of_hooks):
            stream.meta |= self._told_by_model(number)
        if self.part_widths:
            self.meta = joined_meta([one.meta for one in self._of_hooks])
        self.restore({"batch": 0})

    def _told_by_model(self, number: int) -> dict[str, Any]:
        """Return the model-dependent metadata for a hook, with the same keys as in a `meta.json`."""
        model, target = self._model, len(self._of_hooks) + number
        facts = {
            "hook_name": model.names[number],
            "output_module": model.modules[number],
            "tokens_before_text": model.tokenizer.before,
            "tokens_after_text": model.tokenizer.after,
        }
        if self.d_out is None:
            return facts
        return facts | {"hook_name_out": model.names[target], "output_module_out": model.modules[target]}

    def divide(self, peers: Group) -> None:
        self._peers = peers
        self.restore(self.state())

    def next_rows(self) -> Pair | None:
        if not self._ready:
            self._ready.extend(self._next_of_all())
        if not self._ready:
            return None
        self._n_given += 1
        pair, self._documents = self._ready.popleft()
        return pair

    def documents(self) -> Tensor:
        return self._documents

    def _next_of_all(self) -> list[tuple[Pair, Tensor]]:
        """Return the rows and documents of the next batches, one batch per peer, in text order.

        At the end of the text, some peers have no batch.
        """
        own = self._next_own()
        documents = self._coming_documents.popleft() if own else _NO_DOCUMENTS
        if self._peers.size == 1:
            return [(own, documents)] if own else []
        widths = [self.n_hooks * width for width in (self.d_in, self.d_out or 0)]
        nothing = torch.empty(0, sum(widths), dtype=self._model.dtype)
        together = nothing if own is None else own[0] if own[1] is own[0] else torch.cat(own, dim=1)
        of_all = gather_rows(self._peers, together.cpu(), is_there=own is not None)
        pairs = [(rows, rows) if self.d_out is None else rows.split(widths, dim=1) for rows in of_all]
        return list(zip(pairs, gather_rows(self._peers, documents, is_there=own is not None), strict=True))

    def _next_own(self) -> Pair | None:
        if self.own_devices:
            self._readers = self._readers or Readers([model.rows_on_cpu for model in self._models], self._own_batches)
            return self._readers.next()
        while len(self._coming) <= self._ahead and (batch := next(self._own_batches, None)) is not None:
            self._coming.append(self._models[0].begin(batch))
        return self._coming.popleft().read() if self._coming else None

    @property
    def _hooks(self) -> list[str]:
        """The hooks for all inputs, followed by the hooks for all targets if there are transcoders."""
        ends = [ends_of(stream._settings.hook) for stream in self._of_hooks]
        return [hook for hook, _ in ends] + ([] if self.d_out is None else [target for _, target in ends])

    def state(self) -> dict[str, int]:
        return {"batch": self._n_given}

    def restore(self, state: dict[str, int]) -> None:
        if self._readers:
            self._readers.close()
        if self._batches:
            self._batches.close()
        self._readers, self._n_given, self._coming = None, state["batch"], deque[_StreamRows]()
        self._ready, self._coming_documents = deque[tuple[Pair, Tensor]](), deque[Tensor]()
        first = self._n_given + self._peers.index
        self._batches = ReadAhead(itertools.islice(self._all_batches(), first, None, self._peers.size))
        self._own_batches = self._noting_documents(self._batches)

    def _noting_documents(self, batches: Iterator[ContextBatch]) -> Iterator[ContextBatch]:
        """Yield the batches, and record the document numbers of their kept rows."""
        for batch in batches:
            indices = kept_positions(batch, self._model.tokenizer.special, self._job.extract).indices
            self._coming_documents.append(torch.from_numpy(batch.documents).flatten()[indices])
            yield batch

    def _all_batches(self) -> Iterator[ContextBatch]:
        contexts = itertools.islice(contexts_of(self._job, self._model), self._rank, None, self._n_ranks)
        return batches(contexts, contexts_at_once(self._job), fills=not self._model.packs)


def _load(job: ExtractJob, device: torch.device) -> LanguageModel:
    # A model's custom kernels run on the current device, which would otherwise be the rank's training device.
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, Progress("loading the model"):
        return LanguageModel(job, device)


class _StreamRows(NamedTuple):
    """Rows being copied to the CPU; `y` is None if the targets are the inputs."""

    x: HostCopy
    y: HostCopy | None

    def read(self) -> Pair:
        """Wait until the rows are copied, and return them on the CPU."""
        x = self.x.read()
        return x, x if self.y is None else self.y.read()


class _BatchReader(NamedTuple):
    """Runs a language model on batches, and returns the rows for all inputs and, for transcoders, for all targets."""

    model: LanguageModel
    job: ExtractJob
    d_in: int
    n_hooks: int
    has_targets: bool

    def rows_of(self, batch: ContextBatch) -> Pair:
        indices = kept_positions(batch, self.model.tokenizer.special, self.job.extract).indices
        of_hooks = self.model.rows(batch, indices)
        for hook, rows in zip(self.job.model.hooks, of_hooks, strict=True):
            if rows.shape[1] != self.d_in:
                raise UserError(f"data.d_in: a row of {hook} has {rows.shape[1]} values, not {self.d_in}")
        x = _side_by_side(of_hooks[: self.n_hooks])
        return x, _side_by_side(of_hooks[self.n_hooks :]) if self.has_targets else x

    def begin(self, batch: ContextBatch) -> _StreamRows:
        """Start the model's forward pass on a batch."""
        x, y = self.rows_of(batch)
        return _StreamRows(HostCopy(x), None if y is x else HostCopy(y))

    def rows_on_cpu(self, batch: ContextBatch) -> Pair:
        """Run the model on a batch, in the thread for the model's device, and return the rows on the CPU.

        If the device runs out of memory, raise a `UserError` that does not suggest a smaller SAE or training batch,
        because neither would help.
        """
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        try:
            return to_device(self.rows_of(batch), _CPU)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            lower = f"use fewer than {self.job.extract.batch_tokens}, or a shorter data.context"
            raise UserError(f"data.batch_tokens: the language model's device has too little memory; {lower}") from None


def _side_by_side(of_hooks: list[Tensor]) -> Tensor:
    return of_hooks[0] if len(of_hooks) == 1 else torch.cat(of_hooks, dim=1)


def job_of_stream(settings: ModelSettings, hooks: list[str]) -> ExtractJob:
    """Return the extraction job that would store a stream's rows; its `output` is an empty string."""
    return ExtractJob(
        model=Model(settings.model, hooks, settings.revision, settings.dtype, settings.remote_code),
        text=TextSettings(
            settings.text, settings.dataset, settings.subset, settings.split, settings.column, settings.context
        ),
        extract=Extract(
            output="",
            batch_tokens=settings.batch_tokens,
            skip_first=settings.skip_first,
            keep_special=settings.keep_special,
        ),
    )
