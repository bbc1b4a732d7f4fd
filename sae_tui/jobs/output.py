"""Where the result of a job lies: the folder of its SAE, or of the activations that it has extracted."""

from __future__ import annotations

import functools
from pathlib import Path

from trainer.contract.paths import DataDir
from trainer.contract.planning.stored_extraction import n_stored_rows
from trainer.contract.settings import tokens_of_data
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.hook_names import other_names
from trainer.contract.settings.job_file import is_extraction, parse_extraction, parse_job
from trainer.contract.settings.toml import table_of
from trainer.contract.store.rows import Job

# Why an extraction begins anew.
NO_SHARD = "it had finished no shard"


def output_of(data: DataDir, job: Job) -> str | None:
    """Return the folder of what a job has made so far; None where there is nothing yet."""
    if not extracts(job.config):
        return data.exported_folder(job.id)
    extraction, _ = parse_extraction(table_of(job.config))
    if extraction is None:
        return None
    folders = map(extraction.folder, extraction.model.hooks)
    has_rows = any(any(folder.glob("*.safetensors")) for folder in folders)
    return str(Path(extraction.extract.output)) if has_rows else None


def rows_stored(job: Job) -> int:
    """Return after how many rows an extraction would go on: those of whole shards, whatever its progress was."""
    extraction = _extraction(job.config)
    return n_stored_rows(extraction) if extraction else 0


def name_of_output(job: Job) -> str:
    """Return what a job makes, as in "its SAE is in ..."."""
    return "activations are" if extracts(job.config) else "SAE is"


def names_of_hooks(job: Job) -> dict[str, list[str]]:
    """Return the other names of the place of each hook of an extraction: its module's too, once rows are stored."""
    extraction = _extraction(job.config)
    if extraction is None:
        return {}
    return {hook: other_names(hook, extraction.folder(hook)) for hook in extraction.model.hooks}


@functools.lru_cache(maxsize=16)
def _extraction(config: str) -> ExtractJob | None:
    if not extracts(config):
        return None
    extraction, _ = parse_extraction(table_of(config))
    return extraction


def may_tell_tokens(config: str) -> bool:
    """Tell whether the data of a stored job file may tell its tokens: it is not known of data that is not here."""
    job, _ = parse_job(table_of(config))
    return job is None or tokens_of_data.may_tell_tokens(job.hooks.values())


@functools.lru_cache(maxsize=256)
def extracts(config: str) -> bool:
    """Tell whether a stored job file is that of an extraction."""
    return is_extraction(table_of(config))
