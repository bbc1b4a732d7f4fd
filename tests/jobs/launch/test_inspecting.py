"""Tests that stored activations are inspected in a separate process, and reinspected only if their files change."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sae_tui.jobs.launch.inspecting import Inspections
from trainer.contract.errors import JobFileError, UserError

ANSWER = {"n_tokens": 2, "d_in": 4, "dtype": "F32", "n_looked_at": 2, "gamma": 0, "median_norm": 1, "largest_norm": 2}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write rows containing one NaN."""
    rows = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    rows[7, 3] = math.nan
    (folder := tmp_path / "acts").mkdir()
    save_file({"activations": rows}, folder / "a.safetensors")
    return folder


def in_place_of_the_trainer(folder: Path, script: str) -> list[str]:
    return ["sh", "-c", f"echo . >> {folder}/asked; {script}"]


@pytest.mark.slow
def test_findings_and_remedies_come_from_the_trainer(shards: Path) -> None:
    told = Inspections().inspect(str(shards))
    assert told
    assert (told.n_tokens, told.d_in, told.dtype) == (2000, 8, "F32")
    (finding,) = told.findings
    assert (finding.severity, finding.sentence[:16]) == ("warning", "1 of 2,000 rows ")
    assert finding.remedy


def test_data_is_not_inspected_again_until_its_files_change(shards: Path, tmp_path: Path) -> None:
    inspections = Inspections(in_place_of_the_trainer(tmp_path, f"echo '{json.dumps(ANSWER)}'"))
    for _ in range(2):
        assert inspections.inspect(str(shards))
    assert (tmp_path / "asked").read_text() == ".\n"
    os.utime(shards / "a.safetensors", ns=(1, 1))
    inspections.inspect(str(shards))
    assert (tmp_path / "asked").read_text() == ".\n.\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo first >&2; echo 'data.path: it cannot be read' >&2; exit 1", "^data.path: it cannot be read$"),
        ("exit 3", "`trainer inspect` exited with code 3 without output"),
        ("echo '{}'", "the output of `trainer inspect` cannot be read: "),
    ],
)
def test_a_failed_inspection_is_reported_in_one_sentence_and_retried(
    shards: Path, tmp_path: Path, script: str, reason
) -> None:
    inspections = Inspections(in_place_of_the_trainer(tmp_path, script))
    for _ in range(2):
        with pytest.raises(UserError, match=reason):
            inspections.inspect(str(shards))
    assert (tmp_path / "asked").read_text() == ".\n.\n"


def test_missing_data_is_reported_without_starting_a_process(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="there is nothing at"):
        Inspections(in_place_of_the_trainer(tmp_path, "true")).inspect(str(tmp_path / "gone"))
    assert not (tmp_path / "asked").exists()


def test_an_inspection_that_is_no_longer_needed_is_not_waited_for(shards: Path) -> None:
    process = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert Inspections(process).inspect(str(shards), is_over=lambda: True) is None
