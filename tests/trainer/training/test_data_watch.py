"""Tests with real training runs whose data changes before they are resumed or while they are training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from trainer.activations.shards import ShardCutError
from trainer.activations.training_data import IndexedData
from trainer.contract.errors import UserError
from trainer.contract.paths import RESERVE
from trainer.contract.runs.checkpoint_manifest import newest_first, read_state
from trainer.contract.settings.job import JobConfig
from trainer.training.loop import Trainer

MakeJob, MakeTrainer = Callable[..., JobConfig], Callable[..., Trainer]
Rows = set[bytes]


def write(file: Path, n: int, seed: int) -> None:
    file.parent.mkdir(exist_ok=True)
    save_file({"activations": torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))}, file)


def as_set(rows: torch.Tensor) -> Rows:
    return {row.tobytes() for row in rows.numpy()}


def held_out(trainer: Trainer, side: int = 0) -> list[bytes]:
    pairs = list(trainer.data.of_hook(0).held_out(1000))
    return [row.tobytes() for pair in pairs for row in pair[side].numpy()]


def in_an_epoch(trainer: Trainer) -> NDArray[np.int64]:
    """Return the row indices of the next five epochs."""
    assert isinstance(trainer.data, IndexedData)
    return trainer.data._order.token_slice(trainer.position.tokens, 5 * trainer.data.split.n_train)


# Tests with data that grows between two attempts.


def grown_twice(folders: list[Path]) -> None:
    """Add shards whose names sort before and between each folder's existing shards."""
    for number, folder in enumerate(folders):
        write(folder / "a.safetensors", 150, 10 + number)
        write(folder / "c.safetensors", 90, 20 + number)


