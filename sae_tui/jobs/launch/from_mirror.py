"""Downloads a run from the mirror of its checkpoints as a new job, which can then be resumed here."""

from __future__ import annotations

import contextlib
import os
import shutil
import time

import msgspec

from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.launch.importing import move_in
from sae_tui.jobs.launch.trainer_command import OnReached, answer_of
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.machine import this_machine
from sae_tui.jobs.record import write_record
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.user import user_name
from trainer.contract.errors import JobFileError, UserError, sentence
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.printable import printable
from trainer.contract.runs.rank_spec import read_spec, write_spec
from trainer.contract.settings.consent import Consent, problems_of, refused
from trainer.contract.settings.job_file import load_job, read_toml
from trainer.contract.settings.toml import read_plain_text
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


class FetchAnswer(msgspec.Struct, frozen=True):
    """The trainer's report on a download: the step of the checkpoint, and whether the run has finished."""

    step: int
    has_sae: bool
    notes: tuple[str, ...] = ()


def job_from_mirror(
    data: DataDir,
    url: str,
    consent: Consent,
    *,
    gpu_source: str,
    python: str = "",
    on_reached: OnReached | None = None,
) -> tuple[int, FetchAnswer]:
    """Create a job from the run that is mirrored at a URL; return the job's id and the trainer's report.

    The mirror may belong to another person, so its job file must not run code without consent. If the run cannot be
    downloaded, raise `UserError` and create no job.
    """
    data.create()
    staged = RunPaths(data.root / "runs" / f".mirror-{os.urandom(8).hex()}")
    try:
        # The download runs in a separate process because the store's package may be installed only for the trainer.
        words = [url, "--out", str(staged.root)]
        fetched = answer_of("fetch", words, FetchAnswer, python=python, on_reached=on_reached)
        if refusals := refused(read_toml(staged.job_file, read_plain_text), consent):
            raise JobFileError(problems_of(refusals))
        row = _row(staged, fetched, printable(f"downloaded from {url}"), gpu_source)
        with open_control(data) as control, contextlib.ExitStack() as undo:

            def place(job: Job) -> Job:
                output = str(data.sae(job.id)) if fetched.has_sae else None
                job = msgspec.structs.replace(job, output_path=output)
                try:
                    _place(data, staged, job, undo)
                except (UserError, OSError) as error:
                    raise UserError(f"the run could not be moved into {data.root}: {sentence(error)}") from None
                return job

            job_id = control.create_job(row, above=data.last_id(), prepare=place)
            undo.pop_all()
            control.add_event(job_id, "downloaded", f"{row.note}, at step {fetched.step}")
        return job_id, fetched
    finally:
        shutil.rmtree(staged.root, ignore_errors=True)


def _row(staged: RunPaths, fetched: FetchAnswer, note: str, gpu_source: str) -> Job:
    job, spec, now = load_job(staged.job_file, read=read_plain_text), read_spec(staged.rank_spec(1)), time.time()
    state = JobState.FINISHED if fetched.has_sae else JobState.STOPPED
    live = LiveRun(staged)
    live.poll()
    # The metrics may be newer than the checkpoint.
    fields = live.fields() | {"step": fetched.step}
    live.close()
    return Job(
        name=job.name, state=state, config=read_plain_text(staged.job_file), user=user_name(), **this_machine(),
        device=spec.device, world_size=spec.world_size, gpu_source=gpu_source, attempt=1, created=now, ended=now,
        note=note, **fields,
    )  # fmt: skip


def _place(data: DataDir, staged: RunPaths, job: Job, undo: contextlib.ExitStack) -> None:
    """Move the downloaded files to the job's folders, and write the files that name these folders."""
    spec, run, output = read_spec(staged.rank_spec(1)), data.run(job.id), data.sae(job.id)
    move_in(data, staged.root, job.id, undo)
    write_spec(msgspec.structs.replace(spec, run_dir=run.root, output_dir=output, job_id=job.id))
    write_ending(run.exit_file, JobEnding(job.state, job.ended or job.created, output_path=job.output_path))
    write_record(run, job)
