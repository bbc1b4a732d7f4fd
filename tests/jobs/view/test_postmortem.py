"""What is told of a failure, by what its ranks left."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest

from sae_tui.jobs.view.postmortem import _traceback
from trainer.contract.errors import UserError
from trainer.contract.store.database import StoreError


def left_by(error: Exception, folder: Path) -> Path:
    """Write what a rank leaves that was ended by this error."""
    try:
        raise error
    except Exception:
        file = folder / "rank0.error.json"
        file.write_text(json.dumps({"error": str(error), "traceback": traceback.format_exc()}))
    return file


@pytest.mark.parametrize("kind", [UserError, StoreError])
def test_an_exception_whose_sentence_says_all_shows_no_traceback(kind: type[Exception], tmp_path: Path) -> None:
    assert _traceback(left_by(kind("give a folder of shards"), tmp_path), "") == ()


def test_any_other_exception_shows_its_last_frames(tmp_path: Path) -> None:
    shown = _traceback(left_by(ValueError("shapes differ"), tmp_path), "")
    assert shown[-1] == "ValueError: shapes differ"
    assert any("left_by" in line for line in shown)
