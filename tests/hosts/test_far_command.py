"""Tests for `run --host` and `launch --host` with the real ssh and a real sshd; the other host is this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import tomli_w
from support.box import processes_of
from support.sshd import Sshd, why_not

from sae_tui.cli_commands import receiving
from sae_tui.ssh import by_hand
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
ROOT = Path(__file__).parents[2]


class Far:
    """This machine, acting as another host: its sshd and data folder, and a command line on this side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.sshd = Sshd(folder / "sshd")
        self.sshd.install(folder / "far")
        self.data = DataDir(folder / "far")
        self._here = folder / "here"
        self._here.mkdir(mode=0o700)
        (self._here / "settings.toml").write_text(tomli_w.dumps({"ssh_command": self.sshd.ssh}))

    def start(self, *arguments: str, folder: Path | None = None) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT), "SAE_TUI_DATA_DIR": str(self._here), "ONLY_HERE": "1"}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sae_tui", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder or self.folder,
            env=env,
            # A shell's background processes ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def run(self, *arguments: str, code: int = 0, folder: Path | None = None) -> tuple[str, str]:
        """Run a command here, and return its output and errors."""
        process = self.start(*arguments, folder=folder)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == code, (process.returncode, output, errors)
        assert "Traceback" not in errors
        return output, errors

    @property
    def jobs(self) -> list[Job]:
        """The jobs on the other host, newest first."""
        with contextlib.closing(Control(self.data.control_db, readonly=True)) as control:
            return control.jobs()

    def log(self, job_id: int) -> str:
        return self.data.run(job_id).log(0).read_text()

    def close(self) -> None:
        self.sshd.close()
        # If a program loses its supervisor, the queue process starts another one, so kill both before the programs.
        until(lambda: not self._kill_background())
        with (
            contextlib.suppress(StoreError),
            contextlib.closing(Control(self.data.control_db, readonly=True)) as control,
        ):
            for rank in (rank for job in control.jobs() for rank in control.ranks(job.id)):
                rank.process.send(signal.SIGKILL)

    def _kill_background(self) -> list[int]:
        """Kill the queue process and the supervisors, and return the pids found."""
        found = processes_of(self.data.root)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    far = Far(tmp_path)
    yield far
    far.close()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def receivers(data: DataDir) -> list[str]:
    """Return the command lines of the processes that run a command for another host with this data folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SAE_TUI_DATA_DIR={data.root}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
    return [words for words in found if "\0receive\0" in words]


def test_a_command_runs_on_the_host_in_the_same_folder_with_a_login_environment(far: Far) -> None:
    (far.sshd.folder / ".profile").write_text("echo welcome; echo noise >&2; export FROM_LOGIN=yes\n")
    seen = far.folder / "seen"
    real = (far.sshd.programs / "sae-tui").read_text().removeprefix("#!/bin/sh\n")
    far.sshd.program(f'printf "%s|" "$@" >> {seen}\n{real}')
    odd = "a 'b' \"c\" $(touch pwned); *\nd"
    script = 'printf "%s|" "$TOKEN" "$FROM_LOGIN" "$ONLY_HERE" "$PWD" "$1"; exit 7'
    argv = ["--gpus", "0", "--env", "TOKEN=s'ecret", "--wait", "--", "sh", "-c", script, "sh", odd]
    output, errors = far.run("run", "--host", "gpu1", *argv, code=4)
    assert far.log(1) == "|".join(["s'ecret", "yes", "", str(far.folder), odd]) + "|"
    assert output.splitlines()[0] == "gpu1: job 1 is launched; Ctrl-C leaves it running"
    assert output.splitlines()[1].startswith("gpu1: job 1 failed: its program ended with exit code 7")
    assert "noise" not in errors
    # Nothing that the user typed appears on a command line on the host.
    assert seen.read_text() == "receive|"
    assert json.loads(far.run("run", "--host", "gpu1", "--gpus", "0", "--json", "--", "true")[0])["id"] == 2


def test_a_job_file_is_launched_on_the_host_with_paths_relative_to_its_folder(far: Far) -> None:
    (far.folder / "jobs").mkdir()
    file = far.folder / "jobs" / "job.toml"
    table = {"kind": "command", "command": {"argv": ["sh", "-c", "pwd"], "folder": "."}, "launch": {"gpus": "cpu"}}
    file.write_text(tomli_w.dumps(table))
    argv = ["launch", "jobs/job.toml", "--host", "gpu1", "--allow-code", "--tag", "far", "--wait"]
    output, _ = far.run(*argv, "--set", "name=named", "--grid", "launch.priority=1,2")
    assert output.count("has finished") == 2
    assert {(job.name.split()[0], job.priority, job.tags) for job in far.jobs} == {
        ("named", 1, ("far",)),
        ("named", 2, ("far",)),
    }
    assert far.log(1) == f"{far.folder}\n"
    refusal = far.run("launch", "jobs/job.toml", "--host", "gpu1", code=1)[1]
    assert refusal.startswith("sae-tui: error: command.argv: runs `sh -c pwd` as you; add --allow-code")
    assert len(far.jobs) == 2


def test_a_mistake_is_reported_in_one_sentence_and_keeps_its_exit_code(far: Far, tmp_path: Path) -> None:
    gone = tmp_path / "only-here"
    argv = ["run", "--host", "gpu1", "--gpus", "0"]
    assert far.run(*argv, "--memory", "x", "--", "true", code=2)[1].startswith("sae-tui: error: --memory: must be")
    _, errors = far.run(*argv, "--folder", str(gone), "--", "true", code=1)
    assert errors.startswith(f"gpu1: sae-tui: error: --folder: {gone} is not a folder that you may enter on ")
    output, _ = far.run(*argv, "--json", "--", "no-such-program", code=1)
    assert json.loads(output)["error"]["field"] == "command.argv"
    far.sshd.use_key("other_key")
    output, _ = far.run(*argv, "--json", "--", "true", code=1)
    assert json.loads(output)["error"]["message"] == "host gpu1 accepts none of your keys"


def test_ctrl_c_leaves_the_job_running_and_ends_the_command_on_the_host(far: Far) -> None:
    waiting = far.start("run", "--host", "gpu1", "--gpus", "0", "--wait", "--", "sleep", "1000")
    assert waiting.stdout.readline().startswith("gpu1: job 1 is launched")
    assert len(receivers(far.data)) == 1
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(60) == 130
    until(lambda: not receivers(far.data))
    assert not far.jobs[0].state.is_final


def test_a_lost_connection_is_reported_and_leaves_the_job_running(far: Far) -> None:
    waiting = far.start("run", "--host", "gpu1", "--gpus", "0", "--wait", "--", "sleep", "1000")
    assert waiting.stdout.readline().startswith("gpu1: job 1 is launched")
    far.sshd.cut()
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    lost = f"the connection to host gpu1 was lost; `{by_hand('gpu1', 'jobs')}` shows its jobs, which keep running"
    assert errors.splitlines()[-1] == f"sae-tui: error: {lost}"
    until(lambda: not receivers(far.data))
    assert not far.jobs[0].state.is_final


def test_a_killed_ssh_is_reported_as_a_lost_connection(far: Far) -> None:
    waiting = far.start("run", "--host", "gpu1", "--gpus", "0", "--wait", "--", "sleep", "1000")
    assert waiting.stdout.readline().startswith("gpu1: job 1 is launched")
    (ssh,) = psutil.Process(waiting.pid).children()
    ssh.kill()
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert errors.splitlines()[-1].startswith("sae-tui: error: the connection to host gpu1 was lost; ")


def test_messages_say_on_which_host_to_run_the_commands_that_they_name(far: Far) -> None:
    argv = ["--host", "gpu1", "--gpus", "0"]
    output, _ = far.run("run", *argv, "--", "true")
    follow = "`sae-tui job 1` on gpu1 and `sae-tui logs 1 -f` on gpu1 follow it"
    assert output == f"gpu1: job 1 is queued for the CPU; {follow}\n"
    assert "; `sae-tui release 2` on gpu1 lets it start" in far.run("run", *argv, "--hold", "--", "true")[0]
    refusal = ["--after", "99", "--", "true"]
    _, errors = far.run("run", *argv, *refusal, code=1)
    assert errors == "gpu1: sae-tui: error: there is no job 99; `sae-tui jobs` on gpu1 lists them\n"
    output, _ = far.run("run", *argv, "--json", *refusal, code=1)
    assert json.loads(output)["error"]["fix"] == "`sae-tui jobs` on gpu1 lists them"


HELLO = '{"type":"hello","protocol":1,"version":"0.2.0"}'


@pytest.mark.parametrize(
    ("program", "code", "shown"),
    [
        (f"echo '{HELLO}'; printf '\\033[2Jx\\n'; printf '\\033[1my' >&2; exit 5", 5, ["gpu1: \ufffd[2Jx"]),
        (f"echo '{HELLO}'; head -c 3000000 /dev/zero | tr '\\0' z; exit 3", 3, ["z" * 1000]),
        (f"yes no | head -n 300; echo '{HELLO}'", 1, ["host gpu1 prints too much when you log in"]),
        (f"echo '{HELLO.replace('1', '9')}'", 1, ["which is newer than the one here; update it here"]),
        ("echo \"error: COMMAND: invalid choice: 'receive'\" >&2; exit 2", 1, ["sae-tui that is too old"]),
        ("echo '{\"type\":\"log\"}'", 1, ["host gpu1 sent an invalid greeting"]),
        ("echo broken >&2; exit 9", 1, ["host gpu1 ended sae-tui: broken"]),
    ],
    ids=["escapes", "long line", "noise", "newer", "older", "no greeting", "crash"],
)  # fmt: skip
def test_the_hosts_output_is_filtered_and_its_faults_are_reported(
    far: Far, program: str, code: int, shown: Sequence[str]
) -> None:
    far.sshd.program(program)
    output, errors = far.run("run", "--host", "gpu1", "--gpus", "0", "--", "true", code=code)
    assert all(words in output + errors for words in shown)
    assert "\033" not in output + errors


@pytest.mark.parametrize(
    ("request_line", "sentence"),
    [
        ({"arguments": ["rm", "1", "--yes"], "folder": "/"}, "only `run` and `launch` can be sent to another host"),
        ({"arguments": [], "folder": "/"}, "only `run` and `launch` can be sent to another host"),
        ({"arguments": "run"}, "the command from the other host is invalid: "),
    ],
)
def test_a_host_runs_no_commands_other_than_run_and_launch(tmp_path: Path, request_line: object, sentence: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "SAE_TUI_DATA_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sae_tui", "receive"],
        input=json.dumps(request_line) + "\n",
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"sae-tui: error: {sentence}")


def test_a_folder_path_that_is_invalid_on_every_host_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="--folder: a\0b is not a folder that you may enter on "):
        receiving._enter("a\0b", is_required=True)
