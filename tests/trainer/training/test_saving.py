from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.activations.shards import Shards
from trainer.activations.training_data import IndexedData
from trainer.checkpoints.checkpoint import Checkpoints, load
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, PeerLost
from trainer.reporting.report import Report
from trainer.training.learner import Learner
from trainer.training.saving import Saving


@pytest.fixture
def learners(make_job: Callable[..., JobConfig]) -> dict[str, Learner]:
    return {"": Learner(make_job(), 16, None, Parallel(torch.device("cpu")))}


def make_saving(job: JobConfig, folder: Path, kept, saved: Position | None = None) -> Saving:
    parallel = Parallel(torch.device("cpu"))
    return Saving(job.train, Checkpoints(folder), parallel, Report(kept, True, [""]), data_of(job), saved)


def data_of(job: JobConfig) -> IndexedData:
    return IndexedData(Shards(path=job.data.settings.path), 0, 0, Group())


def test_all_ranks_know_whether_the_newest_checkpoint_is_missing(make_job, learners, kept, tmp_path: Path) -> None:
    saving = make_saving(make_job(), tmp_path / "c", kept)
    (tmp_path / "c").write_text("in the way")
    saving.try_save(learners, Position(1, 10))
    assert saving.has_failed_anywhere()
    (tmp_path / "c").unlink()
    saving.try_save(learners, Position(2, 20))
    assert not saving.has_failed_anywhere()
    assert load(tmp_path / "c")[1] == Position(2, 20)


def test_repeated_failures_produce_one_event_and_a_failed_last_save_raises_an_error(
    make_job, learners, kept, tmp_path: Path
) -> None:
    saving = make_saving(make_job(), tmp_path / "c", kept)
    (tmp_path / "c").write_text("in the way")
    for step in range(1, 5):
        saving.try_save(learners, Position(step, step))
    assert [level for _, level, _ in kept.events] == ["error"]
    with pytest.raises(UserError, match=str(tmp_path / "c")):
        saving.save(learners, Position(5, 5))


def test_a_lost_peer_is_not_mistaken_for_a_full_disk(make_job, learners, kept, tmp_path: Path) -> None:
    class Lost(Parallel):
        def collect(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            raise PeerLost("the connection to another rank was lost")

    job, parallel = make_job(), Lost(torch.device("cpu"))
    saving = Saving(job.train, Checkpoints(tmp_path), parallel, Report(kept, True, [""]), data_of(job), None)
    with pytest.raises(PeerLost):
        saving.try_save(learners, Position(1, 1))


def test_the_checkpoint_that_a_run_resumed_from_is_not_saved_again(make_job, learners, kept, tmp_path: Path) -> None:
    make_saving(make_job(), tmp_path / "c", kept, saved=Position(7, 70)).save(learners, Position(7, 70))
    assert not (tmp_path / "c").exists()
