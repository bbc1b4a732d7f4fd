"""Tests for detecting, from the stored history, GPUs that a job has reserved but is not using."""

from __future__ import annotations

import contextlib
import re
import socket
import time

import msgspec
import pytest

from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.gpus.availability import GpuChoice, choices, describe_use, holders
from sae_tui.jobs.gpus.idle import with_idle
from trainer.contract.store.database import open_writer
from trainer.contract.store.rows import Job, Lease
from trainer.contract.store.states import JobState

HOST = socket.gethostname()


def history(box, utilizations: list[int | None]) -> None:
    """Store the maximum utilisation for each of the most recent minutes, oldest first."""
    box.data.create()
    newest = int(time.time() // 60)
    rows = [
        (HOST, 0, newest - len(utilizations) + 1 + number, "GPU-0", 60, value, value)
        for number, value in enumerate(utilizations)
    ]
    with contextlib.closing(open_writer(box.data.gpu_db, "gpu")) as db:
        db.executemany(
            "INSERT INTO gpu_minutes(host, gpu_index, minute, gpu_uuid, n, utilization, utilization_max)"
            " VALUES(?, ?, ?, ?, ?, ?, ?)",
            rows,
        )


def choice(box, held_s: float) -> GpuChoice:
    job = Job(
        id=41, name="run", config="", user="ann", host=HOST, device="cuda", gpu_source="nvml", state=JobState.RUNNING
    )
    lease = Lease(host=HOST, gpu_uuid="GPU-0", gpu_index=0, job_id=41, user="ann", pid=1, since=time.time() - held_s)
    (gpu,) = choices([GpuSample(0, "GPU-0", "card", 0.0)], with_idle(holders([job], [lease], []), box.data))
    return gpu


def reason(box, held_s: float) -> str:
    return choice(box, held_s).reason


def test_a_gpu_that_a_job_holds_but_has_not_used_for_a_while_is_reported(box):
    history(box, [98] * 60 + [0] * 45)
    # The last busy minute ended 44 to 45 minutes ago.
    assert re.fullmatch(r"job 41 \(run\), held 3 h 00 min, idle for 4[45] min", reason(box, 3 * 3600))
    assert describe_use(choice(box, 3 * 3600))[1] == "warn"
    assert describe_use(choice(box, 300)) == ("job 41 (run)", "good")


def test_a_gpu_used_by_another_user_is_not_shown_as_a_warning() -> None:
    busy = GpuChoice(0, "GPU-0", "H200", None, None, "busy", brief="used by ann")
    assert describe_use(busy) == ("used by ann", "text")
    assert describe_use(msgspec.structs.replace(busy, state="unhealthy", brief="failing")) == ("failing", "warn")


def test_a_gpu_unused_since_its_lease_began_counts_as_idle_for_the_whole_lease(box):
    history(box, [98] * 60 + [2] * 30)
    assert reason(box, 29 * 60) == "job 41 (run), held 29 min, idle for 29 min"


@pytest.mark.parametrize(
    ("utilizations", "held_s"),
    [([None] * 60, 3000), ([98] * 100, 6000), ([98] * 100 + [0] * 5, 6000), ([0] * 100, 300), ([], 6000)],
    ids=["a slice", "busy", "just now idle", "just taken", "nothing known"],
)
def test_a_busy_newly_leased_or_unknown_gpu_is_not_reported_as_idle(box, utilizations, held_s):
    history(box, utilizations)
    assert reason(box, held_s) == "job 41 (run)"


def test_no_gpu_is_reported_as_idle_without_recent_history(box):
    history(box, [98, 0, 0, 0])
    with contextlib.closing(open_writer(box.data.gpu_db, "gpu")) as db:
        db.execute("UPDATE gpu_minutes SET minute = minute - 30")
    assert reason(box, 6000) == "job 41 (run)"
