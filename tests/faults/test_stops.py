"""Tests that a stop at an unfavourable moment saves a checkpoint and is not treated as a failure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from faults import stops

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_stop_during_startup_ends_the_job_cleanly(tmp_path: Path, seed: int) -> None:
    stops.stop_in_start(tmp_path / "box", random.Random(seed))


@pytest.mark.slow
def test_a_stop_during_an_evaluation_saves_and_ends_the_job(tmp_path: Path) -> None:
    stops.stop_in_evaluation(tmp_path / "box", random.Random(0))


def test_a_stop_during_a_checkpoint_saves_and_ends_the_job(tmp_path: Path) -> None:
    stops.stop_in_checkpoint(tmp_path / "box", random.Random(0))
