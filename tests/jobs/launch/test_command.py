"""Tests for commands after launch: asking them to end, running them again, and finding their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import command_file

from sae_tui.jobs import edits
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.launch import job_form, launching
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.launchers.process_tree import MARK, ProcessTree
from sae_tui.jobs.output import output_of
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.process import parent_of
from trainer.contract.settings.command import name_of
from trainer.contract.settings.job_file import any_job_of
from trainer.contract.settings.toml import table_of
from trainer.contract.settings.typed import split_command_line
from trainer.contract.store.states import JobState

# A command that prints its attempt and a variable from its environment, then fails.
SAYS = ("sh", "-c", "echo attempt $SAE_TUI_ATTEMPT of $WHOSE; exit 3")


def launch(box, *argv: str, **settings: object) -> int:
    job = any_job_of(table_of(command_file(*argv, folder=str(box.data.root.parent), **settings)))
    box.make_store()
    return launching.launch(box.data, job, box.placement(), gpu_source="none")


def test_a_command_runs_again_from_the_start_in_its_stored_environment(box, monkeypatch):
    monkeypatch.setenv("WHOSE", "ada")
    job_id = launch(box, *SAYS)
    assert box.wait_ended(job_id).error.startswith("its program ended with exit code 3")
    monkeypatch.setenv("WHOSE", "mallory")
    plan = resume(box.data, job_id, lambda _: box.placement())
    assert plan.sentence == "runs again from the start, as attempt 2"
    box.wait_for(lambda: box.job(job_id).state.is_final and box.job(job_id).attempt == 2, "the second attempt")
    assert box.data.run(job_id).log(0).read_text() == "attempt 1 of ada\nattempt 2 of ada\n"
    assert box.messages(job_id, "resuming") == ["runs again from the start, as attempt 2"]
    assert output_of(box.data, box.job(job_id)) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"env": [""]}, 'command.env: must be NAME=VALUE, not ""'),
        ({"env": ["A=\0"]}, "command.env: must be UTF-8 without zero bytes, not "),
        ({"folder": "a\0b"}, "command.folder: must be UTF-8 without zero bytes, not "),
        ({"metrics": ["a\0{loss}"]}, "command.metrics: must be UTF-8 without zero bytes, not "),
        ({"argv": ["\udcff"]}, "command.argv: must be UTF-8 without zero bytes, not "),
        ({"argv": ["x" * 1_000_001]}, "command: has more than 1,000,000 bytes; pass long arguments in a file"),
        ({"env": [f"A{n}={'x' * 100_000}" for n in range(11)]}, "command: has more than 1,000,000 bytes"),
    ],
)
def test_a_command_that_cannot_be_stored_in_a_job_file_is_refused_in_one_sentence(settings, problem):
    with pytest.raises(JobFileError) as refusal:
        any_job_of({"kind": "command", "name": "odd", "command": {"argv": ["true"]} | settings})
    (found,) = refusal.value.problems
    assert str(found).startswith(problem)


def test_a_name_that_is_not_utf_8_is_refused():
    with pytest.raises(JobFileError, match=r"^name: must be UTF-8, not "):
        any_job_of({"kind": "command", "name": "\udcff", "command": {"argv": ["true"]}})


def test_a_finished_command_can_run_again_but_cannot_cool_down(box):
    job_id = launch(box, "true")
    assert box.wait_ended(job_id).state is JobState.FINISHED
    with pytest.raises(UserError, match="has no training to cool down"):
        resume(box.data, job_id, lambda _: box.placement(), finish=True)
    resume(box.data, job_id, lambda _: box.placement(), ["command.argv=false"])
    box.wait_for(lambda: box.job(job_id).state is JobState.FAILED, "the second attempt")


def test_a_request_to_stop_a_command_is_recorded_with_the_signal_that_it_gets(box):
    job_id = launch(box, "sleep", "600", stop_signal="INT", grace_s=5.0)
    box.wait(job_id, JobState.RUNNING)
    said = "sends SIGINT to its program, and kills it after 5 s"
    assert edits.stop(box.data, job_id) == f"job {job_id} {said}"
    assert box.wait_ended(job_id).state is JobState.STOPPED
    asked = "was asked to stop; its program gets SIGINT, and is killed after 5 s"
    assert box.messages(job_id, "stopping") == [asked]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (edits.pause, "sends SIGTERM to its program, and kills it after 60 s; it is then paused, and other jobs"),
        (edits.kill, "sends SIGTERM to all its processes, and kills them after 5 s"),
    ],
)
def test_messages_about_a_command_promise_no_checkpoint(box, what, said):
    job_id = box.record(state=JobState.RUNNING, config=command_file("sh"))
    box.data.run(job_id).create()
    assert what(box.data, job_id).startswith(f"job {job_id} {said}")


def test_the_message_about_a_paused_command_mentions_no_step(box):
    says = "for n in 1 2 3; do echo step $n loss=0.5; done; sleep 600"
    job_id = launch(box, "sh", "-c", says)
    box.wait_for(lambda: box.job(job_id).step == 3, "the steps of the program")
    edits.pause(box.data, job_id)
    box.wait_for(lambda: box.messages(job_id, "paused"), "the pause")
    assert box.messages(job_id, "paused") == ["is paused"]


def test_a_command_cannot_be_evaluated(box):
    job = box.job(box.record(state=JobState.FINISHED, config=command_file("sh")))
    with pytest.raises(UserError, match=f"job {job.id} runs a command and has no SAE"):
        request.refuse(box.data, job)


# A supervisor whose command starts a process in another session and leaves it to the supervisor to adopt.
_SUPERVISOR = """
import subprocess, sys
from trainer.contract.prctl import become_subreaper
become_subreaper()
leaves = "setsid sh -c 'sleep 600 &'; exec sleep 600"
print(subprocess.Popen(["sh", "-c", leaves], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""


def test_a_commands_processes_are_also_found_from_outside_its_supervisor(box, tmp_path):
    root = str(Path(__file__).parents[3])
    environment = {name: value for name, value in os.environ.items() if name != MARK} | {"PYTHONPATH": root}
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    leader = int(supervisor.stdout.readline())
    tree = ProcessTree(leader, tmp_path, reaper=supervisor.pid)
    try:
        box.wait_for(lambda: [parent_of(ref.pid) for ref in tree.living()] == [supervisor.pid] * 2, "both processes")
        assert leader in {ref.pid for ref in tree.living()}
    finally:
        for ref in tree.living():
            ref.send(signal.SIGKILL)
        supervisor.communicate()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py --lr 1e-3", ["python", "train.py", "--lr", "1e-3"]),
        ("""sh -c 'a  b' "c d" e\\ f""", ["sh", "-c", "a  b", "c d", "e f"]),
        ('["sh", "-c", "a  b"]', ["sh", "-c", "a  b"]),
        ("[ -f x ]", ["[", "-f", "x", "]"]),
        ("true", ["true"]),
        ("5", ["5"]),
        ("  ", []),
    ],
)
def test_a_command_line_is_split_into_words(line, words):
    assert split_command_line(line) == words


