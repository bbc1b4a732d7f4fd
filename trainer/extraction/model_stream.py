"""Streams a language model's activations on a text, without storing them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

    Each rank has the model on its training device, or on each of its `own_devices`. If a crosscoder reads several
    models, each of these devices has all of them, and they read the same contexts one after the other. Models on
    `own_devices` read ahead. If several ranks need the same part, they take turns reading its batches and exchange the
    rows. The rows and their order do not depend on the devices. A resumed run retokenizes the text from the start, but
    its model does not reread the contexts of earlier batches.
    """

    is_divided = True
    knows_texts = True

    def __init__(self, **values: Any) -> None:
        self._settings = settings = ModelSettings(**values)
        self.d_in, self.d_out = settings.shape()[:2]
        self.place, self.shuffle_tokens = settings.place, settings.shuffle_tokens
        # The streams for the individual SAEs, and for the hook and the model of each part of their rows.
        self._of_hooks, self._parts = [self], [self]
        self._readers: Readers | None = None
        self._batches: ReadAhead[ContextBatch] | None = None
        self._documents = _NO_DOCUMENTS
        hook, target = map(parse_hook, ends_of(settings.hook))
        self.meta = {
            "model_name": settings.models[0],
            "model_revision": settings.revisions[0],
            "hook_name": hook.transformer_lens or hook.name,
            "hook": hook.name,
            "context_size": settings.context,
            "dataset_path": settings.place,
            "special_tokens_dropped": not settings.keep_special,
        }
        if self.d_out is not None:
            self.meta["hook_name_out"] = target.transformer_lens

    def of_hook(self, hook: int) -> ModelStream:
        return self._of_hooks[hook]

    def of_part(self, number: int) -> ModelStream:
        return self._parts[number]

    def beside(self, others: Sequence[ModelStream]) -> ModelStream:
        together = self._with_parts([part for one in (self, *others) for part in one._parts])
        together._of_hooks = [self, *others]
        together.n_hooks, together.d_in = len(together._of_hooks), self.d_in
        return together

    def joined(self, others: Sequence[ModelStream]) -> ModelStream:
        together = self._with_parts([self, *others])
        together.part_widths = [one.d_in for one in together._parts]
        together.d_in = sum(together.part_widths)
        if together.d_out is not None:
            together.d_out = sum(one.d_out or 0 for one in together._parts)
        together.meta = joined_meta([one.meta for one in together._parts])
        return together

    def _with_parts(self, parts: list[ModelStream]) -> ModelStream:
        together = ModelStream(**msgspec.structs.asdict(self._settings))
        together._parts = parts
        return together

    def begin(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self._rank, self._n_ranks, self._peers = rank, n_ranks, Group()
        of_models: dict[tuple[str, str | None], list[ModelStream]] = {}
        for part in self._parts:
            version = part._settings.models[0], part._settings.revisions[0]
            of_models.setdefault(version, []).append(part)
        jobs = [job_of_stream(parts[0]._settings, _hooks_of(parts)) for parts in of_models.values()]
        on_devices = [load_alike(jobs, one) for one in self.own_devices or [device]]
        self._model, self._job = on_devices[0][0], jobs[0]
        self._dtype = functools.reduce(torch.promote_types, [model.dtype for model in on_devices[0]])
        self._special = self._model.tokenizer.special
        # The number of batches queued on a GPU before the host waits for the oldest batch's rows. A CPU runs each batch
        # immediately.
        self._ahead = 0 if device.type == "cpu" else 1
        numbers = [[self._parts.index(part) for part in parts] for parts in of_models.values()]
        widths = [part.d_in for part in self._parts]
        self._readers_of_devices = [
            _BatchReader(models, jobs, numbers, widths, self._special, self.d_out is not None) for models in on_devices
        ]
        for model, parts in zip(on_devices[0], of_models.values(), strict=True):
            for number, part in enumerate(parts):
                part.meta |= part._model_meta(model, number, len(parts) + number)
        for stream in (self, *self._of_hooks):
            if stream.part_widths:
                stream.meta = joined_meta([part.meta for part in stream._parts])
        self.restore({"batch": 0})

    def _model_meta(self, model: LanguageModel, number: int, target: int) -> dict[str, Any]:
        """Return the model-dependent metadata for a hook, with the same keys as in a `meta.json`."""
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
        nothing = torch.empty(0, sum(widths), dtype=self._dtype)
        together = nothing if own is None else own[0] if own[1] is own[0] else torch.cat(own, dim=1)
        of_all = gather_rows(self._peers, together.cpu(), is_there=own is not None)
        pairs = [(rows, rows) if self.d_out is None else rows.split(widths, dim=1) for rows in of_all]
        return list(zip(pairs, gather_rows(self._peers, documents, is_there=own is not None), strict=True))

    def _next_own(self) -> Pair | None:
        if self.own_devices:
            reads = [reader.rows_on_cpu for reader in self._readers_of_devices]
            self._readers = self._readers or Readers(reads, self._own_batches)
            return self._readers.next()
        while len(self._coming) <= self._ahead and (batch := next(self._own_batches, None)) is not None:
            self._coming.append(self._readers_of_devices[0].begin(batch))
        return self._coming.popleft().read() if self._coming else None

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
            indices = kept_positions(batch, self._special, self._job.extract).indices
            self._coming_documents.append(torch.from_numpy(batch.documents).flatten()[indices])
            yield batch

    def _all_batches(self) -> Iterator[ContextBatch]:
        contexts = itertools.islice(contexts_of(self._job, self._model), self._rank, None, self._n_ranks)
        return batches(contexts, contexts_at_once(self._job), fills=not self._model.packs)


def _hooks_of(parts: Sequence[ModelStream]) -> list[str]:
    """Return the hooks for all inputs, followed by the hooks for all targets if there are transcoders."""
    ends = [ends_of(part._settings.hook) for part in parts]
    return [hook for hook, _ in ends] + ([] if parts[0].d_out is None else [target for _, target in ends])


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
    """Runs a device's language models on batches; returns the rows for all inputs and, for transcoders, all targets.

    `numbers` contains the numbers of each model's parts, and `widths` the width of every part. Rows of the tokens
    `special`, which are special in any of the models, are left out.
    """

    models: list[LanguageModel]
    jobs: list[ExtractJob]
    numbers: list[list[int]]
    widths: list[int]
    special: list[int]
    has_targets: bool

    def rows_of(self, batch: ContextBatch) -> Pair:
        indices = kept_positions(batch, self.special, self.jobs[0].extract).indices
        inputs: dict[int, Tensor] = {}
        targets: dict[int, Tensor] = {}
        for model, job, numbers in zip(self.models, self.jobs, self.numbers, strict=True):
            of_hooks = model.rows(batch, indices)
            ends = len(of_hooks) // len(numbers)
            for hook, rows, number in zip(job.model.hooks, of_hooks, numbers * ends, strict=True):
                if rows.shape[1] != self.widths[number]:
                    message = f"a row of {hook} has {rows.shape[1]} values, not {self.widths[number]}"
                    raise UserError(f"data.d_in: {message}")
                (targets if number in inputs else inputs)[number] = rows
        x = _side_by_side(inputs)
        return x, _side_by_side(targets) if self.has_targets else x

    def begin(self, batch: ContextBatch) -> _StreamRows:
        """Start the model's forward pass on a batch."""
        x, y = self.rows_of(batch)
        return _StreamRows(HostCopy(x), None if y is x else HostCopy(y))

    def rows_on_cpu(self, batch: ContextBatch) -> Pair:
        """Run the model on a batch, in the thread for the model's device, and return the rows on the CPU.

        If the device runs out of memory, raise a `UserError` that does not suggest a smaller SAE or training batch,
        because neither would help.
        """
        if (device := self.models[0].device).type == "cuda":
            torch.cuda.set_device(device)
        try:
            return to_device(self.rows_of(batch), _CPU)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            lower = f"use fewer than {self.jobs[0].extract.batch_tokens}, or a shorter data.context"
            raise UserError(f"data.batch_tokens: the language model's device has too little memory; {lower}") from None


def _side_by_side(rows: Mapping[int, Tensor]) -> Tensor:
    """Concatenate the rows of all parts in the order of their numbers."""
    of_parts = [rows[number] for number in sorted(rows)]
    return of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts, dim=1)


