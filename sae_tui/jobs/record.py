"""Reads and writes a run's `record.json`, a copy of the job's row used to rebuild a lost store."""

from __future__ import annotations

import contextlib

import msgspec

from trainer.contract.json_file import read_json, write_json
from trainer.contract.paths import RunPaths
from trainer.contract.store.rows import Job


def write_record(paths: RunPaths, job: Job) -> None:
    """Write a job's row atomically; ignore disk errors because they must not prevent the job from running."""
    with contextlib.suppress(OSError):
        write_json(paths.record_file, job)


def as_recorded(paths: RunPaths, job: Job) -> Job:
    """Return the row for rebuilding a lost store: the recorded row, but with the state of `job`.

    The recorded row includes edits missing from `job`. If there is no record, return `job`.
    """
    record = read_record(paths)
    return msgspec.structs.replace(record, state=job.state) if record and record.id == job.id else job


def read_record(paths: RunPaths) -> Job | None:
    """Return a job's recorded row, or None if there is no readable record."""
    return read_json(paths.record_file, Job)
