"""Kills the queue process and commands' supervisors at random times: no run may be lost, repeated or left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs.test_commands import log, run

from sae_tui.jobs import detach
from trainer.contract.process import ProcessRef
from trainer.contract.store.states import JobState

LINES = 60
# Records each start in a file, so that a second start would be noticed.
PROGRAM = """
import sys, time
with open(sys.argv[1], "a") as starts:
    starts.write("started\\n")
for number in range({lines}):
    print("line", number, flush=True)
    time.sleep(0.1)
sys.exit(int(sys.argv[2]))
"""


def victims(box, jobs: list[int]) -> dict[str, list[ProcessRef]]:
    supervisors = [box.job(job_id).supervisor for job_id in jobs]
    queue = box.queue_process()
    return {"supervisors": [one for one in supervisors if one], "queue": [queue] if queue else []}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_commands_run_exactly_once_no_matter_what_is_killed(box, tmp_path, seed):
    chance = random.Random(seed)
    box.make_store()
    detach.start_queue(box.data)
    starts = [tmp_path / f"starts{number}" for number in range(4)]
    program = PROGRAM.format(lines=LINES)
    jobs = [
        run(box, sys.executable, "-c", program, str(file), str(number % 2 * 7), start=lambda *_: None)
        for number, file in enumerate(starts)
    ]
    until = time.monotonic() + 2.5
    n_killed = 0
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.05, 0.4))
        found = victims(box, jobs)
        for one in found[chance.choice(["supervisors", "queue"])]:
            n_killed += one.send(signal.SIGKILL)
        if not box.queue_process():
            detach.start_queue(box.data)
    detach.start_queue(box.data)
    ended = [box.wait_ended(job_id, timeout_s=90.0) for job_id in jobs]
    assert n_killed
    assert [file.read_text() for file in starts] == ["started\n"] * 4
    assert [job.state for job in ended] == [JobState.FINISHED, JobState.FAILED] * 2, [job.error for job in ended]
    assert ["exit code 7" in (job.error or "") for job in ended] == [False, True] * 2
    for job_id in jobs:
        assert log(box, job_id).splitlines() == [f"line {number}" for number in range(LINES)]
        assert box.living(job_id) == []


def test_a_command_outlives_the_terminal_it_was_launched_in(box):
    box.make_store()
    data = f"--data-dir={box.data.root}"
    command = [sys.executable, "-m", "sae_tui", data, "--gpu-source=none", "run", "--gpus=0", "--", "sleep", "60"]
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(command[0], command)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        try:
            os.read(terminal, 4096)
        except OSError:
            break
    os.close(terminal)
    box.wait(1, JobState.RUNNING)
    (program,) = box.living(1)
    assert os.getsid(program) == program
    assert "tty" not in os.readlink(f"/proc/{program}/fd/0")
    subprocess.run([*command[:5], "stop", "1"], check=True, capture_output=True)
    assert box.wait_ended(1).state == JobState.STOPPED


def test_a_program_that_runs_out_of_memory_is_reported_with_that_cause(box):
    text = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); x = bytearray(2**30)"
    job = box.wait_ended(run(box, sys.executable, "-c", text))
    assert job.state == JobState.FAILED
    assert "MemoryError" in (job.error or "")


def test_a_full_disk_does_not_end_a_command(box, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root can mount a small disk")
    try:
        _run_on_full_disk(small)
    finally:
        subprocess.run(["umount", "-l", small], check=False)


def _run_on_full_disk(small: Path) -> None:
    from jobs.conftest import Box

    box = Box(small)
    job_id = run(box, sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1.5)")
    box.wait(job_id, JobState.RUNNING)
    with (small / "filler").open("wb", buffering=0) as filler:
        while _fills(filler):
            pass
    deadline = time.monotonic() + 20
    while box.living(job_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    (small / "filler").unlink()
    assert box.wait_ended(job_id, timeout_s=90.0).state == JobState.FINISHED
    box.end_everything()


def _fills(file) -> bool:
    try:
        file.write(bytes(4096))
    except OSError:
        return False
    return True
