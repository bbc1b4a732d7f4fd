"""Tests for jobs on a real SLURM cluster: how they train and end, and what they report."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from support.extractions import extraction_job, run_ranks
from support.hanging_ranks import HANGING
from support.tiny_models import make_model, sentences

from sae_tui.jobs import edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_STOPPED, rank_command, read_spec
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.states import JobState
from trainer.ranks.staging import SENTENCE

pytestmark = pytest.mark.timeout(240)
N_ROWS = 12_000
SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.mark.slow
def test_a_job_on_two_nodes_trains_to_the_end_and_a_new_supervisor_adopts_it(submission) -> None:
    one = submission(n_steps=20)
    one.start()
    one.until(lambda: one.paths.progress_file(1).exists())
    one.start()
    assert one.until_ended() == [EXIT_FINISHED] * 2
    assert (one.spec.output_dir / "cfg.json").exists()
    with contextlib.closing(SeriesReader(one.paths.metrics_db)) as reader:
        assert [point.step for point in reader.points("loss")] == list(range(1, 21))
        assert reader.heartbeat().phase == "finished"
        plans = [event.message for event in reader.events() if event.kind == "plan"]
    assert len(plans) == 1
    assert "finished at step 20/20" in (one.paths.log(0)).read_text()
    assert "finished at step 20/20" in (one.paths.log(1)).read_text()
    assert one.told[0] == f"is SLURM job {one.slurm_id}"
    assert "runs in SLURM on n[1-2]" in one.told
    modes = {file.name: file.stat().st_mode & 0o777 for file in one.paths.attempt(1).iterdir() if file.is_file()}
    assert {modes[name] for name in ("job.sbatch", "progress.jsonl", "rank0.json", "slurm_job")} == {0o600}


@pytest.mark.slow
def test_ranks_save_and_stop_on_request(submission) -> None:
    one = submission()
    one.start()
    one.until_training()
    one.attempt.ask_to_stop()
    assert one.until_ended() == [EXIT_STOPPED] * 2
    assert any(one.paths.checkpoints.iterdir())
    assert not one.attempt.has_failed


@pytest.mark.slow
def test_a_job_saves_and_stops_near_its_time_limit(submission, cluster) -> None:
    one = submission(nodes=1)
    one.start()
    one.until_training()
    # Near the time limit, SLURM itself sends this signal because of --signal.
    cluster.command("scancel", "--batch", "--signal=USR1", one.slurm_id)
    assert one.until_ended() == [EXIT_STOPPED]
    assert any(one.paths.checkpoints.iterdir())
    assert one.told[-1] == "its SLURM time limit is near, so it saves and stops"


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "gpus"), [(1, "cpu:2"), (2, "cpu:1")])
def test_a_killed_rank_is_named_as_the_cause_even_if_its_peer_lost_the_connection(submission, nodes, gpus) -> None:
    one = submission(nodes=nodes, gpus=gpus)
    one.start()
    one.until_training()
    os.kill(one.attempt.ranks[1].mark.process.pid, signal.SIGKILL)
    one.until(lambda: one.attempt.has_failed)
    one.attempt.end()
    codes = one.until_ended()
    assert codes[1] == -signal.SIGKILL
    assert one.attempt.endings()[1].exit_signal == signal.SIGKILL
    assert one.attempt.cause().startswith(f"rank 1 on {one.attempt.ranks[1].mark.host} was killed (SIGKILL)")


def test_a_job_cancelled_from_outside_is_reported_as_cancelled(submission, cluster) -> None:
    one = submission()
    one.start(lambda _: SLEEPS)
    one.until(lambda: "runs in SLURM on n[1-2]" in one.told)
    cluster.command("scancel", one.slurm_id)
    one.until_ended()
    assert one.attempt.has_failed
    assert one.attempt.cause() == "SLURM ended it: it was cancelled (CANCELLED)"
    assert one.told[-1] == "SLURM ended it: it was cancelled"


def test_a_pending_job_shows_its_reason_and_can_be_stopped_before_it_runs(submission, cluster) -> None:
    cluster.command("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 100")
    one = submission()
    one.start()
    one.until(lambda: "waits in SLURM: Resources" in one.told)
    one.attempt.ask_to_stop()
    assert one.until_ended() == [EXIT_STOPPED] * 2
    assert not (one.paths.logs / "slurm.log").exists()


def test_a_killed_job_ends_at_once(submission) -> None:
    one = submission(nodes=1)
    one.start(lambda _: SLEEPS)
    one.until(lambda: "runs in SLURM on n1" in one.told)
    one.attempt.end()
    one.until_ended()
    assert one.attempt.cause() == "its ranks had to be killed"


def test_the_gpus_assigned_by_slurm_are_used_and_no_name_reaches_a_shell(submission, tmp_path) -> None:
    hostile = "a'b\"; touch /pwned; $(touch /pwned) #SBATCH --nodes=7"
    one = submission(hostile, nodes=1, gpus="auto:2", sbatch_options=["--comment=$(touch /pwned); x"])
    reports = tmp_path / "it's $(seen)"
    reports.mkdir()
    code = (
        "import os, sys; open(sys.argv[1] + os.environ['SLURM_LOCALID'], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    one.start(lambda _: [sys.executable, "-c", code, f"{reports}/"])
    one.until_ended()
    assert {file.name: file.read_text() for file in reports.iterdir()} == {"0": "0,1", "1": "0,1"}
    assert not os.path.exists("/pwned")


def test_ranks_that_never_started_are_reported_with_the_reason(submission) -> None:
    one = submission(nodes=1)
    one.start(lambda _: ["/nowhere/python"])
    one.until_ended()
    assert one.attempt.cause().startswith("rank 0 never started; its last log line: slurmstepd")
    assert one.attempt.cause().endswith("/nowhere/python: No such file or directory")


def test_a_node_without_the_run_folder_is_reported_with_a_remedy(submission, tmp_path) -> None:
    one = submission(nodes=1)
    one.start(lambda spec: rank_command(tmp_path / "elsewhere" / spec.name))
    one.until_ended()
    assert f"{tmp_path}/elsewhere/ranks.json does not exist on " in one.attempt.cause()
    assert one.attempt.cause().endswith("put the data folder (--data-dir) on a file system that all nodes share")


def test_a_launched_job_shows_its_progress_and_can_be_stopped(submission) -> None:
    one = submission()
    job_id = launching.launch(one.data, one.job, Placement("cpu", (), 2), gpu_source="none")
    one.until(lambda: one.control.job(job_id).step > 0)
    edits.stop(one.data, job_id)
    one.until(lambda: one.control.job(job_id).state.is_final)
    assert (one.control.job(job_id).state, one.control.job(job_id).error) == (JobState.STOPPED, None)
    assert [rank.exit_code for rank in one.control.ranks(job_id)] == [EXIT_STOPPED] * 2


def test_a_killed_supervisors_slurm_job_is_cancelled_before_the_job_is_lost(submission, cluster) -> None:
    one = submission()
    job_id = launching.launch(one.data, one.job, Placement("cpu", (), 2), gpu_source="none")
    id_file = one.data.run(job_id).attempt(1) / "slurm_job"
    one.until(id_file.exists)
    one.control.job(job_id).supervisor.send(signal.SIGKILL)
    one.until(lambda: reconcile(one.data))
    assert one.control.job(job_id).state == JobState.LOST
    slurm_id = id_file.read_text().strip()
    one.until(
        lambda: cluster.command("squeue", "-h", "-j", slurm_id, "-t", "PENDING,RUNNING", "-o", "%T").strip() == ""
    )


def test_the_reason_why_slurm_rejects_a_job_is_reported_in_slurms_own_words(submission) -> None:
    one = submission(partition="nowhere")
    with pytest.raises(OSError, match=r"SLURM refused the job: .*Invalid partition"):
        one.start()


def extraction_on_nodes(tmp_path: Path, n_tokens: int) -> ExtractJob:
    """Return an extraction job for two nodes, with enough text."""
    (text := tmp_path / "corpus.txt").write_text("\n\n".join(sentences(n_tokens // 8)))
    model = make_model(tmp_path / "gpt2", "gpt2")
    job = extraction_job(model, text, tmp_path / "rows", n_tokens=n_tokens, shard_rows=512)
    return msgspec.structs.replace(
        job, launch=msgspec.structs.replace(job.launch, backend="slurm", nodes=2, gpus="cpu:1")
    )


@pytest.mark.slow
def test_two_nodes_extract_the_same_rows_as_two_local_processes(submission, tmp_path: Path) -> None:
    extraction = extraction_on_nodes(tmp_path, N_ROWS)
    one = submission(given=extraction)
    one.start()
    assert one.until_ended() == [EXIT_FINISHED] * 2
    with contextlib.closing(SeriesReader(one.paths.metrics_db)) as reader:
        assert (reader.heartbeat().phase, reader.heartbeat().step) == ("finished", N_ROWS)
    here = extraction_job(
        Path(extraction.model.path),
        Path(extraction.text.path or ""),
        tmp_path / "here",
        n_tokens=N_ROWS,
        shard_rows=512,
    )
    run_ranks(here, 2, tmp_path / "meet")
    assert shards(tmp_path / "rows") == shards(tmp_path / "here")


@pytest.mark.slow
def test_an_extraction_on_two_nodes_stops_on_request_after_writing_its_last_shards(submission, tmp_path: Path) -> None:
    # The extraction job would take minutes, but the test stops it after a few seconds.
    extraction = extraction_on_nodes(tmp_path, 40 * N_ROWS)
    one = submission(given=extraction)
    one.start()
    one.until(lambda: len(shards(Path(extraction.extract.output))) >= 4)
    one.attempt.ask_to_stop()
    assert one.until_ended() == [EXIT_STOPPED] * 2
    n_stored = len([name for name in shards(Path(extraction.extract.output)) if name.startswith("mlp_out.0")]) * 512
    with contextlib.closing(SeriesReader(one.paths.metrics_db)) as reader:
        assert 0 < reader.heartbeat().step <= n_stored < extraction.extract.n_tokens


def shards(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each shard."""
    files = folder.glob("*/*.safetensors")
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_ranks_started_by_srun_restart_together_if_the_first_exchange_hangs(submission, monkeypatch) -> None:
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))
    monkeypatch.setenv(HANGING, "1")
    one = submission(n_steps=3)
    one.start(lambda spec: [sys.executable, "-P", "-m", "support.hanging_ranks", *rank_command(spec)[4:]])
    assert one.until_ended() == [EXIT_FINISHED] * 2
    with contextlib.closing(SeriesReader(one.paths.metrics_db)) as reader:
        assert [event.message for event in reader.events() if event.kind == "staged"] == [SENTENCE]
        assert [point.step for point in reader.points("loss")] == [1, 2, 3]


