"""Tests for a run's lock, which shows every user on the machine whether any process of the run is alive."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths
from trainer.contract.runs import lock
from trainer.contract.runs.lock import RunLock, is_held

LOOKS = """
import sys
from pathlib import Path
from trainer.contract.runs.lock import is_held
print("looks", flush=True)
while True:
    is_held(Path(sys.argv[1]))
"""


@pytest.fixture
def looked_at(tmp_path: Path) -> Iterator[Path]:
    """Yield a run's lock file while another process repeatedly checks whether the lock is held."""
    file = RunPaths(tmp_path).lock_file
    with subprocess.Popen([sys.executable, "-c", LOOKS, str(file)], stdout=subprocess.PIPE, text=True) as looking:
        assert looking.stdout
        assert looking.stdout.readline() == "looks\n"
        yield file
        looking.kill()


def test_checking_a_runs_lock_does_not_prevent_the_run_from_starting(looked_at: Path) -> None:
    for _ in range(3000):
        with RunLock(looked_at.parent) as run:
            run.share()


def test_a_process_that_checks_the_lock_does_not_count_as_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = RunLock(tmp_path)
    monkeypatch.setattr(lock.time, "sleep", lambda _: looking.release())
    assert is_held(RunPaths(tmp_path).lock_file) is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_lock_file_private_to_another_user_does_not_block_a_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        RunPaths(Path(folder)).lock_file.touch(0o600)
        if (pid := os.fork()) == 0:
            with contextlib.suppress(UserError):
                os.setuid(61_004)
                RunLock(Path(folder)).share()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_run_in_progress_is_not_started_again(tmp_path: Path) -> None:
    with RunLock(tmp_path) as run:
        run.share()
        assert is_held(RunPaths(tmp_path).lock_file)
        with pytest.raises(UserError, match="is still running"):
            RunLock(tmp_path)
    assert is_held(RunPaths(tmp_path).lock_file) is False
