"""Tests for determining the state of a rank on another host from the rank's files."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from sae_tui.jobs.launchers.remote import RemoteRank
from trainer.contract.paths import RunPaths
from trainer.contract.process import ProcessRef
from trainer.contract.runs.remote_rank_status import RankMark, write_mark

STARTED = time.time() - 100


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    paths.attempt(1).mkdir(parents=True)
    return paths


def rank(paths: RunPaths, number: int, *, at: float, **ending: int) -> RemoteRank:
    """Return a rank whose marker file was last written at time `at`."""
    file = paths.rank_mark(1, number)
    write_mark(file, RankMark("n1", ProcessRef(1, 1, "boot"), **ending))
    os.utime(file, (at, at))
    remote = RemoteRank(number, paths, 1, paths.logs / "slurm.log")
    remote.read()
    return remote


def test_a_rank_without_an_exit_report_is_not_assumed_to_have_failed_when_it_started(paths: RunPaths) -> None:
    silent = rank(paths, 0, at=STARTED)
    killed = rank(paths, 1, at=STARTED + 50, exit_signal=signal.SIGKILL)
    silent.give_up(never_ran=False)
    assert min((silent, killed), key=RemoteRank.failed_at) is killed


def test_a_rank_with_an_unknown_end_time_counts_as_failed_when_it_wrote_its_error_report(paths: RunPaths) -> None:
    silent = rank(paths, 0, at=STARTED)
    file = paths.rank_exit(1, 0)
    file.write_bytes(msgspec.json.encode({"error": "no memory"}))
    os.utime(file, (STARTED + 40, STARTED + 40))
    silent.give_up(never_ran=False)
    assert silent.failed_at() == pytest.approx(STARTED + 40)


def test_a_killed_rank_counts_as_failed_before_the_peer_that_noticed_it(paths: RunPaths) -> None:
    peer = rank(paths, 0, at=STARTED + 50, exit_code=1)
    killed = rank(paths, 1, at=STARTED + 51, exit_signal=signal.SIGKILL)
    assert min((peer, killed), key=RemoteRank.failed_at) is killed
