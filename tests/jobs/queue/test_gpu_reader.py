"""Tests for how queued jobs read the GPUs, with the real reader process and a fake version of NVIDIA's library."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.driver import environment

from sae_tui.gpu import once
from sae_tui.jobs.queue import gpu_reader
from sae_tui.jobs.queue.gpu_reader import GpuReader, name_of
from sae_tui.jobs.queue.waiting_job import QueueEntry
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

ANSWER = """import sys; print('[{"index":0,"uuid":"GPU-1","name":"X","timestamp":1.0}]')"""
# The UUIDs of the fake library's first GPUs.
UUIDS = tuple(f"GPU-{0xFA4E0000 + index:08x}-1234-4a5b-8c6d-{0xC0FFEE00 + index:012x}" for index in range(4))


@pytest.fixture
def on_driver(monkeypatch, drivers, tmp_path):
    """Return a function that makes this process and its readers use the fake driver."""

    def put(**variables):
        for name, value in environment(drivers, **variables).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SAE_TUI_LOCK_DIR", str(tmp_path / "locks"))

    return put


def in_line(box, **fields) -> QueueEntry:
    """Record a queued job supervised by this process, and return its queue entry."""
    me = ProcessRef.current()
    identity = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    usual = {"gpu_source": "nvml", "gpus_wanted": 1, "any_gpus": True}
    job_id = box.record(**usual | identity | fields)
    control = Control(box.data.control_db)
    return QueueEntry(box.data, control, control.job(job_id))


def tried(line: QueueEntry) -> str | tuple[int, ...]:
    """Try to start the job; return the indices of its GPUs, or the reason why it waits."""
    started = line.try_start()
    line.locks.release()
    return line.job.gpu_ids if started else line._control.job(line.job.id).waits_for


def test_a_job_starts_on_a_driver_that_takes_seconds_to_open(box, on_driver):
    on_driver(GPUS=2, PIDS="", FAULTS="*:idle,0:slow=100", INIT_MS=2500)
    line = in_line(box)
    assert tried(line) == (0,)
    assert line.job.state == JobState.STARTING


def test_a_job_does_not_take_a_gpu_with_unknown_processes_or_unknown_free_memory(box, on_driver):
    on_driver(GPUS=4, PIDS="", FAULTS="1:idle,1:no_memory_info,2:idle,2:mig,3:idle")
    # GPUs 4 and 5 are the slices of GPU 2.
    assert [tried(in_line(box)) for _ in range(3)] == [(3,), (4,), (5,)]
    waiting = tried(in_line(box))
    assert "by an unseen process" in waiting
    assert "GPU 1 does not report its free memory" in waiting
    assert "GPU 2 cannot be used (it is split into MIG slices" in waiting
    named = {"any_gpus": False, "gpu_ids": (1,), "gpu_uuids": (UUIDS[1],), "card_memory_bytes": 1 << 30}
    assert tried(in_line(box, **named)) == (1,)


def test_jobs_with_different_visible_gpus_share_one_reading(box, on_driver):
    on_driver(GPUS=4, PIDS="", FAULTS="*:idle", LOG=box.data.root / "calls")
    lines = [in_line(box, visible_devices=visible) for visible in ("2", "3,0", None)]
    assert [tried(line) for line in lines] == [(2,), (0,), (1,)]
    assert len(list(box.data.root.glob("cards-*.json"))) == 1


def test_a_failed_reading_is_logged_with_its_reason(box, on_driver, monkeypatch):
    on_driver(INIT_ERROR=9)
    messages = []
    monkeypatch.setattr(gpu_reader, "note", messages.append)
    box.data.create()
    assert GpuReader(box.data, "nvml").samples() == ()
    assert messages == [
        "the GPUs could not be read: the NVIDIA driver is not loaded; load it with `sudo modprobe nvidia`, or reboot"
    ]


def test_an_old_reading_does_not_count_as_new_while_another_process_holds_the_lock(box, on_driver):
    on_driver(GPUS=1, PIDS="", FAULTS="*:idle")
    waiting = in_line(box)
    assert len(GpuReader(box.data, "nvml").samples()) == 1
    (file,) = box.data.root.glob("cards-*.json")
    os.utime(file, (time.time() - 15,) * 2)
    with flock(box) as holder:
        assert tried(waiting).startswith(f"the GPUs cannot be read: process {holder.pid} has been reading them since ")
        assert len(GpuReader(box.data, "nvml").samples(12)) == 1  # the reading may be up to 5 s older
        os.utime(file, (time.time() + 86_400,) * 2)  # the clock was set back
        assert GpuReader(box.data, "nvml").samples(12) == ()


def test_a_halted_reader_delays_a_job_by_at_most_the_time_limit_for_one_read(box, on_driver, monkeypatch):
    on_driver(GPUS=1, PIDS="", FAULTS="*:idle")
    waiting = in_line(box)
    with flock(box) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        assert "has been reading them since" in tried(waiting)
        monkeypatch.setattr(gpu_reader, "READ_TIMEOUT_S", -10 * gpu_reader.END_S)
        monkeypatch.setattr(gpu_reader, "_answer_of", lambda reader, _: answer_of(reader, 60))
        waiting._again_at = 0.0
        assert tried(waiting) == (0,)


answer_of = gpu_reader._answer_of


@contextlib.contextmanager
def flock(box):
    """Hold the GPU reader's lock in another process."""
    command = ["flock", GpuReader(box.data, "nvml")._lock, "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield holder
        holder.kill()  # the child process ends when the pipe is closed


def test_a_reader_hanging_after_its_answer_does_not_block_the_lock_or_other_gpus(box, monkeypatch, tmp_path):
    """A thread hanging in the driver keeps the reader process alive.

    New readers are started at increasing intervals.
    """
    box.data.create()
    started = []

    class Unkillable(subprocess.Popen):
        def __init__(self, command, **pipes):
            script = f"{ANSWER}; sys.stdout.flush(); import time; time.sleep(60)"
            started.append(self)
            super().__init__([sys.executable, "-c", script], **pipes)

        def kill(self):
            pass

    messages = []
    monkeypatch.setattr(gpu_reader, "note", messages.append)
    monkeypatch.setattr(gpu_reader, "END_S", 0.05)
    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    reader = GpuReader(box.data, "nvml")
    assert [sample.uuid for sample in reader.samples()] == ["GPU-1"]
    assert reader.samples(0.0)  # the stored reading is returned because the GPUs are not read again
    assert len(started) == 1
    assert messages == [f"process {started[0].pid}, which read the GPUs, hangs in the driver and cannot be killed"]
    reader._file.unlink()
    assert reader.samples() == ()
    assert reader.problem == f"process {started[0].pid} hangs in the driver and cannot be killed"
    for file in box.data.root.glob("cards-*.stuck"):
        os.utime(file, (time.time() - 61,) * 2)
    assert reader.samples()
    assert len(started) == 2
    for one in started:
        one.send_signal(signal.SIGKILL)
        one.wait()
    reader._file.unlink()
    reader.samples()  # no reader is hanging any more
    assert len(started) == 3
    started[-1].send_signal(signal.SIGKILL)
    started[-1].wait()


def test_the_reader_has_a_longer_time_limit_than_the_driver():
    assert gpu_reader.READ_TIMEOUT_S > once.OPEN_LIMIT_S + once.GPU_LIMIT_S


def test_a_jobs_gpu_name_is_known_even_without_the_stored_reading(box, on_driver):
    on_driver(GPUS=2, PIDS="", FAULTS="*:idle")
    job = box.job(box.record(gpu_source="nvml", gpu_ids=(1,), gpu_uuids=(UUIDS[1],)))
    (name,) = {sample.name for sample in GpuReader(box.data, "nvml").samples()}
    next(box.data.root.glob("cards-*-nvml.json")).unlink()
    assert name_of(box.data, job) == name
    assert name_of(box.data, box.job(box.record(gpu_source="nvml", gpu_uuids=("GPU-gone",)))) == ""


def test_gpus_are_read_if_there_is_no_stored_reading(box, on_driver):
    on_driver(GPUS=2, PIDS="", FAULTS="*:idle")
    box.record(gpu_source="nvml")
    reader = GpuReader(box.data, "nvml")
    assert not reader._file.exists()
    assert [sample.uuid for sample in reader.samples(math.inf)] == list(UUIDS[:2])


def test_readings_from_another_host_sharing_the_folder_are_ignored(box, monkeypatch):
    box.data.create()
    for host, n_gpus in (("gpu7", 2), ("gpu8", 1)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        reading = next(iter(box.data.root.glob("cards-*.json")), None)
        if reading:
            reading.write_text(reading.read_text().replace("GPU-", "GPU-of-gpu7-"))
        (sample, *_) = GpuReader(box.data, "simulated:2").samples()
        assert not sample.uuid.startswith("GPU-of-gpu7"), n_gpus
