"""Tests for the user's alert command, run as a real process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import psutil
import pytest

from sae_tui.alerts.watch import run_hook
from trainer.contract.errors import UserError

KEEP = "import json, os, sys; json.dump([json.load(sys.stdin), os.getsid(0), sys.argv[1:]], open(sys.argv[1], 'w'))"


def test_the_command_gets_the_alert_as_json_without_shell_expansion(tmp_path):
    file = tmp_path / "seen"
    run_hook([sys.executable, "-c", KEEP, str(file), "$HOME; `x`"], {"words": 'GPU 3 "is" hot', "state": "raised"})
    message, session, words = json.loads(file.read_text())
    assert message == {"words": 'GPU 3 "is" hot', "state": "raised"}
    assert words == [str(file), "$HOME; `x`"]
    assert session != os.getsid(0)


def test_the_command_runs_even_if_the_disk_is_full(tmp_path, monkeypatch):
    file = tmp_path / "seen"
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    run_hook([sys.executable, "-c", KEEP, str(file)], {"words": "the disk is full"})
    assert json.loads(file.read_text())[0] == {"words": "the disk is full"}


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_that_exceeds_its_time_limit_is_killed_with_its_children(tmp_path):
    file = tmp_path / "pid"
    child = ["sh", "-c", f"sleep 600 & echo $! > {file}; wait"]
    with pytest.raises(UserError, match="took longer"):
        run_hook(child, {}, limit_s=0.5)
    pid = int(file.read_text())
    deadline = time.monotonic() + 20
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["/no/such/program"], "was not found; give its path"),
        (["/etc/passwd"], "is not an executable program"),
        (["sh", "-c", "exit 3"], "sh exited with code 3"),
        (["a\0b"], "null byte"),
    ],
)
def test_a_command_failure_is_reported_in_one_sentence(command, says):
    with pytest.raises(UserError, match=says):
        run_hook(command, {})
