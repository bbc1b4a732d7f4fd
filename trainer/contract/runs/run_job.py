"""Reads a run's job file; settings that did not exist when the run started get values that preserve its behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.contract.settings.job import AnyJob, JobConfig
from trainer.contract.settings.job_file import class_of, load_any, load_job, read_toml
from trainer.contract.settings.toml import read_plain_text

Read = Callable[[Path], str]


def load_run_job(job_file: Path, overrides: Sequence[str] = (), *, read: Read = read_plain_text) -> JobConfig:
    """Read the job file for a training run and apply overrides; raise `JobFileError` with all problems."""
    return load_job(job_file, [*overrides, *settings_since(job_file, read)], read=read)


def load_any_run_job(job_file: Path, *, read: Read = read_plain_text) -> AnyJob:
    """Read the job file for a run of any kind; raise `JobFileError` with all problems."""
    return load_any(job_file, settings_since(job_file, read), read=read)


def settings_since(job_file: Path, read: Read = read_plain_text) -> list[str]:
    """Return overrides for settings that are newer than the run and whose defaults would change its behaviour."""
    raw = read_toml(job_file, read)
    sections = class_of(raw).sections
    # A run's job file contains all settings of its version, so a missing setting did not exist in that version.
    before = {
        "sae.encoder_follows": "off",
        "train.lr_scaling": "off",
        "train.lr_length": "off",
        "data.hold_out": "rows",
        "data.split_seed": _first_seed(raw),
    }
    return [
        f"{path}={value}"
        for path, value in before.items()
        if path.partition(".")[0] in sections and not _has(raw, path)
    ]


def _first_seed(raw: Mapping[str, Any]) -> int:
    """Return the seed for the first SAE's weights; older versions also used it to choose held-out rows."""
    train = raw.get("train")
    seed = train.get("seed", 0) if isinstance(train, Mapping) else 0
    first = seed[0] if isinstance(seed, list) and seed else seed
    return first if isinstance(first, int) and first >= 0 else 0


def _has(raw: Mapping[str, Any], path: str) -> bool:
    section, key = path.split(".")
    return isinstance(keys := raw.get(section), dict) and key in keys
