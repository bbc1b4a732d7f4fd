"""Tests for command jobs with real programs: how they start, how they end, and what outlives what."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sae_tui.jobs import detach, edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.adopt import adopt
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.launchers.attached import AttachedProgram
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.process import ProcessRef
from trainer.contract.settings.command import Command, CommandJob
from trainer.contract.settings.job import Launch
from trainer.contract.settings.job_file import dump_job, parse_any
from trainer.contract.store.states import JobState

# The beginning of a program, which reports that it is running; each test appends the rest.
PROGRAM = "import os, signal, subprocess, sys, time\nprint('begun', flush=True)\n"


def command_job(box, *argv: str, launch: dict | None = None, **settings: object) -> CommandJob:
    command = Command(argv=list(argv), folder=str(box.data.root.parent), **settings)
    return CommandJob(command=command, launch=Launch(gpus="cpu", **launch or {}))


def run(box, *argv: str, gpus: tuple[int, ...] = (), start=detach.start, **options: object) -> int:
    box.make_store()
    job = command_job(box, *argv, **options)
    return launching.launch(box.data, job, box.placement(gpus), gpu_source="none", start=start)


def run_python(box, text: str, **options: object) -> int:
    return run(box, sys.executable, "-c", PROGRAM + textwrap.dedent(text), **options)


def log(box, job_id: int) -> str:
    file = box.data.run(job_id).log(0)
    return file.read_text(errors="replace") if file.exists() else ""


def wait_begun(box, job_id: int) -> None:
    box.wait_for(lambda: "begun" in log(box, job_id), f"the program of job {job_id}")
    box.wait(job_id, JobState.RUNNING)


def with_text(text: str) -> list[int]:
    """Return the pids of all live processes whose command line contains `text`."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _has(entry, text)]


def _has(entry: Path, text: str) -> bool:
    try:
        return text.encode() in (entry / "cmdline").read_bytes() and ProcessRef.of(int(entry.name)) is not None
    except OSError:
        return False


def unique(box) -> str:
    """Return a number of seconds for `sleep` that no other test uses."""
    return f"{1000 + abs(hash(str(box.data.root))) % 10**9}"


# Starting.


def test_a_command_runs_in_its_folder_and_environment_with_placeholders_replaced(box, monkeypatch):
    monkeypatch.setenv("FROM_THE_SHELL", "a secret")
    text = """
        print(os.getcwd(), os.environ["FROM_THE_SHELL"], os.environ["ADDED"], sys.argv[1:], os.getpid() == os.getsid(0))
        print(os.environ["SAE_TUI_JOB_ID"], os.environ["SAE_TUI_RUN_DIR"], os.environ["SAE_TUI_ATTEMPT"])
    """
    words = ("{job_id}", "{gpus}", "{run_dir}/x", '{"json": 1}', "{unknown}")
    job_id = run(box, sys.executable, "-c", PROGRAM + textwrap.dedent(text), *words, env=["ADDED=job {job_id}"])
    assert box.wait_ended(job_id).state == JobState.FINISHED
    root = box.data.run(job_id).root
    arguments = [str(job_id), "0", f"{root}/x", '{"json": 1}', "{unknown}"]
    assert log(box, job_id).splitlines() == [
        "begun", f"{box.data.root.parent} a secret job {job_id} {arguments} True", f"{job_id} {root} 1",
    ]  # fmt: skip
    assert "a secret" not in (root / "job.toml").read_text()
    assert "a secret" not in (root / "record.json").read_text()


def test_a_command_with_a_clean_environment_gets_no_variables_from_the_shell(box, monkeypatch):
    monkeypatch.setenv("FROM_THE_SHELL", "1")
    job_id = run_python(box, "print('FROM_THE_SHELL' in os.environ, os.environ['PATH'])", clean_env=True)
    assert box.wait_ended(job_id).state == JobState.FINISHED
    assert log(box, job_id).splitlines()[1:] == ["False /usr/local/bin:/usr/bin:/bin"]


def test_a_command_does_not_use_a_shell(box):
    job_id = run(box, sys.executable, "-c", "import sys; print(sys.argv[1])", "$HOME; `id` * > x")
    assert box.wait_ended(job_id).state == JobState.FINISHED
    assert log(box, job_id) == "$HOME; `id` * > x\n"


