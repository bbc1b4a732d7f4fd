"""Tests, with real processes, that a rank's parent process records how the rank ended, and forwards signals to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from trainer.contract.runs.remote_rank_status import RankMark, read_mark

# Like a rank, the child blocks the stop signals, and then waits for one of them.
CHILD = """
import os, signal, sys
from pathlib import Path
from trainer.contract.process import STOP_SIGNALS
from trainer.ranks.launched import fork_rank

fork_rank(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
print("begun", flush=True)
if sys.argv[2] == "wait":
    signal.sigwait(STOP_SIGNALS)
os._exit(int(sys.argv[3]))
"""


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(word: str, code: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(tmp_path / "rank0.json"), word, str(code)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "begun\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def mark(folder: Path) -> RankMark:
    last_mark = read_mark(folder / "rank0.json")
    assert last_mark is not None
    return last_mark


@pytest.mark.parametrize(
    ("code", "for_srun"), [(EXIT_FINISHED, 0), (EXIT_STOPPED, 0), (EXIT_FAILED, EXIT_FAILED), (7, EXIT_FAILED)]
)
def test_the_exit_code_is_recorded_and_a_stopped_rank_is_not_a_failure(witness, tmp_path, code, for_srun) -> None:
    assert witness("end", code).wait(20) == for_srun
    assert (mark(tmp_path).exit_code, mark(tmp_path).exit_signal) == (code, None)


def test_the_signal_that_killed_a_rank_is_recorded(witness, tmp_path, eventually) -> None:
    process = witness("wait", 0)
    eventually((tmp_path / "rank0.json").exists)
    assert not mark(tmp_path).has_ended
    os.kill(mark(tmp_path).process.pid, signal.SIGKILL)
    assert process.wait(20) == EXIT_FAILED
    assert (mark(tmp_path).exit_code, mark(tmp_path).exit_signal) == (None, signal.SIGKILL)


def test_sigterm_reaches_the_rank_and_a_suspended_rank_does_not_count_as_ended(witness, tmp_path, eventually) -> None:
    process = witness("wait", EXIT_STOPPED)
    eventually((tmp_path / "rank0.json").exists)
    os.kill(mark(tmp_path).process.pid, signal.SIGSTOP)
    os.kill(mark(tmp_path).process.pid, signal.SIGCONT)
    process.terminate()
    assert process.wait(20) == EXIT_FINISHED
    assert mark(tmp_path).exit_code == EXIT_STOPPED
