"""Tests for the report about a failed job, which is based on the files that its ranks wrote."""

from __future__ import annotations

import json
import traceback
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from support.extractions import extraction_job

from sae_tui.jobs.launch.resume import prepare
from sae_tui.jobs.view.postmortem import _traceback, examine
from trainer.contract.errors import UserError
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir
from trainer.contract.settings.extract import STATE, identity
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


def left_by(error: Exception, folder: Path) -> Path:
    """Write the exit file of a rank that ended with this error, and return its path."""
    try:
        raise error
    except Exception:
        file = folder / "rank0.error.json"
        file.write_text(json.dumps({"error": str(error), "traceback": traceback.format_exc()}))
    return file


@pytest.mark.parametrize("kind", [UserError, StoreError])
def test_an_exception_with_a_complete_message_is_shown_without_a_traceback(
    kind: type[Exception], tmp_path: Path
) -> None:
    assert _traceback(left_by(kind("give a folder of shards"), tmp_path), "") == ()


def test_any_other_exception_is_shown_with_its_last_frames(tmp_path: Path) -> None:
    shown = _traceback(left_by(ValueError("shapes differ"), tmp_path), "")
    assert shown[-1] == "ValueError: shapes differ"
    assert any("left_by" in line for line in shown)


def test_a_killed_extraction_resumes_after_its_stored_rows_and_not_its_reported_rows(tmp_path: Path) -> None:
    extraction = extraction_job(tmp_path / "model", tmp_path / "text", tmp_path / "rows")
    (data := DataDir(tmp_path / "data")).create()
    row = Job(name="x", config=dump_job(extraction), user="me", host="here", device="cpu", gpu_source="none")
    with closing(Control(data.control_db)) as control:
        job_id = control.create_job(msgspec.structs.replace(row, error="rank 0 was killed (SIGKILL)", attempt=1))
        control.transition(job_id, JobState.FAILED)
        job = control.job(job_id)
    data.run(job_id).create()
    write_own(data.run(job_id).job_file, job.config)

    def promised(n_told: int) -> tuple[str, str]:
        """Return the messages from the failure report and from the resumed extraction job."""
        one = msgspec.structs.replace(job, step=n_told)
        told = examine(data, one)
        assert told
        return told.resumes, prepare(data, one, pytest.fail).sentence

    # Rows that were read but not stored are read again.
    none = "starts it again: no shard was complete", "starts from the first row: no shard was complete"
    assert promised(76_644) == none
    # Progress is reported every few seconds, so complete shards may be stored before the first report.
    Path(extraction.extract.output).mkdir()
    state = {"job": identity(extraction), "shards": [[{"n_tokens": 65_536}, {"n_tokens": 65_536}]] * 2}
    (file := Path(extraction.extract.output) / STATE).write_text(json.dumps(state))
    rows = "after the 131,072 rows of its complete shards"
    assert promised(0) == promised(140_000) == (f"resumes it {rows}", f"resumes {rows}")
    file.write_text(json.dumps(state | {"job": {"text.context": 1}}))
    assert promised(140_000) == none