def load_alike(jobs: Sequence[ExtractJob], device: torch.device) -> list[LanguageModel]:
    """Load several models that read the same contexts; raise `UserError` if their tokenizers differ."""
    # Load the models sequentially, so that host memory holds only one model's weights at a time.
    models = [_load(job, device) for job in jobs]
    share_tokenizer(models)
    return models


def share_tokenizer(models: Sequence[LanguageModel]) -> None:
    """Make several models read the same tokens; raise `UserError` if their tokenizers differ.

    All models get the first tokenizer that can also read chats, or the first one if none can. Tokens that are special
    in any of the models are special in all of them.
    """
    first, *others = models
    for other in others:
        if differs := first.tokenizer.differs_from(other.tokenizer):
            message = f"{first.name} and {other.name} have different tokenizers: {differs}"
            raise UserError(f"data.model: {message}; choose models that read the same tokens")
    special = sorted({token for model in models for token in model.tokenizer.special})
    tokenizer = next((model.tokenizer for model in models if model.tokenizer.reads_chats), first.tokenizer)
    tokenizer.special = special
    # If one of the models cannot read packed documents, no model gets them.
    packs = all(model.packs for model in models)
    for model in models:
        model.tokenizer, model.packs = tokenizer, packs


def job_of_stream(settings: ModelSettings, hooks: list[str]) -> ExtractJob:
    """Return the extraction job that would store a stream's rows; its `output` is an empty string."""
    return ExtractJob(
        model=Model(settings.models[0], hooks, settings.revisions[0], settings.dtype, settings.remote_code),
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