@pytest.mark.slow
def test_a_preempted_job_saves_on_all_ranks_and_is_queued_again(submission, cluster) -> None:
    one = submission(partition="main")
    job_id = launching.launch(one.data, one.job, Placement("cpu", (), 2), gpu_source="none")
    paths = one.data.run(job_id)
    one.until(lambda: one.control.job(job_id).step > 0)
    # SLURM sends SIGTERM to the job's tasks, and kills them after the partition's GraceTime.
    cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    again = "is queued again: another job took its nodes, n[1-2]"
    one.until(lambda: again in [event.message for event in one.control.events(job_id)])
    ended = [rank.exit_code for rank in one.control.ranks(job_id) if rank.attempt == 1]
    assert ended == [EXIT_STOPPED] * 2
    saved = max(paths.checkpoints.glob("step-*"))
    step = int(saved.name.removeprefix("step-"))
    one.until(lambda: one.control.job(job_id).attempt == 2 and one.control.job(job_id).step > step)
    assert read_spec(paths.rank_spec(2)).resume_from == saved
    edits.stop(one.data, job_id)
    one.until(lambda: one.control.job(job_id).state.is_final)
    assert one.control.job(job_id).state == JobState.STOPPED


@pytest.mark.slow
def test_after_a_node_failure_a_job_resumes_on_another_node(submission, cluster) -> None:
    one = submission(nodes=1, max_requeues=1)
    job_id = launching.launch(one.data, one.job, Placement("cpu", (), 1), gpu_source="none")

    def told() -> list[str]:
        return [event.message for event in one.control.events(job_id)]

    def fail_node_of(attempt: int) -> str:
        one.until(lambda: one.control.job(job_id).attempt == attempt and one.control.job(job_id).step > 0)
        seen = [message for message in told() if message.startswith("runs in SLURM on ")]
        node = seen[-1].removeprefix("runs in SLURM on ")
        cluster.command("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        return node

    try:
        first = fail_node_of(1)
        one.until(lambda: f"is queued again: node {first} failed" in told())
        one.until(lambda: told()[-1].startswith("runs in SLURM on "))
        second = fail_node_of(2)
        assert second != first
        one.until(lambda: one.control.job(job_id).state.is_final)
        assert one.control.job(job_id).error == (
            f"node {second} failed; it was already queued again 1 time (launch.max_requeues)"
        )
    finally:
        cluster.command("scontrol", "update", "nodename=n1,n2", "state=resume")


@pytest.mark.slow
def test_an_array_is_one_slurm_array_whose_tasks_are_separate_jobs(submission, cluster, monkeypatch) -> None:
    asked = cluster.folder / "asked"
    asked.unlink(missing_ok=True)
    monkeypatch.setenv("PATH", str(recording_sbatch(cluster.folder, asked)), prepend=":")
    one = submission(nodes=1)
    jobs = [(msgspec.structs.replace(one.job, name=f"job {index}"), Placement("cpu", (), 1)) for index in range(4)]
    ids = launching.launch_all(one.data, jobs, gpu_source="none", as_array=True, at_once=2)

    def states() -> list[JobState]:
        return [one.control.job(job_id).state for job_id in ids]

    def told(job_id: int) -> list[str]:
        return [event.message for event in one.control.events(job_id)]

    one.until(lambda: [one.control.job(job_id).step > 0 for job_id in ids] == [True, True, False, False])
    assert [word for word in asked.read_text().split() if word.startswith("--array")] == ["--array=0-3%2"]
    tasks = [(one.data.run(job_id).attempt(1) / "slurm_job").read_text() for job_id in ids]
    array = tasks[0].removesuffix("_0")
    assert tasks == [f"{array}_{index}" for index in range(4)]
    one.until(lambda: "waits in SLURM: JobArrayTaskLimit" in told(ids[3]))
    edits.stop(one.data, ids[2])
    edits.stop(one.data, ids[0])
    one.until(lambda: states()[0] == states()[2] == JobState.STOPPED)
    # Stopping one task does not concern the others, and lets the next task start.
    one.until(lambda: one.control.job(ids[3]).step > 0)
    assert one.control.job(ids[1]).state == JobState.RUNNING
    assert any(one.data.run(ids[0]).checkpoints.iterdir())
    assert f"is SLURM job {array}_3" in told(ids[3])
    # A task that is cancelled from outside ends only its own job, which saves.
    cluster.command("scancel", f"{array}_1")
    one.until(lambda: states()[1] == JobState.STOPPED)
    assert states()[3] == JobState.RUNNING
    edits.stop(one.data, ids[3])
    one.until(lambda: states()[3] == JobState.STOPPED)


def recording_sbatch(folder: Path, asked: Path) -> Path:
    """Return a folder with an sbatch that records its arguments and then runs the real one."""
    (program := folder / "bin" / "sbatch").parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexec {shutil.which("sbatch")} "$@"\n')
    program.chmod(0o755)
    return program.parent
