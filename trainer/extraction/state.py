"""An extraction's saved progress, per process and combined."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import msgspec

from trainer.checkpoints.atomic_folder import not_written
from trainer.contract.errors import UsageError
from trainer.contract.json_file import read_json, write_json
from trainer.contract.object_paths import is_url
from trainer.contract.settings.declare import show
from trainer.contract.settings.extract import PARTS, STATE, ExtractJob, identity, lack_of_output
from trainer.contract.wording import plural
from trainer.extraction.shard_writer import DimensionSums, ShardFile, add_sums

SPECIAL, FIRST, OUTLIERS = "special tokens", "first tokens", "outlier norms"


class ExtractionState(msgspec.Struct):
    """An extraction's progress, saved after each shard; if there are several processes, each saves its own.

    The extraction continues with batch number `batch`, whose first `offset` rows are stored. `left_out` is the number
    of rows before this batch that were excluded for each reason. At each hook, `limits` contains the largest allowed
    norm, and `means` the mean subtracted from int8 rows. `dtype` is the dtype of the stored rows, and `computed` the
    one in which the model computed them, "" if an earlier version wrote this. `lacking` is the number of rows missing
    from a process's share because it has run out of text.
    """

    job: dict[str, Any]
    dtype: str
    limits: list[float]
    batch: int
    offset: int
    left_out: dict[str, int]
    shards: list[list[ShardFile]]
    sums: list[DimensionSums | None]
    is_finished: bool = False
    n_ranks: int = 1
    lacking: int = 0
    means: list[list[float]] = []
    computed: str = ""

    @property
    def n_stored(self) -> int:
        return sum(shard.n_tokens for shard in self.shards[0])


def stored_state(job: ExtractJob, n_ranks: int = 1) -> ExtractionState:
    """Return the job's progress from its output folder; raise `UsageError` if the folder contains another extraction.

    If there are several processes, return their combined progress.
    """
    output, asked = job.local_output, identity(job)
    if lack := lack_of_output(job):
        raise UsageError(f"extract.output: {lack}")
    state = _read(output)
    if state is None:
        _refuse_other_users(job)
    if state is None or not state.n_stored:
        return _new_state(asked, n_ranks)
    if changed := [path for path, value in asked.items() if state.job.get(path) != value]:
        was = f"with a different {changed[0]}, {show(state.job.get(changed[0]))}"
        raise UsageError(f"extract.output: {job.extract.output} contains an extraction {was}; choose another folder")
    if not state.is_finished and state.n_ranks != n_ranks:
        was = f"an extraction by {plural(state.n_ranks, 'process')}"
        remedy = f"use {state.n_ranks} again, or choose another folder"
        raise UsageError(f"launch.gpus: {job.extract.output} contains {was}, not {n_ranks}; {remedy}")
    # `restore_progress` has compared the shards at a URL with the progress.
    for hook, shards in () if is_url(job.extract.output) else zip(job.model.hooks, state.shards, strict=True):
        for shard in shards:
            if not (file := job.folder(hook) / shard.name).exists():
                raise UsageError(f"extract.output: {file} is missing; delete {output} or choose another folder")
    return state


def part_folder(job: ExtractJob, rank: int, n_ranks: int) -> Path:
    """Return the folder in which a process saves its progress; a single process uses the output folder."""
    return job.local_output if n_ranks == 1 else job.local_output / PARTS / str(rank)


def part_state(job: ExtractJob, rank: int, n_ranks: int) -> ExtractionState:
    """Return one process's saved progress."""
    state = read_json(part_folder(job, rank, n_ranks) / STATE, ExtractionState)
    return state if state and state.n_stored else _new_state(identity(job), n_ranks)


def write_state(folder: Path, state: ExtractionState) -> None:
    """Save an extraction's progress; raise `UserError` if it cannot be written."""
    try:
        write_json(folder / STATE, state)
    except OSError as error:
        raise not_written(folder, error.strerror or str(error), error.errno) from None


def merged(parts: list[ExtractionState]) -> ExtractionState:
    """Return the combined state of several processes."""
    hooks = range(len(parts[0].shards))
    sums: list[DimensionSums | None] = [None for _ in hooks]
    for part, hook in itertools.product(parts, hooks):
        if (own := part.sums[hook]) is not None:
            sums[hook] = add_sums(sums[hook], own)
    return ExtractionState(
        job=parts[0].job,
        dtype=next((part.dtype for part in parts if part.dtype), ""),
        limits=next((part.limits for part in parts if part.limits), []),
        # The index of the batch in which a single process would read the last context that any process has read.
        batch=len(parts) * (max(part.batch for part in parts) + 1) - 1,
        offset=0,
        left_out={reason: sum(part.left_out[reason] for part in parts) for reason in parts[0].left_out},
        shards=[sorted((shard for part in parts for shard in part.shards[hook]), key=_by_name) for hook in hooks],
        sums=sums,
        n_ranks=len(parts),
        means=next((part.means for part in parts if part.means), []),
        computed=next((part.computed for part in parts if part.computed), ""),
    )


def forget_parts(job: ExtractJob) -> None:
    """Remove the saved progress of the individual processes."""
    shutil.rmtree(job.local_output / PARTS, ignore_errors=True)


def _by_name(shard: ShardFile) -> str:
    return shard.name


def _read(output: Path) -> ExtractionState | None:
    state = read_json(output / STATE, ExtractionState)
    if state is None or state.n_ranks == 1 or state.is_finished:
        return state
    parts = [read_json(output / PARTS / str(rank) / STATE, ExtractionState) for rank in range(state.n_ranks)]
    return merged([part or _new_state(state.job, state.n_ranks) for part in parts])


def _new_state(asked: dict[str, Any], n_ranks: int) -> ExtractionState:
    counts, n_hooks = dict.fromkeys((SPECIAL, FIRST, OUTLIERS), 0), len(asked["model.hooks"])
    return ExtractionState(asked, "", [], 0, 0, counts, [[] for _ in range(n_hooks)], [None] * n_hooks, n_ranks=n_ranks)


def _refuse_other_users(job: ExtractJob) -> None:
    """Raise `UsageError` if a hook's folder contains unknown shards, since readers would mix them with new ones."""
    for hook in job.model.hooks:
        if any((folder := job.folder(hook)).glob("*.safetensors")):
            message = f"{folder} contains other shards; choose another folder or delete them"
            raise UsageError(f"extract.output: {message}")