@pytest.mark.parametrize(
    ("folders", "data"),
    [
        (["x"], {}),
        (["x", "y"], {}),
        (["x", "y"], {"weights": [1.0, 3.0]}),
        (["x", "y"], {"target_path": ["x-to", "y-to"]}),
    ],
    ids=["one folder", "a list", "weights", "targets"],
)
def test_rows_held_out_before_a_folder_grows_are_never_trained_on_afterwards(
    folders: list[str], data: dict[str, Any], make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    everywhere = [tmp_path / name for name in (*folders, *data.get("target_path", []))]
    for number, folder in enumerate(everywhere):
        write(folder / "b.safetensors", 400, number)
        write(folder / "d.safetensors", 200, 5 + number)
    paths = {"path": [str(tmp_path / name) for name in folders]} | data
    if "target_path" in data:
        paths["target_path"] = [str(tmp_path / name) for name in data["target_path"]]
    job = make_job(data=paths, train={"n_steps": 2})
    first = make_trainer(job)
    first.run()
    before, before_to = held_out(first), held_out(first, 1)
    grown_twice(everywhere)
    longer = job.replace("train", n_steps=4)
    second = make_trainer(longer, kept, resume_from=tmp_path / "checkpoints")
    assert (held_out(second), held_out(second, 1)) == (before, before_to)
    rows = in_an_epoch(second)
    assert as_set(second._source.rows(np.unique(rows))).isdisjoint(before)
    if "weights" not in data:
        # The run trains on all new rows, and on all old rows that were not held out.
        assert len(np.unique(rows)) == second._source.n_tokens - len(before)
    (said,) = [message for kind, _, message in kept.events if kind == "data"]
    assert "has grown by " in said
    second.run()
    # The next checkpoint keeps the same held-out rows, although the folder grows again.
    write(everywhere[0] / "0.safetensors", 10, 30)
    if "target_path" in data:
        write(tmp_path / "x-to" / "0.safetensors", 10, 31)
    third = make_trainer(job.replace("train", n_steps=6), resume_from=tmp_path / "checkpoints")
    assert (held_out(third), held_out(third, 1)) == (before, before_to)
    assert as_set(third._source.rows(np.unique(in_an_epoch(third)))).isdisjoint(before)


def write_texts(file: Path, texts: range, seed: int) -> None:
    """Write 25 rows for each text, and store the text number with each row."""
    write(file, 25 * len(texts), seed)
    document = torch.tensor(texts, dtype=torch.int32).repeat_interleave(25)
    save_file(load_file(file) | {"document": document}, file)


def test_texts_stay_held_out_even_if_new_shards_lack_text_numbers(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    write_texts(folder / "b.safetensors", range(40), 1)
    job = make_job(data={"path": str(folder)}, train={"n_steps": 2})
    first = make_trainer(job)
    first.run()
    assert first.data.hold_out == "texts"
    before = held_out(first)
    write_texts(folder / "a.safetensors", range(40, 60), 2)
    for add in (lambda: None, lambda: write(folder / "c.safetensors", 100, 3)):
        add()
        second = make_trainer(job.replace("train", n_steps=4), resume_from=tmp_path / "checkpoints")
        assert held_out(second) == before
        assert as_set(second._source.rows(np.unique(in_an_epoch(second)))).isdisjoint(before)


def test_resuming_on_different_rows_is_refused_before_any_step_is_taken(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path
) -> None:
    job = make_job(train={"n_steps": 2})
    make_trainer(job).run()
    rows = load_file(activations / "a.safetensors")["activations"]
    save_file({"activations": rows.flip(0).contiguous()}, activations / "a.safetensors")
    refusal = r"a\.safetensors in .*/acts, which contains different values; restore the data"
    with pytest.raises(UserError, match=refusal):
        make_trainer(job.replace("train", n_steps=4), resume_from=tmp_path / "checkpoints")


# Tests with data that changes while a run reads it.


class AtStep:
    """A change to the data after a given step, as if made by a user while the run is training."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def into(self, progress: Any) -> Any:
        was = progress.heartbeat

        def heartbeat(phase: str, step: int, tokens: int) -> None:
            was(phase, step, tokens)
            if (phase, step) == ("training", self._step):
                self._act()

        progress.heartbeat = heartbeat
        return progress


def overwrite(file: Path) -> None:
    with open(file, "r+b") as stream:
        stream.seek(2000)
        stream.write(bytes(40_000))


def test_if_a_shard_is_overwritten_the_run_saves_its_state_and_fails_with_its_name(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    job = make_job(train={"n_steps": 40, "eval_every": 5})
    progress = AtStep(12, lambda: overwrite(activations / "a.safetensors")).into(kept)
    trainer = make_trainer(job, progress)
    with pytest.raises(
        UserError, match=r"data\.path: .*a\.safetensors was modified while the run was reading it"
    ) as error:
        trainer.run()
    assert "steps after 10 may have used the changed rows; restore it" in str(error.value)
    assert 15 <= trainer.position.step < 20
    assert read_state(newest_first(tmp_path / "checkpoints")[0]).position == trainer.position
    assert (tmp_path / "sae" / "cfg.json").exists()
    assert [level for kind, level, _ in kept.events if kind == "data"] == ["warning"]


def test_if_a_shard_is_truncated_the_error_names_it_and_the_last_step_is_saved(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    job = make_job(train={"n_steps": 40, "eval_every": 0})
    file = activations / "a.safetensors"
    whole = file.read_bytes()
    trainer = make_trainer(job, AtStep(5, lambda: os.truncate(file, 1000)).into(kept))
    save, was_reserved = trainer._saving.save, []

    def look(*arguments: Any) -> None:
        was_reserved.append((tmp_path / "checkpoints" / RESERVE).exists())
        save(*arguments)

    trainer._saving.save = look
    with pytest.raises(ShardCutError, match=r"data\.path: .*a\.safetensors was truncated to 1,000 of "):
        trainer.run()
    assert read_state(newest_first(tmp_path / "checkpoints")[0]).position.step >= 5
    # The space reserved for the last checkpoint was freed before saving.
    assert was_reserved == [False]
    # The run can be resumed after the file has been copied again.
    file.write_bytes(whole)
    assert make_trainer(job, resume_from=tmp_path / "checkpoints").run()


def test_a_touched_shard_is_not_reported_and_a_replaced_one_is_reported_once(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path
) -> None:
    job = make_job(train={"n_steps": 12, "eval_every": 2})

    def change() -> None:
        os.utime(activations / "a.safetensors", ns=(1, 1))
        write(activations / "new", 1300, 9)
        (activations / "new").rename(activations / "b.safetensors")

    assert make_trainer(job, AtStep(3, change).into(kept)).run()
    ((level, message),) = [(level, message) for kind, level, message in kept.events if kind == "data"]
    assert level == "warning"
    assert f"{activations / 'b.safetensors'} has changed since the run began" in message
