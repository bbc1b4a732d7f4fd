"""Tests for commands that change jobs."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.box import wait_for_store
from support.commands import command_file

from tests.cli.test_jobs import record, wait_for_state
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState


def held(shell, *flags: object) -> int:
    """Launch a held job and return its id."""
    return shell.json("launch", shell.job_file, "--gpus", "cpu", "--hold", *flags)["id"]


def row(shell, job_id: int) -> dict:
    return shell.json("job", job_id)


def test_every_edit_is_reported_and_visible_to_the_next_command(shell):
    first, second = record(shell), record(shell)
    output = shell.run("rename", second, "better").stdout
    assert output == f'job {second} is now called "better"\n'
    assert shell.json("rename", second, "best") == {"id": second, "message": f'job {second} is now called "best"'}
    for command, after in (
        (["tag", second, "b", "a", "--remove", "c"], {"tags": ["a", "b"]}),
        (["note", second, "see fig. 3"], {"note": "see fig. 3"}),
        (["priority", second, "5"], {"priority": 5}),
        (["priority", second, "-5"], {"priority": -5}),
        (["after", second, first], {"after": [first]}),
        (["hold", second], {"held": True}),
        (["release", second], {"held": False, "after": [first]}),
        (["after", second], {"after": []}),
    ):
        assert shell.run(*command).stdout.startswith(f"job {second} ")
        assert after.items() <= row(shell, second).items()
    assert row(shell, second)["name"] == "best"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["rename", "1", ""], 1, "a name must have 1 to 80 characters, not 0"),
        (
            ["tag", "1", "--", "-base"],
            1,
            'a tag cannot start with "-", as "-base" does; `--remove base` removes a tag',
        ),
        (["tag", "1", "two words"], 1, 'a tag is one word of at most 40 characters, not "two words"'),
        (["priority", "1", "101"], 2, "N: 101 is out of range; give a priority from -100 to 100"),
        (["priority", "1", "high"], 2, 'N: must be an integer, not "high"'),
        (["after", "1", "1"], 1, "job 1 cannot come after itself"),
        (["after", "1", "x"], 2, 'OTHER: must be an integer of at least 1, not "x"'),
        (["hold", "2"], 1, "job 2 was stopped; only a queued job can be held"),
        (["release", "2"], 1, "job 2 was stopped; `sae-tui resume 2` resumes it"),
        (["resume", "1"], 1, "job 1 is queued; it starts automatically"),
        (["resume", "2"], 1, "job 2 cannot be resumed: its run folder was deleted; clone it"),
        (["clone", "2"], 1, "job 2 has no settings to clone"),
        (["rm", "1", "--yes"], 1, "job 1 is queued; stop it before you delete it"),
        (["rm", "2"], 1, "rm asks for confirmation, which needs a terminal; in a script add --yes"),
        (["rm"], 2, "the following arguments are required: ID"),
        (["completion", "tcsh"], 2, "shell: invalid choice: 'tcsh'"),
        (["rename", "1"], 2, "the following arguments are required: NAME"),
    ],
)
def test_an_invalid_edit_is_reported_in_one_line(shell, arguments, code, said):
    record(shell)
    record(shell, JobState.STOPPED)
    (line,) = shell.errors(*arguments, code=code)
    assert line.startswith(f"sae-tui: error: {said}")
    assert len(shell.json("jobs")) == 2


@pytest.mark.parametrize("command", [["note", "1"], ["rename", "1"], ["tag", "1"]])
def test_text_that_is_not_utf_8_is_rejected_in_one_line(shell, command):
    record(shell)
    (line,) = shell.errors(*command, os.fsdecode(b"caf\xe9"), code=1)
    assert "names, tags and notes must be UTF-8" in line


@pytest.mark.parametrize(
    ("config", "stored"), [("", "checkpoints, logs and SAEs"), (command_file("true"), "logs")], ids=["sae", "command"]
)
def test_end_of_input_at_the_confirmation_deletes_nothing(shell, config, stored):
    job_id = record(shell, JobState.STOPPED, config=config)
    leader, terminal = pty.openpty()
    with subprocess.Popen(
        shell.argv("rm", job_id), stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, text=True, env=shell.env
    ) as asked:
        os.write(leader, b"\x04")
        _, errors = asked.communicate(timeout=60)
    os.close(terminal)
    os.close(leader)
    assert asked.returncode == 1
    assert errors.startswith(f"Delete job {job_id} with {stored} (")
    assert errors.endswith("[y/N] sae-tui: error: no job was deleted\n")
    assert row(shell, job_id)["state"] == "stopped"


def test_tags_given_to_launch_are_validated_like_other_tags(shell):
    (line,) = shell.errors("launch", shell.job_file, "--gpus", "cpu", "--tag", "two words", code=1)
    assert 'a tag is one word of at most 40 characters, not "two words"' in line
    assert shell.json("jobs") == []
    job_id = held(shell, "--tag", "#b", "--tag", "a", "--tag", "b")
    assert row(shell, job_id)["tags"] == ["a", "b"]


COMMANDS = ("resume", "pause", "hold", "release", "priority", "after", "rename", "tag", "note", "rm")


def test_every_command_reports_a_missing_job_in_one_line(shell):
    record(shell)
    values = {"priority": ["1"], "rename": ["x"], "note": ["x"], "rm": ["--yes"]}
    for command in COMMANDS:
        (line,) = shell.errors(command, 9, *values.get(command, []), code=1)
        assert line == "sae-tui: error: there is no job 9; `sae-tui jobs` lists them"


def test_deleting_several_jobs_removes_all_of_them_or_none(shell):
    ended, waits, other = record(shell, JobState.STOPPED), record(shell), record(shell, JobState.FAILED)
    shell.data.run(ended).create()
    shell.data.run(ended).job_file.write_bytes(b"#" * 2**20)
    (line,) = shell.errors("rm", ended, waits, "--yes", code=1)
    assert line.endswith(f"job {waits} is queued; stop it before you delete it")
    assert len(shell.json("jobs")) == 3
    assert shell.run("rm", ended, ended, "--yes").stdout == f"job {ended} deleted, 1 MiB freed\n"
    assert shell.json("rm", other)["ids"] == [other]
    assert [job["id"] for job in shell.json("jobs")] == [waits]
    assert not shell.data.run(ended).root.exists()


def test_a_lost_store_is_rebuilt_from_the_run_folders(shell):
    job_id = held(shell, "--tag", "mine")
    shell.run("stop", job_id)
    wait_for_state(shell, job_id, "stopped")
    for file in shell.data.root.glob("control.db*"):
        file.unlink()
    (line,) = shell.errors("jobs", code=1)
    assert "`sae-tui repair` rebuilds the list" in line
    assert f"job {job_id} (from-the-shell) is in the list again, stopped" in shell.run("repair").stdout
    assert (row(shell, job_id)["state"], row(shell, job_id)["tags"]) == ("stopped", ["mine"])
    assert shell.json("repair") == {"done": []}
    assert shell.run("repair").stdout == "nothing to repair\n"


def test_a_job_can_be_cloned_into_a_new_job_or_a_job_file(shell):
    first = held(shell)
    printed = shell.run("clone", first, "--set", "train.lr=0.001", "--print").stdout
    assert "lr = 0.001" in printed
    (shell.folder / "again.toml").write_text(printed)
    assert shell.json("validate", shell.folder / "again.toml", "--gpus", "cpu")["valid"]
    as_json = shell.json("clone", first, "--set", "train.lr=0.001", "--print")
    assert (as_json["job_file"], as_json["settings"]["train"]["lr"]) == (printed, 0.001)
    second = shell.json("clone", first, "--set", "name=twin", "--after", first, "--hold")["id"]
    job = row(shell, second)
    assert (job["name"], job["after"], job["held"]) == ("twin", [first], True)
    output = shell.run("clone", first, "--hold").stdout
    assert output == "job 3 is held; `sae-tui release 3` lets it start\n"
    name = row(shell, first)["name"]
    assert row(shell, 3)["name"] == f"{name}-2"
    assert row(shell, shell.json("clone", 3, "--hold")["id"])["name"] == f"{name}-3"
    (line,) = shell.errors("clone", first, "--set", "sae.width=3", code=1)
    assert line.startswith("sae-tui: error: sae.width: is not a known setting")


def test_a_grid_is_launched_entirely_or_not_at_all(shell):
    launched = shell.json(
        "launch", shell.job_file, "--gpus", "cpu", "--hold", "--grid", "sae.k=2,4", "--grid", "train.seed=0,1"
    )
    assert [one["id"] for one in launched] == [1, 2, 3, 4]
    assert {job["name"] for job in shell.json("jobs")} == {
        f"from-the-shell k={k} seed={s}" for k in (2, 4) for s in (0, 1)
    }
    (line,) = shell.errors("launch", shell.job_file, "--grid", "sae.k=2,zero", code=1)
    assert line.startswith("sae-tui: error: sae.k: ")
    (line,) = shell.errors("launch", shell.job_file, "--grid", "sae.k", code=2)
    assert line.startswith("sae-tui: error: --grid: takes a setting and values")
    assert len(shell.json("jobs")) == 4


def test_waiting_for_several_jobs_exits_with_the_worst_code(shell):
    waiting = shell.start(
        "launch", shell.job_file, shell.job_file, shell.job_file, "--gpus", "cpu", "--hold", "--wait", "--json"
    )
    wait_for_state_of_all(shell, 3)
    control = Control(shell.data.control_db)
    for job_id, state in ((1, JobState.STOPPED), (2, JobState.LOST), (3, JobState.FAILED)):
        assert control.transition(job_id, state)
    control.close()
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 5
    assert [(job["id"], job["state"]) for job in json.loads(output)] == [(1, "stopped"), (2, "lost"), (3, "failed")]


def wait_for_state_of_all(shell, count: int) -> None:
    """Wait until the supervisors of `count` jobs have queued their jobs."""
    waiting = ["queued"] * count
    wait_for_store(shell.data, lambda control: [job.state for job in control.jobs() if job.waits_for] == waiting)


def pauses(pid: int) -> int:
    """Return how many voluntary context switches a process has made."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def test_waiting_for_a_job_that_gets_deleted_ends_with_a_one_line_error(shell):
    waiting = shell.start("launch", shell.job_file, "--hold", "--wait")
    assert waiting.stdout.readline().startswith("job 1 is launched and held; Ctrl-C leaves it queued")
    # After ten context switches, the process has polled the job more than once.
    first = pauses(waiting.pid)
    while pauses(waiting.pid) < first + 10:
        assert waiting.poll() is None
    # Suspend the process so that it cannot see the job as stopped before the job is deleted.
    waiting.send_signal(signal.SIGSTOP)
    shell.run("stop", 1)
    wait_for_state(shell, 1, "stopped")
    shell.run("rm", "--yes", 1)
    waiting.send_signal(signal.SIGCONT)
    errors = waiting.communicate(timeout=60)[1]
    assert (waiting.returncode, errors) == (1, "sae-tui: error: job 1 was deleted during --wait\n")


