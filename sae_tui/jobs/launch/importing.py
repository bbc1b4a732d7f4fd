"""Imports an SAE from another tool as a job that can be evaluated, compared, trained and exported like other jobs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs import named_python
from sae_tui.jobs.edits import as_tags
from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.launch.trainer_command import OnReached, answer_of
from sae_tui.jobs.record import write_record
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.printable import printable
from trainer.contract.runs.import_check import ImportCheck
from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.settings.job_file import load_job
from trainer.contract.settings.toml import read_plain_text
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


class ImportAnswer(msgspec.Struct, frozen=True):
    """The trainer's report on an import.

    `form` is the format of the imported files, and `architecture` is our name for the SAE's architecture. `check`
    contains metrics measured on rows of the data, and `warnings` describes implausible metrics.
    """

    form: str
    architecture: str
    check: ImportCheck
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def import_sae(
    data: DataDir,
    folder: Path,
    activations: Sequence[Path],
    arguments: Sequence[str],
    *,
    gpu_source: str,
    tags: Iterable[str],
    python: str = "",
    on_reached: OnReached | None = None,
    in_terminal: bool = True,
) -> tuple[int, ImportAnswer]:
    """Create a job from the SAE in a folder; return the job's id and the trainer's report.

    The job uses the `activations` for evaluation and training; a crosscoder needs a folder for each part. `arguments`
    are passed to the trainer's `import` command, and `python` is the new job's interpreter. If the SAE cannot be
    imported, raise `UserError` and create no job.
    """
    tags = as_tags(tags)
    named_python.refuse(python)
    data.create()
    staged = data.root / "runs" / f".import-{os.urandom(8).hex()}"
    try:
        paths = ["--out", str(staged), *(word for one in activations for word in ("--data", str(one)))]
        # The import runs in a separate process because it needs torch.
        words = [str(folder), *paths, *_settings(python), *arguments]
        # In a terminal, show a download's standard error, which contains the progress for each file.
        from_hub = in_terminal and not os.path.lexists(folder)
        imported = answer_of("import", words, ImportAnswer, python=python, on_reached=on_reached, shows_errors=from_hub)
        with open_control(data) as control:
            job = _row(
                RunPaths(staged), printable(f"imported from {_named(folder)} ({imported.form})"), gpu_source, tags
            )
            with contextlib.ExitStack() as undo:

                def place(job: Job) -> Job:
                    job = msgspec.structs.replace(job, output_path=str(data.sae(job.id)))
                    try:
                        _place(data, staged, job, undo)
                    except (UserError, OSError) as error:
                        raise UserError(f"the SAE could not be copied into {data.root}: {sentence(error)}") from None
                    return job

                job_id = control.create_job(job, above=data.last_id(), prepare=place)
                undo.pop_all()
            control.add_event(job_id, "imported", f"{job.note}; {imported.check}")
            for doubt in imported.warnings:
                control.add_event(job_id, "warning", printable(doubt))
        return job_id, imported
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _named(folder: Path) -> str:
    """Return an existing folder's absolute path, or the unchanged name of a Hugging Face Hub repository."""
    return str(folder.absolute() if os.path.lexists(folder) else folder)


def _settings(python: str) -> list[str]:
    return ["--set", f"launch.python={named_python.whole(python)}"] if python else []


def _row(staged: RunPaths, note: str, gpu_source: str, tags: tuple[str, ...]) -> Job:
    config = read_plain_text(staged.job_file)
    job, now = load_job(staged.job_file, read=read_plain_text), time.time()
    shape = job.data_shape()
    return Job(
        name=job.name, state=JobState.IMPORTED, config=config, user=user_name(), host=socket.gethostname(),
        device="cpu", gpu_source=gpu_source, attempt=1, created=now, ended=now, d_in=shape.d_in, d_out=shape.d_out,
        tags=tags, note=note,
    )  # fmt: skip


def move_in(data: DataDir, staged: Path, job_id: int, undo: contextlib.ExitStack) -> None:
    """Move a run folder, and the SAE in it if there is one, to a job's folders; `undo` deletes these folders."""
    data.refuse_links(job_id)
    for source, target in ((staged / "sae", data.sae(job_id)), (staged, data.run(job_id).root)):
        if source.exists():
            source.rename(target)
            undo.callback(shutil.rmtree, target, ignore_errors=True)


def _place(data: DataDir, staged: Path, job: Job, undo: contextlib.ExitStack) -> None:
    """Move the imported files to the job's folders; add callbacks to `undo` that delete these folders."""
    run, output = data.run(job.id), data.sae(job.id)
    move_in(data, staged, job.id, undo)
    write_spec(RankSpec(run.root, output, attempt=1, world_size=1, device="cpu", job_id=job.id))
    write_ending(run.exit_file, JobEnding(JobState.IMPORTED, job.ended or job.created, output_path=job.output_path))
    write_record(run, job)
