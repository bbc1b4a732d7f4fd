"""Tests for recording stack traces from a rank that makes no progress."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sae_tui.jobs.launchers import local
from sae_tui.jobs.launchers.local import dump_stacks, odd_state
from trainer.contract.process import ProcessRef

WAITS = """
import sys, time
def waits_for_ever():
    print("here", flush=True)
    time.sleep(600)
waits_for_ever()
"""


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "here\n"
    yield started
    started.kill()
    started.communicate()


def test_a_halted_process_is_distinguished_from_a_waiting_one(process, box):
    assert odd_state(process.pid) == ""
    process.send_signal(signal.SIGSTOP)
    box.wait_for(lambda: odd_state(process.pid) == "is halted (SIGSTOP)", "the halt")
    process.kill()
    process.wait()
    assert odd_state(process.pid) == ""


def test_the_stack_of_a_halted_process_is_written(process, tmp_path, box):
    if local._py_spy() is None:
        pytest.skip("py-spy is not installed")
    process.send_signal(signal.SIGSTOP)
    box.wait_for(lambda: odd_state(process.pid), "the halt")
    dump_stacks({"rank 0": ProcessRef.of(process.pid)}, tmp_path / "stacks.txt")
    written = (tmp_path / "stacks.txt").read_text()
    assert written.startswith(f"== rank 0 (pid {process.pid}) is halted (SIGSTOP)\n")
    if "Permission denied" in written:
        pytest.skip("this user may not read the memory of another process")
    assert "waits_for_ever" in written
    assert odd_state(process.pid) == "is halted (SIGSTOP)", "reading the stack has resumed the process"


def test_a_missing_py_spy_is_reported_in_place_of_a_stack(process, tmp_path, monkeypatch):
    monkeypatch.setattr(local.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    dump_stacks({"rank 0": ProcessRef.of(process.pid)}, tmp_path / "stacks.txt")
    assert "(py-spy is not installed)" in (tmp_path / "stacks.txt").read_text()


def test_an_ended_process_and_a_failing_py_spy_are_reported(process, tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho cannot read it >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(local.sys, "executable", str(tmp_path / "python"))
    ref = ProcessRef.of(process.pid)
    dump_stacks({"rank 0": ref}, tmp_path / "stacks.txt")
    assert "cannot read it" in (tmp_path / "stacks.txt").read_text()
    process.kill()
    process.wait()
    dump_stacks({"rank 0": ref}, tmp_path / "stacks.txt")
    assert "(it has ended)" in (tmp_path / "stacks.txt").read_text()
