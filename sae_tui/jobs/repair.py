"""Makes the store again from what lies in the run folders, and mends what a crash left behind."""

from __future__ import annotations

import contextlib
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sae_tui.jobs import trash
from sae_tui.jobs.actions import opened
from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.record import read_record
from sae_tui.jobs.states import shown, stands
from sae_tui.jobs.user import user_name
from trainer.contract.migrations import Schema
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.ranks import RankSpec, read_spec
from trainer.contract.records import Job
from trainer.contract.states import JobState
from trainer.contract.store import StoreCorrupt, StoreError, check_whole, set_aside


def repair(data: DataDir) -> Iterator[str]:
    """Does it step by step, and says what was done; nothing is deleted. Raises `StoreError` where it cannot be."""
    data.create()
    stores: tuple[tuple[Path, Schema], ...] = ((data.control_db, "control"), (data.gpu_db, "gpu"))
    for path, schema in stores:
        if kept := _put_aside_if_corrupt(path, schema):
            yield f"{path.name} was corrupt; it is kept as {kept.name}, and made again"
    # Before the folders are looked at: a deletion that was cut off has left some of a job in its place.
    try:
        if freed := trash.empty(data):
            yield f"{freed / 2**20:.0f} MB of deleted jobs were removed"
    except trash.FilesLeft as error:
        yield str(error)
    with opened(data) as control:
        known = {job.id for job in control.jobs()}
        for folder in sorted(_runs(data), key=lambda folder: int(folder.name)):
            job_id = int(folder.name)
            if job_id not in known and (job := _found(data, job_id)):
                control.restore(job)
                control.add_event(job_id, "repaired", "its row was made again from its run folder", "warning")
                yield f"job {job_id} ({job.name}) is in the list again, {shown(job).word}"
        active = {job.id for job in control.active_jobs()}
    for folder in _runs(data):
        metrics = RunPaths(folder).metrics_db
        if int(folder.name) not in active and (kept := _put_aside_if_corrupt(metrics, "metrics")):
            yield f"the metrics of job {folder.name} were corrupt; they are kept as {kept}"
    for job_id in reconcile(data):
        with opened(data) as control:
            job = control.job(job_id)
            yield f"job {job_id} {stands(job)}" + (f": {job.error}" if job.error else "")


def _runs(data: DataDir) -> list[Path]:
    return [folder for folder in (data.root / "runs").iterdir() if folder.is_dir() and folder.name.isdecimal()]


def _put_aside_if_corrupt(path: Path, schema: Schema) -> Path | None:
    """Where the file and its companions are now; None where it is whole, or not there."""
    if not path.exists():
        return None
    try:
        check_whole(path, schema)
    except StoreCorrupt:
        return set_aside(path, "corrupt")
    except StoreError:
        # Locked, of a newer version, or not ours to read: that is no damage.
        return None
    return None


def _found(data: DataDir, job_id: int) -> Job | None:
    """A job as its folder knows it: the row of its last start, how it ended, and how far it got."""
    paths = data.run(job_id)
    job = read_record(paths) or _guessed(paths, job_id)
    if job is None:
        return None
    run = LiveRun(paths)
    run.poll()
    fields = run.fields()
    run.close()
    ending = read_ending(paths.exit_file)
    if ending:
        fields |= ending.fields() | {"state": ending.state}
    # A folder that was copied by hand is a job of its own.
    return msgspec.structs.replace(job, id=job_id, **fields)


def _guessed(paths: RunPaths, job_id: int) -> Job | None:
    """Of a run without a record: from its job file and its last attempt."""
    try:
        text = paths.job_file.read_text(encoding="utf-8")
        name = str(tomllib.loads(text).get("name", "sae"))
    except (OSError, ValueError):
        return None
    spec = _last_spec(paths)
    n_ranks, device = (spec.world_size, spec.device) if spec else (1, "cpu")
    made = paths.root.stat().st_mtime
    return Job(
        id=job_id, name=name, state=JobState.LOST, config=text, user=user_name(), host=socket.gethostname(),
        device=device, gpu_source="auto", gpu_uuids=spec.gpu_uuids if spec else (),
        gpu_ids=tuple(range(len(spec.gpu_uuids))) if spec else (), distributed=n_ranks > 1, world_size=n_ranks,
        attempt=spec.attempt if spec else 0, created=made, queued=made,
        error="how it ended is not known: its store was lost",
    )  # fmt: skip


def _last_spec(paths: RunPaths) -> RankSpec | None:
    specs = sorted(paths.root.glob("attempt*/ranks.json"), key=lambda file: file.stat().st_mtime)
    with contextlib.suppress(OSError, msgspec.MsgspecError, IndexError):
        return read_spec(specs[-1])
    return None