def test_commands_work_in_a_deleted_working_folder(shell):
    gone = shell.folder / "gone"
    gone.mkdir()
    # The shell deletes its own working folder.
    script = 'rmdir "$PWD"; exec "$@"'
    for arguments in (("validate", shell.job_file), ("jobs",), ("launch", shell.job_file, "--hold")):
        argv = ["sh", "-c", script, "sh", *shell.argv(*arguments)]
        done = subprocess.run(argv, cwd=gone, env=shell.env, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        gone.mkdir(exist_ok=True)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fake_ranks")
def test_a_job_is_paused_resumed_stopped_and_resumed_from_the_shell(shell):
    job_id = shell.json(
        "launch", shell.job_file, "--gpus", "cpu", "--set", "train.n_steps=100000000", "--tag", "later"
    )["id"]
    wait_for_state(shell, job_id, "running")
    assert "and is paused; other jobs can then use its GPUs" in shell.run("pause", job_id).stdout
    paused = wait_for_state(shell, job_id, "queued")
    assert paused["held"]
    listed = shell.run("jobs", "state:paused", "#later").stdout
    assert listed.splitlines()[0].split()[-2:] == ["TAGS", "WAITS"]
    assert re.search(rf" paused .* #later +at step {paused['step']}, until resumed", listed)
    assert re.search(r"^state +paused$", shell.run("job", job_id).stdout, re.MULTILINE)
    (line,) = shell.errors("resume", job_id, "--set", "train.n_steps=5", code=1)
    assert line == f"sae-tui: error: job {job_id} is paused; to change its settings, stop it, then resume it"
    assert shell.run("resume", job_id).stdout == f"job {job_id} resumes from step {paused['step']}\n"
    wait_for_state(shell, job_id, "running")
    shell.run("pause", job_id)
    wait_for_state(shell, job_id, "queued")
    assert shell.json("stop", job_id)["message"] == f"job {job_id} is removed from the queue"
    wait_for_state(shell, job_id, "stopped")
    step = row(shell, job_id)["step"]
    done = shell.run("resume", job_id, "--set", f"train.n_steps={step + 5}", "--wait")
    assert "the run ends at step" in done.stderr
    assert done.stdout.splitlines()[0] == f"job {job_id} resumes from step {step}; Ctrl-C leaves it running"
    assert done.stdout.splitlines()[1].startswith(f"job {job_id} has finished; its SAE is in /")
    job = row(shell, job_id)
    assert (job["state"], job["step"], job["attempt"]) == ("finished", step + 5, 3)
    (line,) = shell.errors("resume", job_id, code=1)
    assert line.startswith(f"sae-tui: error: train.n_steps: job {job_id} has finished")


# Completion


@pytest.fixture
def path_with_sae_tui(shell) -> str:
    """Install the program in a folder on the PATH, and return the PATH."""
    program = shell.folder / "bin" / "sae-tui"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom sae_tui.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


BASH = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9 COMP_WORDS=($2) COMP_CWORD=${#COMP_WORDS[@]} COMPREPLY=()
complete -p sae-tui >/dev/null
_python_argcomplete sae-tui
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete -C $argv[2]"
ZSH = """
autoload -Uz compinit && compinit -u -D
source "$1"
print -r -- ${_comps[sae-tui]}
"""


def ask(shell, program: str, script: str, line: str, path: str) -> list[str]:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    source = shell.folder / "completion"
    source.write_text(shell.run("completion", program).stdout)
    extra = [program] if program != "fish" else []
    done = subprocess.run(
        [program, "-c", script, *extra, str(source), line], capture_output=True, text=True, timeout=60,
        env=shell.env | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [candidate.split("\t")[0].strip() for candidate in done.stdout.splitlines()]


@pytest.mark.parametrize("line", ["sae-tui --demo stop ", "sae-tui --demo rm ", "sae-tui --demo launch --after "])
def test_bash_completes_job_ids(shell, path_with_sae_tui, line):
    ids = {record(shell) for _ in range(3)}
    assert {str(job_id) for job_id in ids} <= set(ask(shell, "bash", BASH, line, path_with_sae_tui))


def test_bash_completes_commands(shell, path_with_sae_tui):
    assert "resume" in ask(shell, "bash", BASH, "sae-tui ", path_with_sae_tui)


def test_fish_completes_job_ids(shell, path_with_sae_tui):
    job_id = record(shell)
    assert str(job_id) in ask(shell, "fish", FISH, "sae-tui --demo stop ", path_with_sae_tui)


def test_zsh_accepts_the_completion_script(shell, path_with_sae_tui):
    assert ask(shell, "zsh", ZSH, "", path_with_sae_tui) == ["_python_argcomplete"]


@pytest.mark.parametrize("program", ["bash", "zsh", "fish"])
def test_completion_scripts_are_available_as_json(shell, program):
    script = shell.json("completion", program)
    assert script["shell"] == program
    assert script["script"] == shell.run("completion", program).stdout
    assert not Path(shell.data.root).exists()
