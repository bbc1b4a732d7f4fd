from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.mirrored import resume, stored, told

from trainer.reporting.mirrors.base import MirroredRun

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.reporting.mirrors.tensorboard import TensorBoard


def read(folder: Path, name: str) -> dict[int, float]:
    """Return a curve as TensorBoard shows it, without values that a later file replaces."""
    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_each_sae_in_a_sweep_has_the_same_curves_as_in_the_store(train: Callable[..., Path]) -> None:
    run_dir = train("tensorboard")
    for label in ("k=2", "k=4"):
        for name in ("fvu", "loss", "heldout_fvu"):
            own = stored(run_dir, f"{name}@{label}")
            assert own
            assert read(run_dir / "tensorboard" / label, name) == pytest.approx(own)
    assert read(run_dir / "tensorboard" / "k=4", "step_ms/0") == pytest.approx(stored(run_dir, "step_ms"))
    assert told(run_dir) == [
        ("info", f"the metrics are also sent to tensorboard: tensorboard --logdir {run_dir}/tensorboard")
    ]


def test_a_resumed_run_continues_the_same_curves(train: Callable[..., Path]) -> None:
    run_dir = train("tensorboard")
    resume(run_dir)
    curve = read(run_dir / "tensorboard" / "k=2", "fvu")
    assert list(curve) == [5, 10, 15, 20, 25, 30]
    assert curve == pytest.approx(stored(run_dir, "fvu@k=2"))


def test_repeated_steps_replace_those_from_a_killed_attempt(tmp_path: Path) -> None:
    for first, value in ((0, 1.0), (10, 2.0)):
        board = TensorBoard(MirroredRun(tmp_path, "run", "00000000", first, {"": {}}))
        for step in range(first + 5, first + 20, 5):
            board.log("", step, {"fvu": value})
        board.close()
    assert read(tmp_path / "tensorboard", "fvu") == {5: 1.0, 10: 1.0, 15: 2.0, 20: 2.0, 25: 2.0}
