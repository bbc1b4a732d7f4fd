"""Rebuilds the store from the run folders, and repairs inconsistencies caused by a crash."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.mending import end_jobs_elsewhere
from sae_tui.jobs.record import read_record
from sae_tui.jobs.revive import reconcile_and_revive
from sae_tui.jobs.states import describe_state, stands
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.user import user_name
from trainer.contract.files import clear_cut_off
from trainer.contract.paths import DataDir, RunPaths, numbered
from trainer.contract.runs.lock import is_held
from trainer.contract.runs.rank_spec import RankSpec, read_spec
from trainer.contract.settings.toml import parse_toml, read_plain_text
from trainer.contract.store.database import StoreCorrupt, StoreError, check_whole, set_aside
from trainer.contract.store.job_store import Control
from trainer.contract.store.migrations import Schema
from trainer.contract.store.rows import LARGEST_ID, Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import gibibytes


def repair(data: DataDir, host: str = "") -> Iterator[str]:
    """Repair the stores step by step, and yield a message for each repair; no job is deleted.

    If `host` is given, also end the jobs on that host, which must be permanently gone.

    Raise `StoreError` if a store cannot be repaired.
    """
    data.create()
    stores: tuple[tuple[Path, Schema], ...] = ((data.control_db, "control"), (data.gpu_db, "gpu"))
    for path, schema in stores:
        if backup := _put_aside_if_corrupt(path, schema):
            yield f"{path.name} was corrupt; it is kept as {backup.name}, and rebuilt"
    # Emptying the trash restores files from interrupted deletions, so do this before reading the run folders.
    try:
        if freed := trash.empty(data):
            yield f"{gibibytes(freed)} of files from deleted jobs were removed"
    except trash.FilesLeft as error:
        yield str(error)
    for folder in (data.root, *_folders_of_runs(data)):
        clear_cut_off(folder)
    with open_control(data) as control:
        yield from _mend_rows(data, control)
        listed_ids = {job.id for job in control.jobs()} | control.unreadable
        for folder in sorted(_runs(data), key=lambda folder: int(folder.name)):
            job_id = int(folder.name)
            if job_id not in listed_ids and (job := _recover_job(data, job_id)):
                control.restore(job)
                control.add_event(job_id, "repaired", "its row was rebuilt from its run folder", "warning")
                yield f"job {job_id} ({job.name}) is in the list again, {describe_state(job).word}"
        active = {job.id for job in control.active_jobs()}
    for folder in _runs(data):
        if not is_held(RunPaths(folder).lock_file):
            RunPaths(folder).free_reserve()
        metrics = RunPaths(folder).metrics_db
        if int(folder.name) not in active and (backup := _put_aside_if_corrupt(metrics, "metrics")):
            yield f"the metrics of job {folder.name} were corrupt; they are kept as {backup}"
    for job_id in reconcile_and_revive(data):
        with open_control(data) as control:
            job = control.job(job_id)
            yield f"job {job_id} {stands(job)}" + (f": {job.error}" if job.error else "")
    yield from end_jobs_elsewhere(data, host)


def _mend_rows(data: DataDir, control: Control) -> Iterator[str]:
    """Rebuild unreadable rows from their readable columns and their run folders; yield a message for each row."""
    control.jobs()
    for job_id in sorted(control.unreadable):
        recovered = _recover_job(data, job_id) if 0 < job_id <= LARGEST_ID else None
        job = control.mend(job_id, recovered or _unknown_job(job_id), above=data.last_id())
        control.add_event(job.id, "repaired", "its row could not be read, and was rebuilt", "warning")
        rebuilt = f"was rebuilt as job {job.id} ({job.name}), {describe_state(job).word}"
        yield f"the row of job {job_id} could not be read, and {rebuilt}"


def _unknown_job(job_id: int) -> Job:
    """Return a placeholder for a job with an unreadable row.

    The row's readable columns then replace the placeholder's values.
    """
    return Job(
        id=job_id, name="unknown", state=JobState.LOST, config="", user=user_name(), host=socket.gethostname(),
        device="cpu", gpu_source="none", created=time.time(), error="its outcome is unknown: its row was lost",
    )  # fmt: skip


def _runs(data: DataDir) -> list[Path]:
    return [folder for folder in numbered(data.root / "runs") if folder.is_dir() and not folder.is_symlink()]


def _folders_of_runs(data: DataDir) -> Iterator[Path]:
    """Yield the run and attempt folders, where interrupted writes may have left temporary files."""
    for run in _runs(data):
        yield from (folder for folder in (run, *run.glob("attempt*")) if not folder.is_symlink())


def _put_aside_if_corrupt(path: Path, schema: Schema) -> Path | None:
    """Move a corrupt store and its auxiliary files aside; return the new path, or None if it is intact or missing."""
    if not path.exists():
        return None
    try:
        check_whole(path, schema)
    except StoreCorrupt:
        return set_aside(path, "corrupt")
    except StoreError:
        # The store is not corrupt, but it is locked, was written by a newer version, or is not readable by this user.
        return None
    return None


def _recover_job(data: DataDir, job_id: int) -> Job | None:
    """Return a job as recorded in its run folder: the row at its last start, updated with its progress and outcome.

    Return None if the folder has neither a record nor a job file.
    """
    paths = data.run(job_id)
    job = read_record(paths) or _guess_job(paths, job_id)
    if job is None:
        return None
    run = LiveRun(paths)
    run.poll()
    fields = run.fields()
    run.close()
    ending = read_ending(paths.exit_file)
    if ending and ending.state.is_final:
        fields |= ending.fields() | {"state": ending.state}
    # A manually copied folder is a separate job, so use the folder number as the id.
    return msgspec.structs.replace(job, id=job_id, **fields)


def _guess_job(paths: RunPaths, job_id: int) -> Job | None:
    """Reconstruct the row for a run without a record from its job file and its last attempt.

    Return None if there is no readable job file.
    """
    try:
        text = read_plain_text(paths.job_file)
        name = str(parse_toml(text).get("name", "sae"))
    except (OSError, ValueError):
        return None
    spec = _last_spec(paths)
    n_devices, device = (spec.n_devices, spec.device) if spec else (1, "cpu")
    made = paths.root.stat().st_mtime
    return Job(
        id=job_id, name=name, state=JobState.LOST, config=text, user=user_name(), host=socket.gethostname(),
        device=device, gpu_source="auto", gpu_uuids=spec.gpu_uuids if spec else (),
        gpu_ids=tuple(range(len(spec.gpu_uuids))) if spec else (), distributed=n_devices > 1, world_size=n_devices,
        attempt=spec.attempt if spec else 0, created=made, queued=made,
        error="its outcome is unknown: its store was lost",
    )  # fmt: skip


def _last_spec(paths: RunPaths) -> RankSpec | None:
    specs = sorted(paths.root.glob("attempt*/ranks.json"), key=lambda file: file.stat().st_mtime)
    with contextlib.suppress(OSError, ValueError, IndexError):
        return read_spec(specs[-1])
    return None
