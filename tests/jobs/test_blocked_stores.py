"""Tests for a job store that cannot be written because another process has locked it or the disk is full."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
from pathlib import Path

import pytest

from sae_tui.doctor import base as examined
from sae_tui.doctor.storage import check_store_lock
from sae_tui.gpu.none import NoGpus
from sae_tui.jobs import edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.view.reader import JobsReader
from sae_tui.jobs.view.watcher import Watcher
from trainer.contract.errors import UserError


def test_app_doctor_and_commands_name_a_halted_process_that_locks_the_store(box, locked_store):
    job_id = box.record()
    watcher = Watcher(box.data, lambda: None)
    looks = examined.CheckedMachine(box.data, NoGpus())
    with locked_store(box.data.control_db) as holder:
        watcher._look(JobsReader(box.data))
        assert watcher.problem == ""  # the process may release the lock in a moment
        assert list(check_store_lock(looks)) == []
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        words = f"process {holder.pid} \\(.*\\), which is halted; `kill -CONT {holder.pid}` continues it"
        watcher._reconcile_at = 0.0
        watcher._look(JobsReader(box.data))
        assert re.search(words, watcher.problem)
        (finding,) = check_store_lock(looks)
        assert re.search(words, f"{finding.sentence}; {finding.remedy}")
        with pytest.raises(UserError, match=words):
            edits.stop(box.data, job_id)
        holder.send_signal(signal.SIGCONT)
    assert edits.stop(box.data, job_id)


def test_a_launch_that_fails_on_a_full_disk_leaves_no_job_and_no_file(box, monkeypatch):
    first = box.record()

    def full(path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(launching, "write_own", full)
        with pytest.raises(UserError, match=f"the job cannot be recorded in {box.data.root}: No space left"):
            box.launch("files")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The file size limit is smaller than one page of the store.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(UserError, match="is full or failing"):
            box.launch("row")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [job.id for job in box.control.jobs()] == [first]
    assert list((box.data.root / "runs").iterdir()) == []
