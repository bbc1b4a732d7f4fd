"""Finds a job's output: the folder of its SAE or of its extracted activations."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.contract.object_paths import is_url
from trainer.contract.paths import DataDir
from trainer.contract.settings.catalog import KINDS, KindEntry
from trainer.contract.settings.job_file import class_of, parse_as, parse_job
from trainer.contract.settings.toml import table_of
from trainer.contract.settings.typed import parse_time_limit
from trainer.contract.store.rows import Job

if TYPE_CHECKING:
    from trainer.contract.settings.command import Command
    from trainer.contract.settings.extract import ExtractJob

# The reason a resumed extraction starts from the first row.
NO_SHARD = "no shard was complete"
_FIRST_SECTION = re.compile(r"^[ \t]*\[", re.MULTILINE)


def output_of(data: DataDir, job: Job) -> str | None:
    """Return a job's output folder, or None if there is no output yet or if a program decides where its output goes."""
    if kind_of(job.config).is_program:
        return None
    if not extracts(job.config):
        return data.exported_folder(job.id)
    if (extraction := _extraction(job.config)) is None:
        return None
    if is_url(extraction.extract.output):
        return extraction.extract.output if rows_stored(job) else None
    folders = map(extraction.folder, extraction.model.hooks)
    has_rows = any(any(folder.glob("*.safetensors")) for folder in folders)
    return str(Path(extraction.extract.output)) if has_rows else None


def why_no_sae(job: Job) -> str:
    """Return a sentence saying why a job never has an SAE, or "" if it may have one."""
    if extracts(job.config):
        return f"job {job.id} stores activations and has no SAE; evaluate a job that trains on them"
    return f"job {job.id} runs a command and has no SAE" if kind_of(job.config).is_program else ""


def rows_stored(job: Job) -> int:
    """Return the number of rows in complete shards; a resumed extraction continues after these rows."""
    from trainer.contract.planning.stored_extraction import n_stored_rows

    extraction = _extraction(job.config)
    return n_stored_rows(extraction) if extraction else 0


def name_of_output(job: Job) -> str:
    """Return the subject and verb for a message about a job's output, such as "SAE is" in "its SAE is in ..."."""
    return "activations are" if extracts(job.config) else "SAE is"


def names_of_hooks(job: Job) -> dict[str, list[str]]:
    """Return a dict mapping each hook in an extraction to the other names for the same position in the model.

    Once rows are stored, the other names include the module name.
    """
    from trainer.contract.settings.hook_names import other_names

    extraction = _extraction(job.config)
    if extraction is None:
        return {}
    return {hook: other_names(hook, extraction.folder(hook)) for hook in extraction.model.hooks}


@functools.lru_cache(maxsize=16)
def _extraction(config: str) -> ExtractJob | None:
    if not extracts(config):
        return None
    from trainer.contract.settings.extract import ExtractJob

    extraction, _ = parse_as(ExtractJob, table_of(config))
    return extraction


@functools.lru_cache(maxsize=1024)
def command_of(config: str) -> Command | None:
    """Return the program that a recorded job file runs, or None if it runs none or this version cannot read it."""
    if not kind_of(config).is_program:
        return None
    from trainer.contract.settings.command import CommandJob

    job, _ = parse_as(CommandJob, table_of(config))
    return job.command if job else None


def may_tell_tokens(config: str) -> bool:
    """Return whether the data for a recorded job file may include tokens, or True if it is not on this machine."""
    from trainer.contract.settings import tokens_of_data

    job, _ = parse_job(table_of(config))
    return job is None or tokens_of_data.may_tell_tokens(job.hooks.values())


@functools.lru_cache(maxsize=4096)
def kind_of(config: str) -> KindEntry:
    """Return the registry entry for the kind of job described by a recorded job file."""
    # Parsing an entire job file takes 0.5 ms, and a list may contain a thousand jobs. The kind is above all sections.
    table = table_of(_FIRST_SECTION.split(config, maxsplit=1)[0]) or table_of(config)
    return KINDS[class_of(table).kind]


@functools.lru_cache(maxsize=4096)
def time_limit_s(config: str) -> float | None:
    """Return a recorded job file's time limit in seconds, or None if it has none."""
    # Parsing takes 0.3 ms, and most jobs have no time limit.
    launch = table_of(config).get("launch") if "time_limit" in config else None
    limit = launch.get("time_limit") if isinstance(launch, dict) else None
    with contextlib.suppress(ValueError):
        return parse_time_limit(limit) if isinstance(limit, str) else None
    return None


@functools.lru_cache(maxsize=256)
def extracts(config: str) -> bool:
    """Return whether a recorded job file describes an extraction."""
    return kind_of(config) is KINDS["extract"]
