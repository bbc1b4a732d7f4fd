"""Tests that every field of a control store row survives a round trip."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job, Rank
from trainer.contract.store.states import JobState


def test_a_written_job_is_read_back_unchanged(control: Control, queued: Callable[..., Job]) -> None:
    full = queued(
        id=1, name="ü'\"", gpu_ids=(3, 0), gpu_uuids=("GPU-d", "GPU-a"), distributed=True, world_size=2, mode="ddp",
        boot_id="b", supervisor_pid=7, supervisor_start=8, attempt=1, parent=5, created=1.5, started=2.5, ended=3.5,
        step=10, total_steps=20, tokens=2**40, loss=0.5, fvu=0.25, l0=32.0, dead_fraction=0.1, tokens_per_s=1e5,
        error="e", output_path="/o", state=JobState.RUNNING, priority=-3, held=True, after=(1, 2), queued=2.0,
        waits_for="w", gpus_wanted=2, any_gpus=True, shares_gpus=True, card_memory_bytes=2**33, expected_s=60.0,
        max_restarts=3, restarts=1, backend="slurm", tags=("a", "b"), note="n",
    )  # fmt: skip
    assert control.job(control.create_job(full)) == full
    assert full.supervisor == ProcessRef(7, 8, "b")


def test_each_field_of_a_row_is_a_column(tmp_path: Path, control: Control) -> None:
    with contextlib.closing(sqlite3.connect(control.path)) as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(jobs)")}
        assert columns == set(Job.__struct_fields__)
        assert {row[1] for row in connection.execute("PRAGMA table_info(ranks)")} == set(Rank.__struct_fields__)
