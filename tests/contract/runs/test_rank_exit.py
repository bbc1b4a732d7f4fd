"""Tests, with real processes, that the rank that caused a failure is identified among several exited ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.hung_mount import hung_mount

from trainer.contract.process import state_of
from trainer.contract.runs import rank_exit
from trainer.contract.runs.data_record import record_of
from trainer.contract.runs.rank_exit import ChildRank, first_failed, signal_name, wait_for_ends
from trainer.contract.settings.sources import ShardSettings

SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ChildRank]]:
    """Return a function that starts a Python program as the next rank."""
    started: list[ChildRank] = []

    def start(program: str) -> ChildRank:
        process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
        rank = len(started)
        started.append(ChildRank(rank, process, tmp_path / f"rank{rank}.exit.json", tmp_path / f"rank{rank}.log"))
        return started[-1]

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.wait()


def ended(*ranks: ChildRank) -> None:
    while any(rank.ended is None for rank in ranks):
        wait_for_ends(ranks, timeout_s=10)


def leave_word(tmp_path: Path, rank: int, error: str) -> None:
    (tmp_path / f"rank{rank}.exit.json").write_text(json.dumps({"error": error, "traceback": ""}))


def test_a_killed_rank_is_blamed_even_if_its_peer_reported_an_error_first(start, tmp_path):
    ranks = [start("raise SystemExit(1)"), start(SLEEPS)]
    leave_word(tmp_path, 0, "the connection to another rank was lost")
    (tmp_path / "rank1.log").write_text("step 4\nstep 5\n\n")
    ended(ranks[0])
    os.kill(ranks[1].process.pid, signal.SIGKILL)
    ended(ranks[1])
    first = first_failed(ranks)
    assert first is ranks[1]
    assert first.error(2) == "rank 1 was killed (SIGKILL); its last log line: step 5"


FRAMES = "".join(
    f"frame #{i}: c10::Error::Error(c10::SourceLocation) + 0x{i}b6 (0x7f in libc10.so)\n" for i in range(25)
)
WATCHDOG = "[PG 1 Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199, Timeout(ms)=600000)"
ABORTS = [
    (
        f"step 5\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {WATCHDOG}\n"
        f"Exception raised from checkTimeout at x.cpp:567 (most recent call first):\n{FRAMES}"
        f"Exception raised from ncclCommWatchdog at x.cpp:1901:\n{FRAMES}frame #26: clone + 0x43 (libc.so.6)\n\n",
        f"what():  {WATCHDOG}",
    ),
    (
        "terminate called after throwing an instance of 'c10::Error'\n  what():  NCCL error: unhandled cuda error\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 700 'illegal'\n{FRAMES}",
        "what():  NCCL error: unhandled cuda error: Cuda failure 700 'illegal'",
    ),
    (
        "step 5\nfree(): invalid pointer\nFatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n"
        '  File "/lib/python3.11/threading.py", line 331 in wait\nExtension modules: numpy.core (total: 1)\n',
        "free(): invalid pointer",
    ),
    (
        "step 5\nFatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
        '  File "/lib/python3.11/threading.py", line 331 in wait\n',
        "Fatal Python error: Segmentation fault",
    ),
    (FRAMES, FRAMES.splitlines()[-1]),
    ("step 4\nstep 5\n", "step 5"),
]


@pytest.mark.parametrize(("log", "said"), ABORTS)
def test_an_aborted_rank_is_described_by_the_reason_and_not_a_stack_frame(start, tmp_path, log, said):
    rank = start("import os; os.abort()")
    (tmp_path / "rank0.log").write_text(log)
    ended(rank)
    assert rank.error(8) == f"rank 0 was killed (SIGABRT); its last log line: {said}"


def test_a_rank_that_survives_sigkill_is_abandoned_and_blamed(start, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_exit, "GIVEN_UP_AFTER_S", 1.0)
    with hung_mount(tmp_path / "gpu") as asked:
        ranks = [start("raise SystemExit(1)"), start("import os; os.stat('gpu/x')")]
        leave_word(tmp_path, 0, "Watchdog caught collective operation timeout")
        ended(ranks[0])
        assert asked.wait(10)
        while ranks[1].ended is None:
            wait_for_ends(ranks, timeout_s=0.1)
            ranks[1].kill()
        assert state_of(ranks[1].process.pid) == "D"
        first = first_failed(ranks)
        assert first is ranks[1]
        assert first.error(2) == "rank 1 did not exit within 1 s of being killed, so its GPU or a disk hangs"
    assert ranks[1].process.wait(10) == -signal.SIGKILL


def test_a_rank_that_we_killed_is_not_blamed(start, tmp_path):
    ranks = [start("raise SystemExit(1)"), start(SLEEPS)]
    leave_word(tmp_path, 0, "the loss is not finite")
    ranks[1].ended_by_us = True
    ranks[1].process.kill()
    ended(*ranks)
    first = first_failed(ranks)
    assert first is ranks[0]
    assert first.error(2) == "rank 0: the loss is not finite"
    assert first.error(1) == "the loss is not finite"


def test_finished_and_stopped_ranks_have_not_failed(start):
    ranks = [start("raise SystemExit(0)"), start("raise SystemExit(3)")]
    ended(*ranks)
    assert first_failed(ranks) is None


def test_a_rank_without_an_error_or_a_log_is_described_by_its_exit_code(start):
    ranks = [start("raise SystemExit(7)"), start("import os; os.kill(os.getpid(), 11)")]
    ended(*ranks)
    assert [rank.error(2) for rank in ranks] == ["rank 0 ended with exit code 7", "rank 1 was killed (SIGSEGV)"]


def test_waiting_for_ranks_that_have_ended_returns_immediately(start):
    rank = start("raise SystemExit(0)")
    ended(rank)
    assert wait_for_ends([rank], timeout_s=0) == []


def test_a_signal_without_a_name_is_described_by_its_number():
    assert [signal_name(9), signal_name(63)] == ["SIGKILL", "signal 63"]


def test_a_truncated_shard_that_killed_a_rank_is_named(start, tmp_path):
    shard = tmp_path / "acts" / "a.npy"
    shard.parent.mkdir()
    np.save(shard, np.zeros((100_000, 4), np.float32))
    (tmp_path / "data.json").write_bytes(msgspec.json.encode(record_of([ShardSettings(str(shard.parent))])))
    reads = "import mmap, os; f = open('acts/a.npy', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    rank = start(f"{reads}; os.truncate('acts/a.npy', 100); m[-1]")
    (tmp_path / "rank0.log").write_text("checkpoint saved\n")
    ended(rank)
    assert rank.code == -signal.SIGBUS
    assert rank.error(2) == (
        f"rank 0: {shard} was truncated to 100 of 1,600,128 bytes while it was read; copy it again, then resume"
    )
    # A SIGBUS without a truncated file is not reported as truncation.
    np.save(shard, np.zeros((100_000, 4), np.float32))
    assert rank.error(1) == "rank 0 was killed (SIGBUS); its last log line: checkpoint saved"