def test_a_command_that_holds_gpus_sees_them_and_locks_them_until_it_ends(box):
    job_id = run(box, "sleep", "60", gpus=(0, 1))
    box.wait(job_id, JobState.RUNNING)
    assert [lease.gpu_uuid for lease in box.control.leases()] == ["GPU-0", "GPU-1"]
    (pid,) = box.living(job_id)
    assert b"SAE_TUI_GPU_LIST=GPU-0,GPU-1" in Path(f"/proc/{pid}/environ").read_bytes()
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert box.control.leases() == []


def test_a_program_that_cannot_be_started_fails_with_the_reason(box):
    job_id = run(box, "/bin/true", start=lambda *_: None)
    file = box.data.run(job_id).job_file
    file.write_text(file.read_text().replace("/bin/true", "/bin/gone"))
    detach.start(box.data, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (
        JobState.FAILED, "its program could not be started: /bin/gone: No such file or directory",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"argv": []}, "command.argv: is empty; write a program and its arguments"),
        ({"argv": ["true"], "memory": "much"}, 'command.memory: must be a size like 20GiB or 500MB, not "much"'),
        ({"argv": ["true"], "env": ["A"]}, 'command.env: must be NAME=VALUE, not "A"'),
        ({"argv": ["true"], "retry_on": [0]}, "command.retry_on: must be a list of exit codes from 1 to 255"),
        ({"argv": ["a\0b"]}, "command.argv: must be UTF-8 without zero bytes"),
        ({"argv": ["true"], "stop_signal": "KILL"}, "command.stop_signal: must be"),
    ],
)
def test_each_mistake_in_the_settings_is_reported_in_one_sentence_that_names_the_setting(settings, message):
    job, problems = parse_any({"kind": "command", "command": settings})
    assert job is None
    (problem,) = problems
    assert str(problem).startswith(message)


def test_a_missing_program_and_a_missing_folder_are_reported_before_the_launch(box):
    box.make_store()
    with pytest.raises(JobFileError, match=r"command\.argv: there is no program not-installed on \$PATH"):
        run(box, "not-installed")
    job = command_job(box, "true").replace("command", folder="/not/there")
    with pytest.raises(JobFileError, match=r"command\.folder: is not a folder: /not/there"):
        launching.launch(box.data, job, Placement("cpu", (), 1), gpu_source="none")


def test_a_commands_job_file_is_read_back_as_the_same_job(box):
    job = command_job(box, "echo", "a b", "{job_id}", memory="20GiB", env=["A=1"], requeue_on=[75])
    again, problems = parse_any(__import__("tomllib").loads(dump_job(job)))
    assert (again, problems) == (job, [])


# Ending.


@pytest.mark.parametrize(
    ("text", "state", "error"),
    [
        ("sys.exit(0)", JobState.FINISHED, None),
        ("sys.exit(3)", JobState.FAILED, "its program ended with exit code 3; its last log line: begun"),
        ("os.abort()", JobState.FAILED, "its program was killed (SIGABRT); its last log line: begun"),
        ("raise ValueError('broken')", JobState.FAILED, "exit code 1; its last log line: ValueError: broken"),
    ],
)
def test_the_way_a_program_ends_is_recorded_in_words(box, text, state, error):
    job = box.wait_ended(run_python(box, text))
    assert job.state == state
    assert (job.error or "").endswith(error or "")
    assert (job.error is None) == (error is None)


def test_stopping_sends_the_chosen_signal_and_waits_for_the_program(box):
    text = """
        def stop(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGUSR1, stop)
        time.sleep(60)
    """
    job_id = run_python(box, text, stop_signal="USR1")
    wait_begun(box, job_id)
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert log(box, job_id).splitlines() == ["begun", "saved"]
    assert box.messages(job_id, "exit") == ["its program ended with exit code 0"]


