"""Tests for commands on a real SLURM cluster: their environment, how they are stopped, and how they end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.slurm import Cluster

from sae_tui.jobs import edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.process import ProcessRef
from trainer.contract.settings.job_file import any_job_of
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

pytestmark = pytest.mark.timeout(240)
# Prints each signal it receives, and exits after USR1.
OBEDIENT = """
trap 'echo got TERM' TERM
trap 'echo got USR1; exit 7' USR1
echo ready
while :; do sleep 0.1; done
"""
STUBBORN = """
trap '' TERM USR1
setsid sh -c "trap '' TERM; echo \\$\\$ > child; while :; do sleep 0.1; done" &
echo ready
while :; do sleep 0.1; done
"""


class Command:
    """A command launched as a user would launch it, with its own supervisor."""

    def __init__(self, submission: Callable, argv: list[str], launch: dict, **command: object) -> None:
        folder = {"folder": str(command.pop("folder", "/"))}
        table = {"kind": "command", "command": {"argv": argv} | folder | command}
        job = any_job_of(table | {"launch": {"backend": "slurm", "gpus": "cpu"} | launch})
        self._one = submission(given=job)
        self.data = self._one.data
        n = self._one.spec.world_size
        where = Placement("cpu" if job.on_cpu else "cuda", (), n)
        self.id = launching.launch(self.data, job, where, gpu_source="none")
        self.paths = self.data.run(self.id)

    @property
    def row(self) -> Job:
        return self._one.control.job(self.id)

    @property
    def log(self) -> str:
        file = self.paths.log(0)
        return file.read_text() if file.exists() else ""

    @property
    def told(self) -> list[str]:
        return [event.message for event in self._one.control.events(self.id)]

    def until(self, holds: Callable[[], object]) -> None:
        self._one.until(holds, 60)

    def until_ended(self) -> Job:
        self.until(lambda: self.row.state.is_final)
        return self.row

    def exit_of(self, attempt: int = 1) -> tuple[int | None, int | None]:
        """Return the exit code and the signal recorded for the program."""
        (rank,) = [rank for rank in self._one.control.ranks(self.id) if rank.attempt == attempt]
        return rank.exit_code, rank.exit_signal

    def slurm_id(self, attempt: int = 1) -> str:
        return (self.paths.attempt(attempt) / "slurm_job").read_text()


@pytest.fixture
def run(submission: Callable) -> Callable[..., Command]:
    def make(*argv: str, launch: dict | None = None, **command: object) -> Command:
        return Command(submission, list(argv), launch or {}, **command)

    return make


def test_a_command_gets_its_environment_and_the_gpus_that_slurm_assigned_to_it(
    run, cluster: Cluster, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    hostile = 'it\'s; $(touch /pwned) "x"\nexit 1'
    shown = (
        'printf "%s|" "$@" "$SAE_TUI_GPUS" "$SAE_TUI_GPU_LIST" "$CUDA_VISIBLE_DEVICES" "$CUDA_DEVICE_ORDER" "$N" "$PWD"'
    )
    secret = 'test "$MY_SECRET" = hunter2 && test "$SLURM_JOB_ID" != 12345 && echo arrived'
    one = run(
        *("sh", "-c", f"{shown}; {secret}", "sh", "{gpus}", "{gpu_list}", "{job_id}", "{run_dir}", hostile),
        launch={"gpus": "auto:2"},
        env=["N={gpus}"],
        folder=tmp_path,
    )
    assert one.until_ended().state == JobState.FINISHED
    values = ["2", "0,1", str(one.id), str(one.paths.root), hostile]
    assert one.log == "|".join([*values, "2", "0,1", "0,1", "PCI_BUS_ID", "2", str(tmp_path)]) + "|arrived\n"
    assert not Path("/pwned").exists()
    assert one.exit_of() == (0, None)
    assert "runs in SLURM on n1" in one.told or "its program ended with exit code 0" in one.told
    attempt = one.paths.attempt(1)
    kept = [
        file.read_bytes() for file in (*attempt.iterdir(), *(cluster.folder / "state").rglob("*")) if file.is_file()
    ]
    assert not any(b"hunter2" in content for content in kept)


def test_a_job_on_the_cpu_sees_no_gpus(run) -> None:
    one = run("sh", "-c", 'echo "{gpus}|${CUDA_VISIBLE_DEVICES-unset}|"')
    one.until_ended()
    assert one.log == "0||\n"


def test_a_command_is_restarted_for_the_chosen_exit_code_and_exit_codes_are_recorded(run) -> None:
    script = "echo attempt $SAE_TUI_ATTEMPT; test $SAE_TUI_ATTEMPT = 1 && exit 75; echo broken; exit 3"
    one = run("sh", "-c", script, launch={"max_restarts": 5}, retry_on=[75])
    row = one.until_ended()
    assert row.state == JobState.FAILED, one.told
    assert row.error.startswith("its program on ")
    assert row.error.endswith(" ended with exit code 3; its last log line: broken")
    assert [one.exit_of(1), one.exit_of(2)] == [(75, None), (3, None)]


def test_a_command_that_exits_with_the_chosen_code_is_queued_again(run, tmp_path: Path) -> None:
    script = "test -e saved && exit 0; touch saved; exit 85"
    one = run("sh", "-c", script, requeue_on=[85], folder=tmp_path)
    assert one.until_ended().state == JobState.FINISHED
    assert any(message.startswith("is queued again: ") for message in one.told)


def test_stopping_a_command_sends_the_chosen_signal_once(run) -> None:
    one = run("sh", "-c", OBEDIENT, stop_signal="USR1")
    one.until(lambda: "ready" in one.log)
    one.until(lambda: one.row.state == JobState.RUNNING)
    edits.stop(one.data, one.id)
    assert one.until_ended().state == JobState.STOPPED
    assert (one.log.count("got USR1"), one.log.count("got TERM")) == (1, 0)
    assert one.exit_of() == (7, None)


def test_a_program_ignoring_its_stop_signal_is_killed_with_children_after_the_grace_time(run, tmp_path: Path) -> None:
    one = run("sh", "-c", STUBBORN, grace_s=0.5, folder=tmp_path)
    one.until(lambda: "ready" in one.log and (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    edits.stop(one.data, one.id)
    assert one.until_ended().state == JobState.STOPPED
    assert one.exit_of() == (None, signal.SIGKILL)
    assert "its program was killed (SIGKILL)" in one.told
    assert ProcessRef.of(int((tmp_path / "child").read_text())) is None


def test_killing_a_command_does_not_wait_for_its_grace_time(run, tmp_path: Path) -> None:
    one = run("sh", "-c", STUBBORN, grace_s=3600.0, folder=tmp_path)
    one.until(lambda: "ready" in one.log)
    edits.kill(one.data, one.id)
    assert one.until_ended().state == JobState.STOPPED
    assert one.exit_of() == (None, signal.SIGKILL)


def test_a_command_waiting_for_nodes_counts_as_starting_and_can_be_stopped(run, cluster: Cluster) -> None:
    cluster.command("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 100")
    one = run("sh", "-c", "echo started")
    one.until(lambda: "waits in SLURM: Resources" in one.told)
    assert one.row.state == JobState.STARTING
    edits.stop(one.data, one.id)
    assert one.until_ended().state == JobState.STOPPED
    assert one.log == ""


@pytest.mark.parametrize(("requeue_on", "state"), [([85], JobState.FINISHED), ([], JobState.STOPPED)])
def test_near_its_time_limit_a_command_gets_its_stop_signal_and_may_be_queued_again(
    run, cluster: Cluster, tmp_path: Path, requeue_on, state
) -> None:
    script = "test -e saved && exit 0; trap 'touch saved; exit 85' INT; echo ready; while :; do sleep 0.1; done"
    one = run("sh", "-c", script, stop_signal="INT", requeue_on=requeue_on or None, folder=tmp_path)
    one.until(lambda: "ready" in one.log)
    # SLURM itself sends this signal near the time limit, because of --signal.
    cluster.command("scancel", "--batch", "--signal=USR1", one.slurm_id())
    row = one.until_ended()
    assert (row.state, (tmp_path / "saved").exists()) == (state, True)
    if not requeue_on:
        assert row.error == "was asked to stop because its SLURM time limit was near"


def test_a_command_cancelled_from_outside_gets_only_one_signal(run, cluster: Cluster) -> None:
    one = run("sh", "-c", "trap 'echo got TERM; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    one.until(lambda: "ready" in one.log)
    cluster.command("scancel", one.slurm_id())
    one.until_ended()
    assert one.log.count("got TERM") == 1


def test_a_folder_that_is_missing_on_the_node_is_reported_as_the_reason(run, tmp_path: Path) -> None:
    row = run("true", folder=tmp_path / "gone").until_ended()
    assert row.state == JobState.FAILED
    assert row.error.startswith(f"command.folder: {tmp_path}/gone does not exist on ")


def test_the_slurm_job_of_a_killed_supervisor_is_cancelled_before_the_job_is_lost(run, cluster: Cluster) -> None:
    one = run("sh", "-c", "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    one.until(lambda: "ready" in one.log)
    one.until(lambda: one.row.state == JobState.RUNNING)
    one.row.supervisor.send(signal.SIGKILL)
    one.until(lambda: reconcile(one.data) or one.row.state.is_final)
    assert one.row.state == JobState.LOST
    one.until(lambda: "saved" in one.log)
    one.until(lambda: cluster.command("squeue", "-h", "-j", one.slurm_id(), "-t", "PENDING,RUNNING", "-o", "%T") == "")


@pytest.mark.parametrize(("code", "state"), [(0, JobState.FINISHED), (9, JobState.FAILED)])
def test_how_a_program_ended_is_known_even_if_its_supervisor_was_killed_first(run, tmp_path: Path, code, state) -> None:
    one = run("sh", "-c", f"echo ready; while ! test -e go; do sleep 0.1; done; exit {code}", folder=tmp_path)
    one.until(lambda: "ready" in one.log)
    one.row.supervisor.send(signal.SIGKILL)
    (tmp_path / "go").touch()
    one.until((one.paths.attempt(1) / "exit.json").exists)
    one.until(lambda: reconcile(one.data) or one.row.state.is_final)
    assert one.row.state == state


def test_a_program_reaches_all_its_nodes_with_srun(run) -> None:
    one = run("srun", "sh", "-c", 'echo "node $SLURM_NODEID of {gpus}"', launch={"nodes": 2, "gpus": "auto:1"})
    assert one.until_ended().state == JobState.FINISHED
    assert sorted(one.log.splitlines()) == ["node 0 of 1", "node 1 of 1"]
