"""Inspects an extraction's output folder before launch, and reports how existing rows would be handled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.json_file import read_json
from trainer.contract.object_paths import is_url
from trainer.contract.settings.declare import show
from trainer.contract.settings.extract import PARTS, STATE, ExtractJob, identity


class _ShardRecord(msgspec.Struct):
    n_tokens: int


class _ExtractionRecord(msgspec.Struct):
    """The fields of an extraction's state that identify the job and give the number of stored rows."""

    job: dict[str, Any]
    shards: list[list[_ShardRecord]]
    is_finished: bool = False
    n_ranks: int = 1

    @property
    def n_stored(self) -> int:
        return sum(shard.n_tokens for of_hook in self.shards[:1] for shard in of_hook)


def what_is_there(job: ExtractJob) -> str:
    """Return a sentence about the rows in `extract.output` and whether this job resumes from them; "" if none."""
    return _whats_there(job)[0]


def check_what_is_there(job: ExtractJob) -> list[Problem]:
    """Return the problem with the rows in `extract.output`: an error if the job would be refused, else a warning."""
    sentence, is_refused = _whats_there(job)
    return [Problem("extract.output", sentence, "error" if is_refused else "warning")] if sentence else []


def n_stored_rows(job: ExtractJob) -> int:
    """Return the number of this extraction's rows in complete shards; 0 if the folder contains another extraction."""
    output = job.local_output
    state = read_json(output / STATE, _ExtractionRecord)
    return _n_rows(output, state) if state and not _changed(job, state) else 0


def _whats_there(job: ExtractJob) -> tuple[str, bool]:
    """Return a sentence about the contents of `extract.output`, and whether they would cause this job to be refused."""
    output = job.local_output
    state = read_json(output / STATE, _ExtractionRecord)
    if is_url(job.extract.output) and (state is None or _changed(job, state)):
        return "", False  # only the trainer looks at the store, when the job starts
    n_rows = _n_rows(output, state) if state else 0
    if state is None or not n_rows:
        other_users = "" if state else _other_users(job)
        return other_users, bool(other_users)
    if changed := _changed(job, state):
        other = f"{output} contains an extraction with a different {changed[0]}, {show(state.job.get(changed[0]))}"
        return f"{other}, so this extraction would be refused; choose another folder", True
    if state.is_finished:
        return f"{job.extract.output} contains this extraction, finished with {n_rows:,} rows", False
    return (
        f"{job.extract.output} contains the first {n_rows:,} rows of this extraction, which resumes after them",
        False,
    )


def _changed(job: ExtractJob, state: _ExtractionRecord) -> list[str]:
    """Return the paths of settings that differ between this job and the job that stored the rows."""
    return [path for path, value in identity(job).items() if state.job.get(path) != value]


def _n_rows(output: Path, state: _ExtractionRecord) -> int:
    """Return the number of rows in complete shards, summed over all extracting processes."""
    if state.is_finished or state.n_ranks == 1:
        return state.n_stored
    parts = (read_json(output / PARTS / str(rank) / STATE, _ExtractionRecord) for rank in range(state.n_ranks))
    return sum(part.n_stored for part in parts if part)


def _other_users(job: ExtractJob) -> str:
    for hook in job.model.hooks:
        if any((folder := job.folder(hook)).glob("*.safetensors")):
            return f"{folder} contains unrelated shards, so this extraction would be refused; choose another folder"
    return ""
