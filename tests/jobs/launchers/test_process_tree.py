"""Tests that all of a command's processes are found, even by searches that rely on remembered results."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from sae_tui.jobs.launchers import process_tree
from sae_tui.jobs.launchers.process_tree import MARK, ProcessTree

# Waits for a line, then becomes another program.
WAITS = 'read line; exec "$@"'
# Looks like a supervisor, and runs a program in another session.
SUPERVISOR = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""
DETACHED = ("-P", "-m", "sae_tui.jobs.supervisor.supervise")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes in their own sessions, without the mark they would inherit if a command runs these tests."""
    started: list[subprocess.Popen[str]] = []
    environment = {name: value for name, value in os.environ.items() if name != MARK}

    def begin(*argv: str, **variables: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        env = environment | variables
        started.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env, start_new_session=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def tree(start: Start, tmp_path) -> ProcessTree:
    """Return the tree of a `sleep` that is its own reaper, so that other processes join the tree only by their mark."""
    leader = start("sleep", "600").pid
    return ProcessTree(leader, tmp_path, reaper=leader)


def pids(found) -> set[int]:
    return {ref.pid for ref in found}


def become(process: subprocess.Popen[str]) -> None:
    """Make a waiting process exec its other program."""
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "begun\n"


def test_processes_that_start_and_end_between_complete_searches_are_noticed(tree, start, tmp_path):
    assert len(pids(tree.recent())) == 1
    new = start("sleep", "600", **{MARK: str(tmp_path)})
    assert new.pid in pids(tree.recent())
    new.kill()
    new.wait()
    assert len(pids(tree.recent())) == 1


@pytest.mark.parametrize("has_mark", [False, True])
def test_a_process_is_examined_again_after_exec_changes_its_environment(tree, start, tmp_path, monkeypatch, has_mark):
    monkeypatch.setattr(process_tree, "_ALL_EVERY_S", 0.0)
    monkeypatch.setattr(process_tree, "_PAUSE", 0.0)
    mark = f"{MARK}={tmp_path}"
    change = ["env", "-u", MARK] if has_mark else ["env", mark]
    before = {MARK: str(tmp_path)} if has_mark else {}
    process = start("sh", "-c", WAITS, "sh", *change, "sh", "-c", "echo begun; read line", **before)
    assert (process.pid in pids(tree.recent())) == has_mark
    become(process)
    assert (process.pid in pids(tree.recent())) != has_mark
    assert pids(tree.recent()) == pids(tree.living())


def test_a_signal_reaches_a_process_that_joined_after_the_last_complete_search(tree, start, tmp_path):
    process = start("sh", "-c", WAITS, "sh", "env", f"{MARK}={tmp_path}", "sh", "-c", "echo begun; read line")
    tree.recent()
    become(process)
    assert process.pid not in pids(tree.recent())
    assert tree.send(signal.SIGTERM) == 2
    assert process.wait() == -signal.SIGTERM


def test_ended_processes_are_forgotten(tree, start, monkeypatch):
    monkeypatch.setattr(process_tree, "_ALL_EVERY_S", 0.0)
    monkeypatch.setattr(process_tree, "_PAUSE", 0.0)
    process = start("sleep", "600")
    tree.recent()
    assert process.pid in {pid for pid, _ in tree._memory._marked}
    process.kill()
    process.wait()
    tree.recent()
    assert process.pid not in {pid for pid, _ in tree._memory._marked}


def test_processes_of_a_command_launched_by_another_command_belong_only_to_the_inner_one(start, tmp_path):
    supervisor = start(sys.executable, "-c", SUPERVISOR, *DETACHED)
    program = int(supervisor.stdout.readline())
    try:
        # This process acts as the outer command's supervisor; it is the parent of the inner supervisor.
        outer = ProcessTree(supervisor.pid, tmp_path / "outer")
        assert pids(outer.living()) == pids(outer.recent()) == set()
        inner = ProcessTree(program, tmp_path / "inner", reaper=supervisor.pid)
        assert pids(inner.living()) == pids(inner.recent()) == {program}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)


def test_an_inner_commands_processes_are_found_despite_an_outer_supervisor_above_them(start, tmp_path):
    # The process started by the outer supervisor acts as the inner command's supervisor.
    outer = start(sys.executable, "-c", SUPERVISOR, *DETACHED)
    inner_supervisor = int(outer.stdout.readline())
    try:
        tree = ProcessTree(inner_supervisor, tmp_path, reaper=inner_supervisor)
        assert pids(tree.living()) == pids(tree.recent()) == {inner_supervisor}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner_supervisor, signal.SIGKILL)
