"""Runs an extraction: batches through the model, rows chosen, shards written; resumed where the last shard ended."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.checkpoints.atomic_folder import free_bytes, not_written
from trainer.contract.errors import UsageError, UserError
from trainer.contract.json_file import read_json, write_json
from trainer.contract.paths import private_folder, refuse_link
from trainer.contract.runs.lock import RunLock
from trainer.contract.settings.extract import STATE, ExtractJob
from trainer.contract.settings.knobs import show
from trainer.contract.wording import distinct_sizes
from trainer.extraction.kept_rows import kept_places
from trainer.extraction.language_model import DTYPES, LanguageModel
from trainer.extraction.meta import META, TOKENS, meta_of
from trainer.extraction.packing import Batch, batches, pack, separate
from trainer.extraction.shard_writer import Blocks, Origin, ShardFile, Sums, add_sums
from trainer.extraction.text import documents
from trainer.runtime.out_of_memory import is_shortage

SPECIAL, FIRST, OUTLIERS = "special tokens", "first tokens", "outlier norms"


class State(msgspec.Struct):
    """How far an extraction is, written after each shard.

    It goes on with the batch of number `batch`, of which `offset` rows are stored. `left_out` counts the rows before
    that batch that were left out, by reason. `limits` are the largest norms, by hook, `dtype` is that of the rows.
    """

    job: dict[str, Any]
    dtype: str
    limits: list[float]
    batch: int
    offset: int
    left_out: dict[str, int]
    shards: list[list[ShardFile]]
    sums: list[Sums | None]
    is_finished: bool = False

    @property
    def n_stored(self) -> int:
        return sum(shard.n_tokens for shard in self.shards[0])


class Result(msgspec.Struct):
    """What an extraction came to: a folder for each hook, the rows in each, and rows left out by reason.

    `tokens_per_s` is what the model read in this process.
    """

    state: str
    outputs: dict[str, str]
    n_tokens: int
    left_out: dict[str, int]
    tokens_per_s: float | None


class Chosen(NamedTuple):
    """The rows of a batch that are kept, for each hook [n, d_in], and how many are left out by reason."""

    rows: list[Tensor]
    origin: Origin
    left_out: dict[str, int]

    def cut(self, first: int, last: int) -> Chosen:
        """Return rows `first` to `last` of them."""
        rows = [of_hook[first:last] for of_hook in self.rows]
        return Chosen(rows, Origin(*(one[first:last] for one in self.origin)), self.left_out)


def stored_state(job: ExtractJob) -> State:
    """Return how far this job has come in its output folder; raise `UsageError` where that holds another extraction."""
    output, asked = Path(job.extract.output), _identity(job)
    if output.exists() and not output.is_dir():
        raise UsageError(f"extract.output: {output} is not a folder; choose another")
    if job.text.path and output.is_relative_to(job.text.path):
        raise UsageError(f"extract.output: {output} is in text.path, all files of which are read; choose another")
    state = read_json(output / STATE, State)
    if state is None:
        _refuse_strangers(job)
    if state is None or not state.n_stored:
        return _new_state(asked)
    if changed := [path for path, value in asked.items() if state.job.get(path) != value]:
        was = f"of another {changed[0]}, {show(state.job.get(changed[0]))}"
        raise UsageError(f"extract.output: {output} holds an extraction {was}; choose another folder")
    for hook, shards in zip(job.model.hooks, state.shards, strict=True):
        for shard in shards:
            if not (file := job.folder(hook) / shard.name).exists():
                raise UsageError(f"extract.output: {file} is missing; delete {output} or choose another folder")
    return state


def _new_state(asked: dict[str, Any]) -> State:
    counts, n_hooks = dict.fromkeys((SPECIAL, FIRST, OUTLIERS), 0), len(asked["model.hooks"])
    return State(asked, "", [], 0, 0, counts, [[] for _ in range(n_hooks)], [None] * n_hooks)


def _refuse_strangers(job: ExtractJob) -> None:
    """Raise `UsageError` where shards lie in a hook's folder of which nothing is known: rows would be mixed."""
    for hook in job.model.hooks:
        if any((folder := job.folder(hook)).glob("*.safetensors")):
            message = f"{folder} holds shards of something else; choose another folder or delete them"
            raise UsageError(f"extract.output: {message}")


