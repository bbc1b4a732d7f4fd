"""Reads the store of a run with mirrored metrics, and resumes the run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainer.cli import main
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.store.metrics_store import SeriesReader


def resume(run_dir: Path) -> None:
    assert main(["resume", str(run_dir), "--set", "train.n_steps=30"]) == EXIT_FINISHED


def stored(run_dir: Path, name: str) -> dict[int, float | None]:
    """Return a dict that maps each step to the value of a series in the run's store."""
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return {point.step: point.value for point in reader.points(name)}


def told(run_dir: Path) -> list[tuple[str, str]]:
    """Return the level and message of each event about mirrors."""
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return [(event.level, event.message) for event in reader.events() if event.kind == "mirror"]