def test_a_program_ignoring_the_signal_is_killed_with_all_its_descendants_after_the_grace_time(box):
    mark = unique(box)
    text = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "{mark}"])
        subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
        os.system("setsid nohup sleep {mark} >/dev/null 2>&1 &")
        os.system("env -i setsid sleep {mark} &")
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "{mark}"])
        time.sleep(60)
    """
    job_id = run_python(box, text, grace_s=0.5)
    wait_begun(box, job_id)
    box.wait_for(lambda: len(with_text(mark)) >= 6, "the descendants")
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert with_text(mark) == []
    assert box.messages(job_id, "exit") == ["its program was killed (SIGKILL)"]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_supervisor_whose_data_folder_is_gone_ends_its_program_logs_one_sentence_and_exits(box, is_asked):
    job_id = run_python(box, "time.sleep(60)")
    wait_begun(box, job_id)
    supervisor, (program,) = box.job(job_id).supervisor, box.living(job_id)
    box.control.close()
    moved = box.data.root.rename(box.data.root.with_name("moved"))
    if is_asked:
        supervisor.send(signal.SIGTERM)
    box.wait_for(lambda: not supervisor.is_alive(), "the supervisor to exit")
    assert ProcessRef.of(program) is None
    said = (moved / "runs" / str(job_id) / "logs" / "supervisor.log").read_text()
    assert said.count(f"exits, because {box.data.root} no longer exists\n") == 1
    assert "exit.json" not in said
    assert not box.data.root.exists()


def test_processes_left_behind_by_a_program_end_with_it(box):
    mark = unique(box)
    job_id = run_python(box, f'subprocess.Popen(["sleep", "{mark}"], start_new_session=True)')
    assert box.wait_ended(job_id).state == JobState.FINISHED
    assert with_text(mark) == []
    assert box.messages(job_id, "left-behind") == ["1 process left behind by its program ended with it"]


def test_a_job_launched_by_a_command_outlives_the_command(box):
    text = f"""
        from pathlib import Path
        from jobs.test_commands import run
        from jobs.conftest import Box
        print(run(Box(Path({str(box.data.root.parent)!r})), "sleep", "60"))
    """
    tests = Path(__file__).parents[1]
    first = run_python(box, text, env=[f"PYTHONPATH={tests}:{tests.parent}"])
    assert box.wait_ended(first).state == JobState.FINISHED
    second = int(log(box, first).splitlines()[-1])
    assert box.job(second).supervisor.is_alive()
    box.wait(second, JobState.RUNNING)
    assert len(box.living(second)) == 1
    edits.stop(box.data, second)
    assert box.wait_ended(second).state == JobState.STOPPED


def test_a_command_is_warned_and_then_stopped_at_its_time_limit(box):
    job_id = run(box, "sleep", "60", launch={"time_limit": "0:00:05"})
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (JobState.STOPPED, "reached its time limit of 5 s")
    assert len(box.messages(job_id, "late")) == 1
    assert box.messages(job_id, "stopping") == ["reached its time limit of 5 s"]


def test_a_failed_command_is_restarted_only_for_the_chosen_exit_codes(box):
    text = "sys.exit({'1': 9, '2': 9, '3': 4}[os.environ['SAE_TUI_ATTEMPT']])"
    job_id = run_python(box, text, retry_on=[9], launch={"max_restarts": 5})
    job = box.wait_ended(job_id, timeout_s=60.0)
    assert (job.state, job.attempt, job.restarts) == (JobState.FAILED, 3, 2)
    assert "exit code 4" in job.error


def test_a_resumed_job_is_queued_with_a_note_if_the_queue_process_does_not_start(box):
    job_id = run(box, "false")
    assert box.wait_ended(job_id).state == JobState.FAILED
    log_file = box.data.root / "queue.log"
    log_file.mkdir()
    plan = resume(box.data, job_id, lambda _: box.placement())
    assert plan.notes[-1].startswith(f"job {job_id} is queued, but the queue could not be started: ")
    assert box.job(job_id).state == JobState.QUEUED


def test_a_command_that_exits_with_the_chosen_code_is_queued_again(box):
    job_id = run_python(box, "sys.exit(75 if os.environ['SAE_TUI_ATTEMPT'] == '1' else 0)", requeue_on=[75])
    job = box.wait_ended(job_id, timeout_s=60.0)
    assert (job.state, job.attempt, job.restarts) == (JobState.FINISHED, 2, 0)
    (message,) = box.messages(job_id, "requeued")
    assert message.startswith("is queued again: its program ended with exit code 75")


def test_a_log_that_grows_without_end_is_shortened_in_the_middle(box):
    text = """
        for number in range(2_000_000):
            print(f"line {number:07d} of a program that prints without end, about eighty bytes each")
        print("last line")
    """
    job_id = run_python(box, text, log_limit_mib=1)
    assert box.wait_ended(job_id, timeout_s=60.0).state == JobState.FINISHED
    file = box.data.run(job_id).log(0)
    assert file.stat().st_size < 40 * 2**20
    lines = log(box, job_id).splitlines()
    assert lines[0] == "begun"
    # Lines written while the log is being shortened may precede the message.
    assert "last line" in lines
    assert any(line.startswith("[sae-tui removed ") for line in lines)
    assert "removed from the middle of its log" in box.messages(job_id, "left-behind")[0]


# Supervisors that die, and adopted processes.


def killed_supervisor(box, job_id: int) -> None:
    supervisor = box.job(job_id).supervisor
    supervisor.send(signal.SIGKILL)
    box.wait_for(lambda: not supervisor.is_alive(), "the supervisor to be gone")


def test_a_program_outlives_its_killed_supervisor_and_a_new_supervisor_attaches_to_it(box):
    job_id = run_python(box, "time.sleep(3); print('end'); sys.exit(6)", gpus=(0,))
    wait_begun(box, job_id)
    killed_supervisor(box, job_id)
    revived = []
    assert reconcile(box.data, revived.append) == []
    assert revived == [box.data]
    assert [lease.gpu_uuid for lease in box.control.leases()] == ["GPU-0"]
    detach.start(box.data, job_id)
    job = box.wait_ended(job_id)
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.error == "its program ended with exit code 6; its last log line: end"
    assert log(box, job_id).splitlines() == ["begun", "end"]


def test_the_queue_process_replaces_a_killed_supervisor_at_once(box):
    box.start_queue()
    job_id = run(box, "sleep", "60", start=lambda *_: None)
    box.wait(job_id, JobState.RUNNING)
    first = box.job(job_id).supervisor
    killed_supervisor(box, job_id)
    box.wait_for(lambda: box.job(job_id).supervisor != first, "another supervisor")
    assert len(box.living(job_id)) == 1
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert box.job(job_id).attempt == 1


def test_two_supervisors_never_run_the_same_job(box):
    job_id = run(box, "sleep", "60")
    box.wait(job_id, JobState.RUNNING)
    with pytest.raises(UserError, match=f"job {job_id} has another supervisor"):
        detach.start(box.data, job_id)
    assert len(box.living(job_id)) == 1


def test_a_program_whose_supervisor_died_before_recording_it_is_found_by_its_mark(box):
    job_id = run(box, "sleep", "60")
    box.wait(job_id, JobState.RUNNING)
    (pid,) = box.living(job_id)
    killed_supervisor(box, job_id)
    box.control._db.execute("DELETE FROM ranks")
    assert reconcile(box.data) == []
    detach.start(box.data, job_id)
    box.wait_for(lambda: box.living(job_id) == [pid], "the program to be recorded")
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED
    assert ProcessRef.of(pid) is None


def test_a_command_whose_supervisor_died_before_it_started_the_program_is_queued_again(box):
    job_id = run(box, "sleep", "60", gpus=(0,), start=lambda *_: None)
    queued = box.job(job_id).queued
    gone = {"boot_id": "before-the-restart", "supervisor_pid": 1, "supervisor_start": 1}
    box.control.lease(box.job(job_id), [(0, "GPU-0")], attempt=1)
    box.control.update(job_id, **gone)
    assert reconcile(box.data) == [job_id]
    job = box.job(job_id)
    assert (job.state, job.attempt, job.queued, box.control.leases()) == (JobState.QUEUED, 0, queued, [])
    detach.start(box.data, job_id)
    assert box.wait(job_id, JobState.RUNNING).attempt == 1
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED


def test_a_program_that_ended_without_a_supervisor_is_not_started_a_second_time(box):
    job_id = run(box, "sleep", "60")
    box.wait(job_id, JobState.RUNNING)
    (pid,) = box.living(job_id)
    killed_supervisor(box, job_id)
    os.kill(pid, signal.SIGKILL)
    box.wait_for(lambda: box.living(job_id) == [], "the program to be gone")
    detach.start(box.data, job_id)
    assert reconcile(box.data) in ([], [job_id])
    box.wait(job_id, JobState.LOST, JobState.FAILED)
    assert len(box.control.ranks(job_id)) == 1


@pytest.fixture
def stranger(tmp_path):
    """Start a process of this user that is not a job and writes its output to a file."""
    output = (tmp_path / "output.txt").open("wb")
    text = PROGRAM + "for n in range(600): print(n, flush=True); time.sleep(0.1)"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=output, cwd=tmp_path, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_an_adopted_process_is_followed_to_its_end_and_its_log_and_exit_are_recorded(box, stranger, tmp_path):
    box.make_store()
    job_id = adopt(box.data, stranger.pid, [], gpu_source="none", name="theirs", start=detach.start)
    job = box.wait(job_id, JobState.RUNNING)
    assert (job.name, job.mode, job.device) == ("theirs", "adopted", "cpu")
    assert abs(job.started - time.time()) < 60
    box.wait_for(lambda: "begun" in log(box, job_id), "the copied log")
    with pytest.raises(UserError, match=f"process {stranger.pid} already belongs to job {job_id}"):
        adopt(box.data, stranger.pid, [], gpu_source="none")
    first = box.job(job_id).supervisor
    killed_supervisor(box, job_id)
    box.wait_for(lambda: box.job(job_id).supervisor != first, "another supervisor")
    edits.stop(box.data, job_id)
    stranger.wait()
    assert box.wait_ended(job_id).state == JobState.STOPPED
    copied = log(box, job_id).splitlines()
    assert copied == (tmp_path / "output.txt").read_text().splitlines()[: len(copied)]
    assert "killed (SIGTERM)" in box.messages(job_id, "exit")[0]


def test_a_process_that_cannot_be_adopted_is_refused_in_one_sentence(box):
    box.make_store()
    for pid, message in ((2**22 + 1, "there is no process"), (os.getpid(), "belongs to sae-tui itself")):
        with pytest.raises(UserError, match=message):
            adopt(box.data, pid, [], gpu_source="none")
    assert box.control.jobs() == []


def test_the_name_of_an_adopted_process_contains_no_secrets(box):
    box.make_store()
    program = [sys.executable, "-c", "import time; time.sleep(100)", "--token", "s3cr3t"]
    with ended(box, subprocess.Popen(program)) as process:
        job_id = adopt(box.data, process.pid, [], gpu_source="none", start=detach.start)
        box.wait(job_id, JobState.RUNNING)
        name = box.job(job_id).name
        assert "--token" in name
        assert "s3cr3t" not in name
    box.wait_ended(job_id)


def test_a_process_without_a_name_can_be_adopted(box):
    box.make_store()
    with ended(box, subprocess.Popen(["", "-c", "import time; time.sleep(100)"], executable=sys.executable)) as process:
        job_id = adopt(box.data, process.pid, [], gpu_source="none", start=detach.start)
        box.wait(job_id, JobState.RUNNING)
        assert box.job(job_id).name.startswith(f"process {process.pid} -c")
    box.wait_ended(job_id)


@contextlib.contextmanager
def ended(box, process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Yield a process once its program is running, and kill it afterwards."""
    try:
        python = os.path.realpath(sys.executable)
        box.wait_for(lambda: os.path.realpath(f"/proc/{process.pid}/exe") == python, "the program")
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_cannot_be_adopted(box):
    process = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        with pytest.raises(UserError, match="belongs to another user; adopt one of your own"):
            adopt(box.data, process.pid, [], gpu_source="none")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("reaped", [False, True])
def test_the_exit_code_of_a_process_with_another_parent_is_known(tmp_path, reaped):
    process = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
    attached = AttachedProgram(ProcessRef.of(process.pid), tmp_path / "exit.json", tmp_path / "log")
    assert not attached.wait(0.05)
    process.stdin.close()
    if reaped:
        process.wait()
    assert attached.wait(30.0)
    # Before Linux 6.15, the exit code of a process that has been reaped is unknown.
    assert attached.code == 7 or (reaped and "the kernel does not report its exit code" in attached.how())
    process.wait()