def _identity(job: ExtractJob) -> dict[str, Any]:
    """Return the settings that decide what is stored, by their paths."""
    sections = {name: msgspec.to_builtins(getattr(job, name)) for name in ("model", "text", "extract")}
    table = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {path: value for path, value in table.items() if path != "extract.output"}


def extract(
    job: ExtractJob,
    device: torch.device,
    stop: threading.Event,
    advance: Callable[[int], object],
    tell: Callable[[str], object],
) -> Result:
    """Run an extraction, or what is left of it, and return what it came to; `tell` gets sentences on the way.

    Raise `UserError` saying what to change.
    """
    state = stored_state(job)
    if state.is_finished:
        return result_of(job, state, "finished")
    tell(f"loading {job.model.path}")
    try:
        extraction = Extraction(job, device, stop, advance)
        if not extraction.model.packs:
            tell("one document in each context: packed, this model would let one see the other")
        return extraction.run()
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        cure = f"give fewer than {job.extract.batch_tokens}, or a shorter text.context"
        raise UserError(f"extract.batch_tokens: memory has run out; {cure}") from None


def contexts_of(job: ExtractJob, model: LanguageModel) -> Iterator[Batch]:
    """Yield the contexts of a job's text, each a batch of one; the same ones every time."""
    tokens = model.tokenizer.tokens(documents(job.text))
    return (pack if model.packs else separate)(tokens, job.text.context)