@pytest.mark.parametrize(
    ("line", "problem"), [("echo 'a", "has a quote that is not closed"), ("echo a\\", "ends with a backslash")]
)
def test_an_incomplete_command_line_is_refused(line, problem):
    with pytest.raises(ValueError, match=problem):
        split_command_line(line)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/usr/bin/python3.11", "src/probe.py", "--layer", "12"], "probe.py --layer 12"),
        (["python", "-m", "probe"], "python -m probe"),
        (["./run"], "run"),
        (["sh", "-c", "a\n b"], "sh -c a b"),
        ([], "command"),
        (["x" * 100], "x" * 80),
    ],
)
def test_a_command_is_named_after_its_script_and_arguments(argv, name):
    assert name_of(argv) == name


def test_the_form_names_a_command_after_its_command_line_without_secrets(box):
    values = {"kind": "command", "name": "command", "command.argv": ["python3", "x.py", "--token", "hf_abcdef"]}
    reviewed = job_form.review(job_form.Draft(values, {}, "cpu"), (), box.data, (), cuda=False)
    assert reviewed.job is not None
    assert reviewed.job.name == "x.py --token …"
    reviewed = job_form.review(job_form.Draft(values | {"name": "mine"}, {}, "cpu"), (), box.data, (), cuda=False)
    assert reviewed.job is not None
    assert reviewed.job.name == "mine"
