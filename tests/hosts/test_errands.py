from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.far_side import far_side, runs_of

from sae_tui.hosts import errands
from sae_tui.hosts.hosts import Hosts
from trainer.contract.errors import UserError


def hosts(folder: Path, **programs: str) -> Hosts:
    for name, program in programs.items():
        (folder / name).write_text(program)
    return Hosts(["far"], far_side(folder), demo=True)


def test_an_errand_runs_a_remote_command_and_returns_its_last_line(tmp_path: Path) -> None:
    there = hosts(tmp_path, stop="say('warned'); say('job 7 stops \\x1b[2J')")
    assert there.run("far", "stop", "7") == "on far: job 7 stops �[2J"
    assert runs_of(tmp_path) == [["stop", "7", "--demo"]]


def test_a_remote_job_is_launched_from_the_sent_file(tmp_path: Path) -> None:
    there = hosts(tmp_path, launch="say(f'job 3 of {len(sys.stdin.read())} characters is queued')")
    assert there.launch("far", "name = 'x'\n" * 20_000, "auto:2") == "on far: job 3 of 220000 characters is queued"
    assert runs_of(tmp_path) == [["launch", "/dev/stdin", "--gpus", "auto:2", "--demo"]]


def test_an_errand_times_out_and_ends_its_child_processes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(errands, "LIMIT_S", 0.3)
    mark = f"3{os.getpid()}"
    wrapped = Hosts(["far"], ["sh", "-c", f"sleep {mark}; true"])
    with pytest.raises(UserError, match="host far did not respond within 0 s"):
        wrapped.run("far", "stop", "7")
    wait_until(lambda: not runs(f"sleep {mark}"))


def test_stopping_ends_running_errands(tmp_path: Path) -> None:
    mark = f"4{os.getpid()}"
    wrapped = Hosts(["far"], ["sh", "-c", f"sleep {mark}; true"])
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(wrapped.run, "far", "stop", "7")
        wait_until(lambda: runs(f"sleep {mark}"))
        wrapped.stop()
        with pytest.raises(UserError):
            asked.result(20)
    wait_until(lambda: not runs(f"sleep {mark}"))


def test_stopping_also_ends_an_errand_that_has_just_started(monkeypatch) -> None:
    start, starts, mark = subprocess.Popen, threading.Event(), f"5{os.getpid()}"

    def slowly(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*words, **options)
        starts.set()
        time.sleep(0.2)
        return process

    monkeypatch.setattr(errands.subprocess, "Popen", slowly)
    wrapped = Hosts(["far"], ["sh", "-c", f"sleep {mark}; true"])
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(wrapped.run, "far", "stop", "7")
        assert starts.wait(20)
        wrapped.stop()
        with pytest.raises(UserError):
            asked.result(20)
    wait_until(lambda: not runs(f"sleep {mark}"))
    with pytest.raises(UserError, match="host far was not contacted, since sae-tui is exiting"):
        wrapped.run("far", "stop", "7")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(command: str) -> bool:
    """Return whether a process with this command line is running."""
    return any(" ".join(one.info["cmdline"] or []) == command for one in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("sys.stderr.write('sae-tui: error: there is no job 7\\n'); sys.exit(1)", "^on far: there is no job 7$"),
        (
            "sys.stderr.write('x: Permission denied (publickey).\\n'); sys.exit(255)",
            "^host far accepts none of your keys",
        ),
        ("sys.exit(127)", "^host far has no sae-tui on its PATH"),
        ("[say('x' * 99) for _ in range(10**6)]", "^on far: x+$"),
    ],
)
def test_a_failed_errand_reports_the_reason_despite_any_amount_of_output(tmp_path: Path, program, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        hosts(tmp_path, stop=program).run("far", "stop", "7")