def contexts_at_once(job: ExtractJob) -> int:
    """Return how many contexts a batch of an extraction has."""
    return max(1, job.extract.batch_tokens // job.text.context)


class Extraction:
    """One job on one device; `advance(n)` is told how many rows are kept so far."""

    def __init__(
        self,
        job: ExtractJob,
        device: torch.device,
        stop: threading.Event,
        advance: Callable[[int], object] = lambda n: None,
    ) -> None:
        self._job, self._stop, self._advance = job, stop, advance
        self._output = Path(job.extract.output)
        refuse_link(self._output)
        self._state = stored_state(job)
        self.model = LanguageModel(job, device)
        self._dtype = self.model.dtype if job.extract.dtype == "auto" else DTYPES[job.extract.dtype]
        self._refuse_other_dtype()
        folders = [job.folder(hook) for hook in job.model.hooks]
        self._blocks = Blocks(folders, job.extract.shard_rows, job.extract.seed)
        self._began, self._n_read = 0.0, 0

    def _refuse_other_dtype(self) -> None:
        """Raise `UsageError` where an extraction is to go on with rows of another type, as that of another device."""
        dtype = str(self._dtype).removeprefix("torch.")
        if self._state.n_stored and self._state.dtype != dtype:
            was = f"the shards in {self._output} hold {self._state.dtype}, and this device gives {dtype}"
            raise UsageError(f"extract.output: {was}; go on where they were made, or choose another folder")
        self._state.dtype = dtype

    def run(self) -> Result:
        """Extract until there are rows enough, the text ends, or a stop; return what it came to."""
        private_folder(self._output)
        with RunLock(self._output):
            # A shard without this file beside it would be a stranger's.
            self._note()
            return self._run()

    def _run(self) -> Result:
        self._began = time.monotonic()
        for number, batch in self._batches():
            if self._stop.is_set():
                return self._result("stopped")
            self._take(number, self._choose(batch))
            self._n_read += batch.ids.size
            self._advance(self._job.extract.n_tokens - self._n_missing)
            # Not before the first batch: one that is read again is not counted yet.
            if self._n_missing <= 0:
                break
        if not self._state.n_stored and not self._blocks.n_waiting:
            raise UserError("text.path: the text gives no row; give more text")
        self._finish()
        return self._result("finished")

    @property
    def _n_missing(self) -> int:
        return self._job.extract.n_tokens - self._state.n_stored - self._blocks.n_waiting

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of the text, by their numbers, from where the state is; the same ones every time."""
        contexts, n = contexts_of(self._job, self.model), contexts_at_once(self._job)
        return itertools.islice(enumerate(batches(contexts, n, fills=not self.model.packs)), self._state.batch, None)

    def _choose(self, batch: Batch) -> Chosen:
        """Run the model over a batch and return the rows to keep."""
        places, n_special, n_first = kept_places(batch, self.model.tokenizer.special, self._job.extract)
        rows = [of_hook.to(self._dtype) for of_hook in self.model.rows(batch, places)]
        fits = self._within_limits(rows)
        left_out = {SPECIAL: n_special, FIRST: n_first, OUTLIERS: int((~fits).sum())}
        places = places[fits]
        origin = Origin(*(torch.from_numpy(one).flatten()[places].int() for one in batch))
        return Chosen([of_hook[fits.to(of_hook.device)] for of_hook in rows], origin, left_out)

    def _within_limits(self, rows: list[Tensor]) -> Tensor:
        """Tell for each row, bool [n], whether no hook's norm is infinite or beyond its limit."""
        fits = torch.ones(len(rows[0]), dtype=torch.bool)
        if not len(fits):
            return fits
        norms = [of_hook.float().norm(dim=1).cpu() for of_hook in rows]
        self._state.limits = self._state.limits or self._limits(norms)
        for of_hook, limit in zip(norms, self._state.limits, strict=True):
            fits &= of_hook <= limit
        return fits

    def _limits(self, norms: list[Tensor]) -> list[float]:
        """Return the largest norm of each hook, by those of the first batch [n] each."""
        most = self._job.extract.max_norm
        limits = []
        for hook, of_hook in zip(self._job.model.hooks, norms, strict=True):
            finite = of_hook[of_hook.isfinite()]
            if not len(finite):
                cure = 'set model.dtype and extract.dtype to "fp32"'
                raise UserError(f"model.dtype: the activations of {hook} overflow; {cure}")
            limits.append(most * float(finite.median()) if most else torch.finfo(torch.float32).max)
        return limits

    def _take(self, number: int, chosen: Chosen) -> None:
        """Add what is still missing of a batch's rows to the blocks, and store those that are full."""
        stored = self._state.offset if number == self._state.batch else 0
        last = min(len(chosen.origin.token_ids), stored + self._n_missing)
        if not self._state.n_stored and not self._blocks.n_waiting:
            self._refuse_full_disk(chosen.rows)
        self._blocks.add(*chosen.cut(stored, last)[:2])
        while self._blocks.is_full:
            # What waits after that is all of this batch.
            self._state.batch, self._state.offset = number, last - (self._blocks.n_waiting - self._blocks.shard_rows)
            self._store()
            self._note()
        for reason, n in chosen.left_out.items():
            self._state.left_out[reason] += n

    def _store(self) -> None:
        """Write a shard of each hook."""
        written = self._blocks.write(len(self._state.shards[0]))
        for hook, (shard, sums) in enumerate(written):
            self._state.shards[hook].append(shard)
            self._state.sums[hook] = add_sums(self._state.sums[hook], sums)

    def _note(self) -> None:
        try:
            write_json(self._output / STATE, self._state)
        except OSError as error:
            raise not_written(self._output, error.strerror or str(error), error.errno) from None

    def _refuse_full_disk(self, rows: list[Tensor]) -> None:
        """Raise `UserError` where the disk has not room for all rows."""
        needed = self._job.extract.n_tokens * self._blocks.row_bytes(rows)
        free = free_bytes(self._output)
        if needed > free:
            raise not_written(self._output, "it takes {}, and {} are free".format(*distinct_sizes(needed, free)))

    def _finish(self) -> None:
        """Write the last shard, and what is known of the rows beside them.

        That shard is noted with the end: before, going on would read its batch once more.
        """
        if self._blocks.n_waiting:
            self._store()
        for number, hook in enumerate(self._job.model.hooks):
            sums = self._state.sums[number]
            assert sums is not None
            facts = meta_of(self._job, number, self.model, sums, self._state.shards[number])
            of_all = {"dtype": self._state.dtype, "left_out": self._state.left_out}
            write_json(self._job.folder(hook) / TOKENS, self.model.tokenizer.texts())
            write_json(self._job.folder(hook) / META, facts | of_all)
        self._state.is_finished = True
        self._note()

    def _result(self, state: str) -> Result:
        rate = self._n_read / (time.monotonic() - self._began) if self._n_read else None
        return result_of(self._job, self._state, state, rate)


def result_of(job: ExtractJob, state: State, word: str, rate: float | None = None) -> Result:
    """Return what an extraction has come to."""
    outputs = {hook: str(job.folder(hook)) for hook in job.model.hooks}
    return Result(word, outputs, state.n_stored, state.left_out, rate)
