"""Runs an extraction job: runs the model, selects rows and writes shards. A job can be resumed after each shard."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.int8_rows import encoded
from trainer.checkpoints.atomic_folder import free_bytes, not_written
from trainer.contract.errors import UsageError, UserError
from trainer.contract.json_file import write_json
from trainer.contract.object_paths import is_url, joined
from trainer.contract.paths import private_folder, refuse_link
from trainer.contract.progress import Progress
from trainer.contract.runs.lock import RunLock
from trainer.contract.settings.extract import SHARDS_IN_FLIGHT, ExtractJob
from trainer.contract.settings.tokens_of_data import META, TOKEN_TEXTS
from trainer.contract.wording import distinct_sizes, plural
from trainer.extraction.kept_rows import KeptPositions, kept_positions
from trainer.extraction.language_model import DTYPES, LanguageModel
from trainer.extraction.meta import facts_of_all, facts_of_hook
from trainer.extraction.packing import ContextBatch, batches, pack, separate
from trainer.extraction.peers import Alone, PeersStopped
from trainer.extraction.read_ahead import ReadAhead
from trainer.extraction.shard_writer import ShardBuffer, ShardsBegun, StoredOrigin, add_sums
from trainer.extraction.state import (
    FIRST,
    OUTLIERS,
    SPECIAL,
    ExtractionState,
    forget_parts,
    merged,
    part_folder,
    part_state,
    stored_state,
    write_state,
)
from trainer.extraction.text import documents
from trainer.extraction.token_bytes import write_tokens
from trainer.extraction.uploads import uploads_of
from trainer.runtime.device_queue import HostCopy
from trainer.runtime.out_of_memory import is_shortage


class ExtractionResult(msgspec.Struct):
    """An extraction's result: each hook's folder, the row count, and the number of rows excluded for each reason.

    `tokens_per_s` is the mean rate since this process started. Once the extraction has finished, rank 0's rate includes
    the tokens of all ranks.
    """

    state: str
    outputs: dict[str, str]
    n_tokens: int
    left_out: dict[str, int]
    tokens_per_s: float | None


class BatchToRead(NamedTuple):
    """A batch to read, its number, the indices of the tokens whose rows are kept, and the origins of those rows."""

    number: int
    batch: ContextBatch
    kept: KeptPositions
    origin: StoredOrigin


class RowsInTransfer(NamedTuple):
    """A batch whose rows [n, d_in] and norms [n] at each hook are being copied from the device to the host."""

    asked: BatchToRead
    rows: list[HostCopy]
    norms: list[HostCopy]


class RowsToStore(NamedTuple):
    """The rows [n, d_in] of a batch at each hook, and the indices and origins of the kept rows.

    The indices `at` are None if all rows are kept.
    """

    rows: list[Tensor]
    at: Tensor | None
    origin: StoredOrigin

    def cut(self, first: int, last: int) -> RowsToStore:
        """Return the kept rows from `first` to `last` - 1."""
        origin = StoredOrigin(*(one[first:last] for one in self.origin))
        if self.at is not None:
            return RowsToStore(self.rows, self.at[first:last], origin)
        return RowsToStore([of_hook[first:last] for of_hook in self.rows], None, origin)


class Writing(NamedTuple):
    """The shards being written, one per hook, and the progress to save once they are written."""

    shards: ShardsBegun
    batch: int
    offset: int
    left_out: dict[str, int]


def extract(
    job: ExtractJob,
    device: torch.device,
    peers: Alone,
    tell: Callable[[str], object],
    model: LanguageModel | None = None,
) -> ExtractionResult:
    """Run or resume an extraction and return its result; `tell` is called with progress messages.

    The job's model is loaded unless `model` is given. If there are several processes, each reads its share of the text.
    Raise `UserError` with a remedy on failure.
    """
    state = stored_state(job, peers.size)
    if state.is_finished:
        forget_parts(job)
        return result_of(job, state, "finished")
    tell(f"loading {job.model.path}")
    try:
        with Progress("loading the model"):
            extraction = Extraction(job, device, peers, model)
        if not extraction.model.packs:
            tell("using one document per context, since this model cannot mask packed documents")
        result = extraction.run()
        if n := extraction.model.tokenizer.n_mended:
            tell(f"unpaired surrogates in {plural(n, 'document')} were replaced with U+FFFD")
        return result
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        cure = f"use fewer than {job.extract.batch_tokens}, or a shorter text.context"
        raise UserError(f"extract.batch_tokens: out of memory; {cure}") from None


def contexts_of(job: ExtractJob, model: LanguageModel) -> Iterator[ContextBatch]:
    """Yield the contexts of a job's text, each as a batch of one; every call yields the same contexts."""
    tokens = model.tokenizer.tokens(documents(job.text))
    return (pack if model.packs else separate)(tokens, job.text.context)


