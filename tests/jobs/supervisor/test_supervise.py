"""Tests with real supervisors and ranks: how a job starts and ends, and what remains afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.workloads import workload

from sae_tui.jobs import detach, edits
from sae_tui.jobs.files import is_gone
from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.live import LiveRun
from sae_tui.settings import Settings, save_settings
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.planning import memory
from trainer.contract.process import ProcessRef
from trainer.contract.settings.job_file import load_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.states import JobState

KILLED_WITHIN_S = 10.0


def own_mib(pid: int) -> float:
    """Return a process's private memory in MiB, without the library pages shared by all supervisors."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s*(\d+) kB", status)[1]) / 1024


def pid_is_gone(pid: int) -> bool:
    return ProcessRef.of(pid) is None


def test_a_finished_job_has_a_complete_record(box):
    job_id = box.launch("steps=20", gpus=(0, 1))
    job = box.wait_ended(job_id)
    assert (job.state, job.error, job.step, job.total_steps, job.tokens) == (JobState.FINISHED, None, 20, 20, 2000)
    assert (job.loss, job.fvu, job.l0, job.tokens_per_s) == (1 / 20, 0.5, 32.0, 1000.0)
    assert (job.heldout_fvu, job.heldout_l0) == (0.75, 36.5)
    assert (job.d_in, job.d_out, job.peak_memory_bytes) == (8, None, 20 * 2**20)
    expected = memory.estimate(workload(box.config(), 8, 2, n_tokens=4096)).total
    assert job.estimated_memory_bytes == expected
    assert job.output_path == str(box.data.sae(job_id))
    assert job.gpu_ids == (0, 1)
    assert job.distributed
    assert job.mode == "ddp"
    assert [(rank.exit_code, rank.exit_signal) for rank in box.control.ranks(job_id)] == [(0, None), (0, None)]
    assert json.loads(box.data.run(job_id).exit_file.read_text())["state"] == "finished"
    assert [event.kind for event in box.control.events(job_id)] == ["running", "finished"]
    assert box.control.leases() == []


def test_the_run_folder_is_private_and_its_job_file_can_be_run_again(box):
    job_id = box.launch("steps=1")
    paths = box.data.run(job_id)
    job = load_job(paths.job_file)
    assert job.data.settings.path == str(box.activations)
    assert job == box.config("steps=1")
    box.wait_ended(job_id)
    modes = {path.stat().st_mode & 0o077 for path in [paths.root, *paths.root.rglob("*")]}
    assert modes == {0}


