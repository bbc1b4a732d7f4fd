from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mirrored import resume, stored, told

pytest.importorskip("trackio", reason="Trackio is not installed")


def test_a_run_and_its_resumed_attempt_form_a_single_run_in_a_local_project(train: Callable[..., Path]) -> None:
    run_dir = train("trackio")
    resume(run_dir)
    ((name, curve),) = curves("k=2/fvu").items()
    assert curve == pytest.approx(stored(run_dir, "fvu@k=2"))
    assert list(curve) == [5, 10, 15, 20, 25, 30]
    assert name == f"sae-{(run_dir / 'mirror.id').read_text().strip()}"
    place = f'the metrics are also sent to trackio: trackio show --project sae-tui, run "{name}"'
    assert told(run_dir) == [("info", place)] * 2


def curves(key: str) -> dict[str, dict[int, float]]:
    """Return a metric's curve for each run, as {run name: {step: value}}."""
    there: dict[str, dict[int, float]] = {}
    with contextlib.closing(sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "sae-tui.db")) as db:
        for name, step, values in db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            if key in (metrics := json.loads(values)):
                there.setdefault(name, {})[step] = metrics[key]
    return there