def contexts_at_once(job: ExtractJob) -> int:
    """Return the number of contexts in an extraction batch."""
    return max(1, job.extract.batch_tokens // job.text.context)


class Extraction:
    """An extraction job on one device: the full job, or one process's share of it.

    Process r of n reads contexts r, r + n, r + 2n and so on, like a rank reading a stream. Each process keeps an equal
    share of the rows.
    """

    def __init__(self, job: ExtractJob, device: torch.device, peers: Alone, model: LanguageModel | None = None) -> None:
        self._job, self._peers = job, peers
        self._output, self._folder = job.local_output, part_folder(job, peers.rank, peers.size)
        self._uploads = uploads_of(job)
        refuse_link(self._output)
        self._state = stored_state(job, peers.size)
        self.model = model or LanguageModel(job, device)
        self._is_int8 = job.extract.dtype == "int8"
        self._dtype = DTYPES.get(job.extract.dtype, self.model.dtype)
        self._stored_dtype = "int8" if self._is_int8 else _name(self._dtype)
        self._refuse_other_dtype()
        folders = [job.folder(hook) for hook in job.model.hooks]
        rank = peers.rank if peers.size > 1 else None
        self._blocks = ShardBuffer(folders, job.extract.shard_rows, job.extract.seed, rank)
        self._share = share_of(job.extract.n_tokens, peers.rank, peers.size)
        # The number of batches queued on a GPU before the host waits for the oldest batch's rows. A CPU runs each batch
        # immediately.
        self._ahead = 0 if device.type == "cpu" else 1
        self._n_kept, self._n_shards = 0, 0
        self._writing: Writing | None = None
        # The number of extra rows to keep for processes that have run out of text; None until known.
        self._extra: int | None = None
        self._began, self._n_read, self._last_batch = 0.0, 0, 0

    def run(self) -> ExtractionResult:
        """Extract until there are enough rows, the text runs out, or a stop is requested; return the result."""
        with contextlib.ExitStack() as locks, contextlib.suppress(PeersStopped):
            locks.callback(self._uploads.close)
            self._peers.begin(lambda: self._prepare(locks))
            self._open(locks)
            if self._state.is_finished:
                self._peers.extra(self._state.lacking)
                return self._finish()
            with contextlib.closing(self._blocks):
                if self._read():
                    self._complete()
                    return self._finish()
                self._uploads.drain()
        if self._peers.size > 1:
            self._state = stored_state(self._job, self._peers.size)
        return result_of(self._job, self._state, "stopped", self._rate())

    def _prepare(self, locks: contextlib.ExitStack) -> None:
        """Lock and prepare the output folder before any process writes to it."""
        locks.enter_context(RunLock(private_folder(self._output, "extract.output")))
        state = stored_state(self._job, self._peers.size)
        if not state.n_stored:
            forget_parts(self._job)
        if self._peers.size > 1:
            # Without the state file, a restarted extraction would refuse the output folder, because the shards in it
            # would look like unrelated files.
            write_state(self._output, state)
            self._uploads.add([], self._output, state)
            self._uploads.drain()

    def _open(self, locks: contextlib.ExitStack) -> None:
        """Lock this process's own folder, and restore its saved progress."""
        if self._peers.size > 1:
            locks.enter_context(RunLock(private_folder(self._folder)))
        self._state = part_state(self._job, self._peers.rank, self._peers.size)
        self._state.dtype = self._state.dtype or self._stored_dtype
        self._state.computed = self._state.computed or _name(self.model.dtype)
        self._blocks.means = [torch.tensor(mean) for mean in self._state.means]
        write_state(self._folder, self._state)
        self._uploads.add([], self._folder, self._state)
        self._began, self._last_batch = time.monotonic(), self._state.batch
        self._first = self._state.batch, self._state.offset
        self._n_kept, self._n_shards = self._state.n_stored, len(self._state.shards[0])

    def _refuse_other_dtype(self) -> None:
        """Raise `UsageError` if the stored rows were computed in a different dtype from the one on this device."""
        state, own = self._state, _name(self.model.dtype)
        # Stored rows do not show in which dtype they were computed if they are int8, or if `extract.dtype` is set.
        if state.n_stored and (state.dtype != self._stored_dtype or state.computed not in ("", own)):
            was = f"the shards in {self._output} were computed in {state.computed or state.dtype}, but this device"
            remedy = "continue on the device that made them, or choose another folder"
            raise UsageError(f"extract.output: {was} computes in {own}; {remedy}")

    def _read(self) -> bool:
        """Read until this process has all its rows or runs out of text; return False if it has to stop earlier."""
        with contextlib.closing(ReadAhead(self._batches())) as batches:
            for coming in self._coming(batches):
                self._read_batch(coming)
                # Check only after a batch, because a resumed extraction must first add its first batch to `left_out`.
                if self._n_missing <= 0:
                    return True
        self._note_written()
        if self._peers.is_stopped:
            return False
        if self._extra is None:
            self._state.lacking = max(0, self._n_missing)
            self._peers.extra(self._state.lacking)
        return True

    def _coming(self, batches: Iterator[BatchToRead]) -> Iterator[RowsInTransfer]:
        """Yield each batch's rows while the model reads the next batches; return early if a stop is requested."""
        ahead: deque[RowsInTransfer] = deque()
        for asked in batches:
            if self._peers.is_stopped:
                return
            ahead.append(self._begin(asked))
            if len(ahead) > self._ahead:
                yield ahead.popleft()
        yield from ahead

    def _begin(self, asked: BatchToRead) -> RowsInTransfer:
        """Start the model's forward pass on a batch."""
        rows = self._rows(asked.batch, asked.kept.indices)
        norms = _norms(rows)
        if self._is_int8:
            rows = self._encoded(rows)
        return RowsInTransfer(asked, [HostCopy(one) for one in rows], [HostCopy(one) for one in norms])

    def _encoded(self, rows: list[Tensor]) -> list[Tensor]:
        """Return rows encoded as int8; the first call with rows sets the means to subtract, unless they are saved."""
        if not self._blocks.means and len(rows[0]):
            self._blocks.means = self._first_means(rows if self._peers.size == 1 else self._first_rows())
            self._state.means = [mean.tolist() for mean in self._blocks.means]
        means = self._blocks.means or [torch.zeros(one.shape[1]) for one in rows]
        return [encoded(one, mean.to(one.device)) for one, mean in zip(rows, means, strict=True)]

    def _first_means(self, rows: list[Tensor]) -> list[Tensor]:
        """Return the mean of each hook's first rows, without outliers; all processes get the same means."""
        fits = self._within_limits([one.cpu() for one in _norms(rows)])
        kept = [one.cpu()[fits] if fits.any() else one.cpu() for one in rows]
        return [one.double().mean(0).nan_to_num(0, 0, 0).float() for one in kept]

    def _read_batch(self, coming: RowsInTransfer) -> None:
        """Keep the rows of a batch that this process needs for its own share, then rows that other processes lack."""
        number, kept = coming.asked.number, coming.asked.kept
        if self._writing and self._writing.shards.is_done:
            self._note_written()
        chosen, n_outliers = self._choose(coming)
        self._n_read += coming.asked.batch.ids.size
        taken = self._take(number, chosen, self._first[1] if number == self._first[0] else 0)
        if self._n_missing <= 0 and self._extra is None:
            self._note_written()
            self._extra = self._peers.extra(0)
            self._take(number, chosen, taken)
        for reason, n in ((SPECIAL, kept.n_special), (FIRST, kept.n_first), (OUTLIERS, n_outliers)):
            self._state.left_out[reason] += n
        self._last_batch = number
        self._peers.kept(self._n_kept)

    @property
    def _n_missing(self) -> int:
        return self._share + (self._extra or 0) - self._n_kept

    def _batches(self) -> Iterator[BatchToRead]:
        """Yield this process's batches, starting at the saved position; every call yields the same batches."""
        n_contexts = 0
        for number, batch in enumerate(self._all_batches(self._peers.rank, self._peers.size)):
            first, n_contexts = n_contexts, n_contexts + len(batch.ids)
            if number < self._first[0]:
                continue
            kept = kept_positions(batch, self.model.tokenizer.special, self._job.extract)
            ids, positions, documents = (torch.from_numpy(one).flatten()[kept.indices].int() for one in batch)
            origin = StoredOrigin(ids, positions, documents, self._places(batch, first)[kept.indices])
            yield BatchToRead(number, batch, kept, origin)

    def _places(self, batch: ContextBatch, first: int) -> Tensor:
        """Return the place in the text of each token in a batch, whose first context is this process's `first`."""
        n_contexts, n_tokens = batch.ids.shape
        contexts = torch.arange(first, first + n_contexts) * self._peers.size + self._peers.rank
        return (contexts[:, None] * self._job.text.context + torch.arange(n_tokens)).flatten()

    def _all_batches(self, rank: int = 0, size: int = 1) -> Iterator[ContextBatch]:
        contexts = itertools.islice(contexts_of(self._job, self.model), rank, None, size)
        return batches(contexts, contexts_at_once(self._job), fills=not self.model.packs)

    def _choose(self, coming: RowsInTransfer) -> tuple[RowsToStore, int]:
        """Wait for a batch's rows, and return the rows within the norm limits and the number of outliers."""
        fits = self._within_limits([one.read() for one in coming.norms])
        rows, n_outliers = [one.read() for one in coming.rows], int((~fits).sum())
        if not n_outliers:
            return RowsToStore(rows, None, coming.asked.origin), 0
        at = torch.nonzero(fits).flatten()
        return RowsToStore(rows, at, StoredOrigin(*(one[at] for one in coming.asked.origin))), n_outliers

    def _rows(self, batch: ContextBatch, indices: Tensor) -> list[Tensor]:
        return [of_hook.to(self._dtype) for of_hook in self.model.rows(batch, indices)]

    def _within_limits(self, norms: list[Tensor]) -> Tensor:
        """Return a mask [n] of the rows with finite norms within the limit at every hook.

        `norms` has one tensor [n] for each hook. The first call sets the limits if the state has none.
        """
        fits = torch.ones(len(norms[0]), dtype=torch.bool)
        if not len(fits):
            return fits
        if not self._state.limits:
            first = norms if self._peers.size == 1 else [one.cpu() for one in _norms(self._first_rows())]
            self._state.limits = self._limits(first)
        for of_hook, limit in zip(norms, self._state.limits, strict=True):
            fits &= of_hook <= limit
        return fits

    def _first_rows(self) -> list[Tensor]:
        """Return the first rows of the entire text, so that all processes set the same limits and means."""
        for batch in self._all_batches():
            indices = kept_positions(batch, self.model.tokenizer.special, self._job.extract).indices
            if len(indices):
                return self._rows(batch, indices)
        raise AssertionError("a process has rows")

    def _limits(self, norms: list[Tensor]) -> list[float]:
        """Return the norm limit for each hook, computed from the norms [n] in the first batch.

        Raise `UserError` if all norms at a hook are infinite or NaN.
        """
        most = self._job.extract.max_norm
        limits = []
        for hook, of_hook in zip(self._job.model.hooks, norms, strict=True):
            finite = of_hook[of_hook.isfinite()]
            if not len(finite):
                cure = 'set model.dtype and extract.dtype to "fp32"'
                raise UserError(f"model.dtype: the activations of {hook} overflow; {cure}")
            limits.append(most * float(finite.median()) if most else torch.finfo(torch.float32).max)
        return limits

    def _take(self, number: int, chosen: RowsToStore, first: int) -> int:
        """Add a batch's chosen rows, from index `first` on, until no more are needed, and write each full shard.

        Return the index after the last added row.
        """
        last = min(len(chosen.origin.token_ids), first + max(0, self._n_missing))
        if not self._n_kept:
            self._refuse_full_disk(chosen.rows)
        own = chosen.cut(first, last)
        self._blocks.add(own.rows, own.origin, own.at)
        self._n_kept += last - first
        while self._blocks.is_full:
            # The rows that remain after this shard all come from the current batch.
            self._store(number, last - (self._blocks.n_waiting - self._blocks.shard_rows))
        return last

    def _store(self, batch: int, offset: int) -> None:
        """Wait until the previous shards are written, then start writing the next shard of each hook."""
        self._note_written()
        shards = self._blocks.begin_write(self._n_shards)
        self._writing = Writing(shards, batch, offset, dict(self._state.left_out))
        self._n_shards += 1

    def _note_written(self) -> None:
        """Wait for the shards being written, and save this process's progress."""
        if writing := self._writing:
            self._take_up(writing)
            state = msgspec.structs.replace(self._state, left_out=writing.left_out)
            write_state(self._folder, state)
            self._uploads.add(self._last_shards(), self._folder, state)

    def _take_up(self, writing: Writing) -> None:
        """Wait until the shards are written, and add them to the state."""
        self._writing = None
        written = writing.shards.end()
        self._state.batch, self._state.offset = writing.batch, writing.offset
        for hook, (shard, sums) in enumerate(written):
            self._state.shards[hook].append(shard)
            self._state.sums[hook] = add_sums(self._state.sums[hook], sums)

    def _last_shards(self) -> list[Path]:
        """Return the last written shard of each hook."""
        folders = map(self._job.folder, self._job.model.hooks)
        return [folder / shards[-1].name for folder, shards in zip(folders, self._state.shards, strict=True)]

    def _refuse_full_disk(self, rows: list[Tensor]) -> None:
        """Raise `UserError` if the disk has too little free space for all of this process's rows."""
        in_flight = (SHARDS_IN_FLIGHT + 1) * self._blocks.shard_rows
        n_rows = min(self._share, in_flight) if is_url(self._job.extract.output) else self._share
        needed = n_rows * self._blocks.row_bytes(rows)
        free = free_bytes(self._output)
        if needed > free:
            raise not_written(self._output, "it needs {}, but only {} are free".format(*distinct_sizes(needed, free)))

    def _complete(self) -> None:
        """Write this process's last shard.

        The state file records this shard only when the extraction is marked as finished. If the shard were recorded
        earlier, a resumed extraction would reread the shard's last batch.
        """
        self._note_written()
        if self._blocks.n_waiting:
            self._store(self._last_batch, 0)
            assert self._writing
            self._take_up(self._writing)
            self._uploads.add(self._last_shards())
        self._state.batch = self._last_batch
        if self._peers.size > 1:
            self._state.is_finished = True
            write_state(self._folder, self._state)
            self._uploads.add([], self._folder, self._state)
        self._uploads.drain()

    def _finish(self) -> ExtractionResult:
        """Wait for the other processes; rank 0 also writes the metadata."""
        self._peers.kept(self._n_kept)
        self._n_read = self._peers.end(max(0, self._n_kept - self._share), self._n_read)
        # Measure the rate before the steps below, such as hashing the model, because they take time but read no tokens.
        rate = self._rate()
        if self._peers.rank:
            return result_of(self._job, self._state, "finished", rate)
        if self._peers.size > 1:
            self._state = merged([part_state(self._job, rank, self._peers.size) for rank in range(self._peers.size)])
        if not self._state.n_stored:
            raise UserError("text.path: the text yields no rows; provide more text")
        described = self._describe()
        self._state.is_finished = True
        self._uploads.finish(described, self._state)
        write_state(self._output, self._state)
        forget_parts(self._job)
        return result_of(self._job, self._state, "finished", rate)

    def _describe(self) -> list[Path]:
        """Write the files that describe each hook's rows, and return them."""
        described = []
        state, tokens = self._state, self.model.tokenizer.token_bytes()
        of_all = facts_of_all(self._job, self.model) | {"dtype": state.dtype, "left_out": state.left_out}
        for number, hook in enumerate(self._job.model.hooks):
            sums, limit = state.sums[number], state.limits[number]
            assert sums is not None
            facts = facts_of_hook(self._job, number, self.model, sums, state.shards[number], limit)
            # The folder may be missing if all shards were uploaded from another machine.
            write_tokens(private_folder(self._job.folder(hook)), tokens)
            write_json(self._job.folder(hook) / META, of_all | facts)
            described += [self._job.folder(hook) / name for name in (TOKEN_TEXTS, META)]
        return described

    def _rate(self) -> float | None:
        """Return the mean number of tokens read per second, or None if no tokens were read."""
        return self._n_read / (time.monotonic() - self._began) if self._n_read else None


def share_of(n_tokens: int, rank: int, size: int) -> int:
    """Return the number of rows kept by process `rank` of `size`."""
    return n_tokens * (rank + 1) // size - n_tokens * rank // size


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _norms(rows: list[Tensor]) -> list[Tensor]:
    return [of_hook.float().norm(dim=1) for of_hook in rows]


def result_of(job: ExtractJob, state: ExtractionState, word: str, rate: float | None = None) -> ExtractionResult:
    """Return an extraction's result from its state."""
    outputs = {hook: joined(job.extract.output, hook) for hook in job.model.hooks}
    return ExtractionResult(word, outputs, state.n_stored, state.left_out, rate)