def test_launch_returns_before_the_job_has_run_and_leaves_no_child(box):
    job_id = box.launch("steps=100")
    assert not box.job(job_id).state.is_final
    supervisor = box.job(job_id).supervisor
    assert supervisor is not None
    assert supervisor.is_alive()
    assert os.getsid(supervisor.pid) not in (os.getsid(0), supervisor.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(supervisor.pid, os.WNOHANG)


@pytest.mark.usefixtures("no_forks")
def test_a_waiting_supervisor_uses_little_memory(box):
    first = box.launch("steps=1000", gpus=(0,))
    second = box.launch("steps=1", gpus=(0,))
    box.wait_steps(first)
    supervisor = box.job(second).supervisor
    assert supervisor is not None
    assert box.job(second).state == JobState.QUEUED
    # A supervisor uses 13.8 MiB alone and 14.8 MiB in a full test run (Python 3.11). A supervisor that imported Textual
    # would use 26 MiB, and one that imported torch 149 MiB.
    assert own_mib(supervisor.pid) < 16


def test_many_jobs_for_one_gpu_run_one_at_a_time_and_all_finish(box):
    box.data.create()
    with ThreadPoolExecutor(6) as pool:
        ids = list(
            pool.map(lambda n: box.launch(f"quick steps=3 job{n}", gpus=(0, 1) if n % 3 == 0 else (0,)), range(6))
        )
    assert {box.wait_ended(job_id, timeout_s=60).state for job_id in ids} == {JobState.FINISHED}
    assert not (box.data.root / "runs" / "double-booking").exists()


def test_two_jobs_on_different_gpus_run_at_the_same_time(box):
    first, second = box.launch("steps=500", gpus=(0,)), box.launch("steps=500", gpus=(1,))
    box.wait_steps(first)
    box.wait_steps(second)
    assert {lease.gpu_uuid: lease.job_id for lease in box.control.leases()} == {"GPU-0": first, "GPU-1": second}


def test_a_waiting_job_names_the_holder_and_starts_when_the_gpu_is_free(box):
    first = box.launch("steps=100000", gpus=(0,))
    box.wait(first, JobState.RUNNING)
    second = box.launch("steps=1", gpus=(0,))
    box.wait_for(lambda: box.messages(second, "waiting"), "the reason why it waits")
    box.control.request(first, "stop")
    box.wait_ended(second)
    assert box.messages(second, "waiting") == [f"waits: GPU 0 is held by job {first} ({box.job(first).user})"]
    assert box.job(second).started >= box.job(first).ended


def test_a_gpu_stays_locked_as_long_as_a_rank_is_alive(box):
    job_id = box.launch("deaf", gpus=(0,))
    box.wait_steps(job_id)
    box.job(job_id).supervisor.send(signal.SIGKILL)
    assert not GpuLocks(box.data.locks, ["GPU-0"]).take()
    (pid,) = box.living(job_id)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not GpuLocks(box.data.locks, ["GPU-0"]).take():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stop_request_lets_the_ranks_save_and_ends_the_job_as_stopped(box):
    job_id = box.launch("steps=100000", gpus=(0, 1))
    box.wait_steps(job_id, rank_count=2)
    assert edits.stop(box.data, job_id) == f"job {job_id} saves a checkpoint and stops at its next step"
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert [rank.exit_code for rank in box.control.ranks(job_id)] == [3, 3]
    assert [event.kind for event in box.control.events(job_id)] == ["running", "stopping", "stopped"]
    assert edits.stop(box.data, job_id) == f"job {job_id} was stopped already"


def test_a_stopped_queued_job_never_starts(box):
    first = box.launch("steps=1000", gpus=(0,))
    second = box.launch("steps=1", gpus=(0,))
    assert edits.stop(box.data, second) == f"job {second} is removed from the queue"
    job = box.wait_ended(second, timeout_s=3)
    assert (job.state, job.attempt, box.control.ranks(second)) == (JobState.STOPPED, 0, [])
    assert not box.job(first).state.is_final


def test_a_second_request_kills_a_job_that_does_not_stop(box):
    job_id = box.launch("deaf", gpus=(0, 1))
    box.wait_steps(job_id, rank_count=2)
    edits.stop(box.data, job_id)
    box.wait(job_id, JobState.STOPPING)
    begun = time.monotonic()
    assert edits.kill(box.data, job_id) == f"job {job_id} is killed within 5 s, even if it has not saved"
    job = box.wait_ended(job_id)
    assert time.monotonic() - begun < KILLED_WITHIN_S
    assert (job.state, job.error) == (JobState.STOPPED, "was killed on request before it had saved")
    assert [rank.exit_signal for rank in box.control.ranks(job_id)] == [signal.SIGKILL, signal.SIGKILL]
    assert box.living(job_id) == []


def test_a_job_killed_while_its_report_card_is_being_made_counts_as_finished(box):
    job_id = box.launch("judge steps=5")
    run = LiveRun(box.data.run(job_id))
    box.wait_for(lambda: run.poll() and run.heartbeat.phase == "judging", "the report card to be written")
    run.close()
    edits.kill(box.data, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (JobState.FINISHED, None)
    assert job.output_path


def test_a_supervisor_that_receives_a_signal_waits_for_its_ranks_to_save(box):
    job_id = box.launch("steps=100000", gpus=(0,))
    box.wait_steps(job_id)
    supervisor = box.job(job_id).supervisor
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGXCPU):
        supervisor.send(number)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert [rank.exit_code for rank in box.control.ranks(job_id)] == [3]


def test_a_second_signal_ends_ranks_that_do_not_save(box):
    job_id = box.launch("deaf")
    box.wait_steps(job_id)
    supervisor = box.job(job_id).supervisor
    supervisor.send(signal.SIGTERM)
    box.wait(job_id, JobState.STOPPING)
    supervisor.send(signal.SIGTERM)
    assert box.wait_ended(job_id, timeout_s=KILLED_WITHIN_S).state == JobState.STOPPED


def test_a_killed_rank_fails_the_job_with_its_last_log_line_and_ends_the_others(box):
    job_id = box.launch("crash=1@15 steps=100000", gpus=(0, 1, 2))
    begun = time.monotonic()
    job = box.wait_ended(job_id)
    assert time.monotonic() - begun < KILLED_WITHIN_S
    assert job.state == JobState.FAILED
    assert job.error == "rank 1 was killed (SIGKILL); its last log line: step 15 will be the last"
    assert box.living(job_id) == []
    assert box.control.leases() == []


def test_a_failure_is_attributed_to_the_first_rank_to_fail_and_not_the_first_to_end(box):
    job = box.wait_ended(box.launch("fail=1@10 cut-off=0 steps=100000", gpus=(0, 1)))
    assert (job.state, job.error) == (JobState.FAILED, "rank 1: RuntimeError: the loss is not finite")
    assert box.control.ranks(job.id)[0].error == "rank 0: connection closed by peer"


def test_ranks_that_do_not_end_are_killed_when_another_rank_fails(box):
    job_id = box.launch("deaf fail=1@10", gpus=(0, 1))
    begun = time.monotonic()
    assert box.wait_ended(job_id).state == JobState.FAILED
    assert time.monotonic() - begun < KILLED_WITHIN_S + 2
    assert box.control.ranks(job_id)[0].exit_signal == signal.SIGKILL


def test_processes_left_behind_by_ranks_are_ended_with_the_job(box):
    job_id = box.launch("orphan steps=3")
    box.wait_ended(job_id)
    assert pid_is_gone(int((box.data.run(job_id).root / "orphan.pid").read_text()))


def test_a_deleted_run_folder_ends_the_ranks_and_fails_the_job(box):
    job_id = box.launch("steps=100000", gpus=(0, 1))
    box.wait_steps(job_id, rank_count=2)
    shutil.rmtree(box.data.run(job_id).root)
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (JobState.FAILED, "its run folder was deleted")
    assert box.living(job_id) == []
    assert not box.data.run(job_id).root.exists()


def held_in_queue(box) -> ProcessRef:
    return box.job(box.launch("steps=1", place={"hold": True})).supervisor


def test_a_waiting_supervisor_ends_when_its_data_folder_is_moved_or_deleted(box):
    supervisor = held_in_queue(box)
    box.control.close()
    moved = box.data.root.rename(box.data.root.with_name("moved"))
    box.wait_for(lambda: not supervisor.is_alive(), "the supervisor to end")
    assert not box.data.root.exists()
    assert "no longer exists" in (moved / "runs" / "1" / "logs" / "supervisor.log").read_text()
    assert Control(moved / "control.db", readonly=True).state(1) == JobState.QUEUED


def test_sigterm_ends_a_waiting_supervisor_even_if_the_store_is_unreadable(box):
    supervisor = held_in_queue(box)
    box.control.close()
    box.data.control_db.unlink()
    box.data.control_db.mkdir()
    supervisor.send(signal.SIGTERM)
    exit_file = box.data.run(1).exit_file
    box.wait_for(exit_file.exists, "the record of the end")
    assert json.loads(exit_file.read_text())["state"] == "stopped"
    box.data.control_db.rmdir()
    box.wait_for(lambda: not supervisor.is_alive(), "the supervisor to end")


def test_a_run_folder_that_cannot_be_read_is_not_treated_as_deleted(tmp_path):
    (tmp_path / "file").touch()
    assert [is_gone(tmp_path), is_gone(tmp_path / "none"), is_gone(tmp_path / "file")] == [False, True, True]
    assert not is_gone(tmp_path / ("x" * 300))


def test_killing_the_launcher_leaves_the_job_running(box):
    program = (
        "import sys; from pathlib import Path; here = Path(sys.argv[1]); sys.path[:0] = [str(here), str(here.parent)]\n"
        "import conftest, time; box = conftest.Box(Path(sys.argv[2]))\n"
        "print(box.launch('steps=100'), flush=True); time.sleep(600)"
    )
    here, root = str(Path(__file__).parents[1]), str(box.data.root.parent)
    launcher = subprocess.Popen([sys.executable, "-c", program, here, root], stdout=subprocess.PIPE, text=True)
    job_id = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert box.wait_ended(job_id).state == JobState.FINISHED


def test_a_supervisor_that_cannot_start_fails_the_job_with_the_reason(box):
    (box.data.root).mkdir()
    where = Placement("cpu", (), 1)

    def start(data, job_id):

        detach.start(data, job_id, command=[sys.executable, "-c", "raise SystemExit('no such module')"])

    with pytest.raises(UserError, match="job 1 could not be started: its supervisor did not start: no such"):
        launching.launch(box.data, box.config(), where, gpu_source="none", start=start)
    job = box.job(1)
    assert (job.state, job.error) == (JobState.FAILED, "its supervisor did not start: no such module")


def test_a_job_that_cannot_run_is_rejected_before_anything_is_written(box):
    job = box.config().replace("train", batch_size=10**6)
    with pytest.raises(JobFileError, match=r"train\.batch_size: one step needs"):
        launching.launch(box.data, job, Placement("cpu", (), 1), gpu_source="none")
    assert not box.data.root.exists()


def test_the_metrics_of_an_ended_run_are_complete(box):
    job_id = box.launch("steps=20")
    box.wait_ended(job_id)
    reader = SeriesReader(box.data.run(job_id).metrics_db)
    assert [point.step for point in reader.points("loss")] == [5, 10, 15, 20]
    reader.close()


def test_an_error_in_the_supervisor_fails_its_job_after_its_ranks_have_saved(box, monkeypatch):
    monkeypatch.setenv("FAKE_BUG", "1")
    box.data.create()
    save_settings(box.data.settings_file, Settings(on_job_end=["sh", "-c", 'echo "$SAE_TUI_JOB_STATE" >state']))
    job_id = box.launch("steps=100000", gpus=(0,), max_restarts=3)
    job, paths = box.wait_ended(job_id), box.data.run(job_id)
    reason = f"sae-tui itself failed: ZeroDivisionError: division by zero; see {paths.supervisor_log}"
    assert (job.state, job.error, job.attempt) == (JobState.FAILED, reason, 1)
    assert [file.name for file in paths.checkpoints.iterdir()]
    assert box.living(job_id) == box.control.leases() == []
    box.wait_for((box.data.root / "state").exists, "the user's command")
    assert (box.data.root / "state").read_text() == "failed\n"
    box.wait_for(lambda: not job.supervisor.is_alive(), "the supervisor to end")
    assert paths.supervisor_log.read_text().endswith("ZeroDivisionError: division by zero\n")
