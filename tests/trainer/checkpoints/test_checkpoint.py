from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked import Prepare, in_loaded_process
from support.rank_faults import die_in_save, die_in_step
from support.saves import kill_saves, save_until_full
from support.steps import take_alone

from trainer.checkpoints.atomic_folder import NoSpaceError, fill_folder
from trainer.checkpoints.checkpoint import Checkpoints, load
from trainer.contract.errors import UserError
from trainer.contract.paths import RESERVE
from trainer.contract.runs.checkpoint_manifest import MANIFEST, Position, best_first, damage, newest_first, read_state
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.reporting.progress import RunProgress
from trainer.training.learner import Learner

TENSORS = {"/sae.W_enc": torch.arange(12.0).reshape(3, 4), "/optimizer.step.W_enc": torch.tensor(7.0)}


def save(folder: Path, step: int, heldout_fvu: float | None = None, keep: int = 2) -> Path:
    return Checkpoints(folder, keep).save(TENSORS, Position(step, 30 * step), heldout_fvu)


def steps_in(folder: Path) -> list[int]:
    return sorted(read_state(checkpoint).position.step for checkpoint in newest_first(folder))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "c", 7)


def test_a_checkpoint_is_loaded_exactly_as_saved(make_job: Callable[..., JobConfig], tmp_path: Path) -> None:
    def learner(seed: int) -> Learner:
        made = Learner(make_job(train={"seed": seed}), 16, None, Parallel(torch.device("cpu")))
        x = torch.randn(300, 16, generator=torch.Generator().manual_seed(seed))
        made.initialise(x, x)
        for step in range(3):
            take_alone(made, step, x)
        return made

    one, other = learner(0), learner(1)
    folder = Checkpoints(tmp_path / "c").save(dict(one.state.tensors()), Position(3, 900))
    expected = torch.rand(1)  # the first random number drawn after the save
    tensors, position = load(folder)
    assert torch.equal(torch.rand(1), expected)
    assert position == Position(3, 900)
    other.state.load(tensors)
    restored = dict(other.state.tensors())
    assert {name.partition(".")[0] for name in restored} == {"sae", "optimizer"}
    for name, tensor in one.state.tensors():
        assert torch.equal(tensor, restored[name]), name


def test_only_the_owner_can_read_a_checkpoint(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in saved.iterdir()} == {0o600}
    assert {file.suffix for file in saved.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize(
    ("fvu", "kept"),
    [
        ([0.9, 0.2, 0.5, 0.4, 0.3], [2, 4, 5]),
        ([0.9, 0.5, 0.4, 0.3, 0.2], [4, 5]),
        ([0.1, 0.5, 0.4, 0.3, 0.2], [1, 4, 5]),
        ([None, None, None, None, None], [4, 5]),
        ([None, 0.3, float("nan"), None, 0.4], [2, 4, 5]),
    ],
)
def test_the_newest_two_checkpoints_and_the_best_one_are_kept(
    fvu: list[float | None], kept: list[int], tmp_path: Path
) -> None:
    for step, value in enumerate(fvu, start=1):
        save(tmp_path / "c", step, value)
    assert steps_in(tmp_path / "c") == kept
    ordered = best_first(newest_first(tmp_path / "c"))
    measured = [value for value in fvu if value is not None and value == value]
    assert [read_state(folder).heldout_fvu for folder in ordered][:1] == ([min(measured)] if measured else [])


def test_the_requested_number_of_checkpoints_is_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path / "c", step, 1 / step if step < 3 else 9.0, keep=3)
    assert steps_in(tmp_path / "c") == [2, 4, 5, 6]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("harm", [flip_a_byte, cut_short, Path.unlink])
@pytest.mark.parametrize("name", ["tensors.safetensors", "random.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_if_given_directly_and_skipped_in_a_folder(
    harm: Callable[[Path], None], name: str, saved: Path, tmp_path: Path
) -> None:
    newer = save(tmp_path / "c", 9)
    harm(newer / name)
    with pytest.raises(UserError, match=f"step-00000009 cannot be used: .*{name}"):
        load(newer)
    assert load(tmp_path / "c")[1] == Position(7, 210)


def test_a_run_saves_again_after_skipping_a_damaged_checkpoint(saved: Path, tmp_path: Path) -> None:
    cut_short(save(tmp_path / "c", 9, keep=1) / "tensors.safetensors")
    shutil.copytree(tmp_path / "c" / "step-00000009", tmp_path / "c" / "step-00000010")
    save(tmp_path / "c", 8, keep=1)
    assert steps_in(tmp_path / "c") == [8]


def test_a_folder_without_a_manifest_is_not_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    (saved / MANIFEST).unlink()
    for path in (saved, saved.parent, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"manifest\.json .* cannot be read .*; resume from another one"):
            load(path)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"files": {}}',
        '{"format": 2, "files": [1]}',
        "{",
        '{"format": 1, "files": {}}',
        '{"format": 2, "files": {}}',
        '{"format": 2, "files": {"/dev/zero": {"bytes": 0, "sha256": ""}}}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_an_invalid_manifest_counts_as_damage_and_raises_no_error(content: str, saved: Path) -> None:
    (saved / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    assert damage(saved)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors", "state.json"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")])
def test_a_pipe_or_device_among_a_checkpoints_files_counts_as_damage(
    name: str, put: Callable[[Path], object], saved: Path
) -> None:
    (saved / name).unlink()
    put(saved / name)
    # Read the file in another process, because reading a pipe or a device might block forever.
    looks = "from trainer.contract.runs.checkpoint_manifest import damage; print(damage(Path(sys.argv[1])))"
    code = f"import sys; from pathlib import Path; {looks}"
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, timeout=60)
    assert re.search(r"not a plain file|has changed since it was written", done.stdout), done.stderr


def test_user_files_in_a_checkpoint_folder_outlive_the_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path / "c", step, keep=1) / "notes.md").write_text(f"mine {step}")
        cut_short(tmp_path / "c" / f"step-0000000{step}" / "tensors.safetensors")
    assert damage(save(tmp_path / "c", 2, keep=1)) is None
    notes = {file.parent.name: file.read_text() for file in (tmp_path / "c").glob("*/notes.md")}
    assert notes == {"step-00000001": "mine 1", "step-00000002": "mine 2"}
    assert [file.name for file in (tmp_path / "c" / "step-00000001").iterdir()] == ["notes.md"]


def test_no_checkpoint_is_saved_or_deleted_through_a_symbolic_link(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved.parent)
    with pytest.raises(UserError, match="link is a symbolic link, and symbolic links are not followed"):
        save(tmp_path / "link", 9, keep=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "step-00000001").symlink_to(saved)
    save(tmp_path / "other", 9, keep=1)
    assert damage(saved) is None
    assert steps_in(tmp_path / "other") == [9]


def test_an_interrupted_save_leaves_no_trace_after_the_next_save(saved: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "c" / ".step-00000009.new"
    leftover.mkdir()
    (leftover / "tensors.safetensors").write_bytes(b"half")
    save(tmp_path / "c", 9)
    assert not leftover.exists()


def test_the_newest_checkpoint_is_chosen_by_step_rather_than_by_name_order(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(tmp_path / "c", step)
    (tmp_path / "c" / "step-notes").mkdir()
    assert load(tmp_path / "c")[1].step == 100_000_000
    assert {folder.name for folder in (tmp_path / "c").iterdir()} == {"step-99999999", "step-100000000", "step-notes"}


# Tests with real processes and real failures.


def test_a_save_killed_at_any_moment_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    n_killed = in_loaded_process(kill_saves, tmp_path)
    assert n_killed > 8
    for moment in range(1, n_killed + 1):
        folder = tmp_path / str(moment)
        position = load(folder)[1]
        assert position.step in (3, 4), moment
        assert all(damage(checkpoint) is None for checkpoint in newest_first(folder)), moment
        # The next save removes the files left by the interrupted save.
        save(folder, 5, 0.6)
        assert steps_in(folder) == [1, position.step, 5], moment
        assert not [checkpoint.name for checkpoint in folder.iterdir() if checkpoint.name.startswith(".")], moment


def require_previous_checkpoint_only(
    lines: list[str], reason: str, cure: str = "free some space on its disk and try again"
) -> None:
    sentence, left = lines
    assert "step-00000002 could not be written: " in sentence
    assert reason in sentence
    assert sentence.endswith(cure)
    assert left == "['step-00000001'] None"


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk with {options} can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_produces_a_one_sentence_error_and_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        require_previous_checkpoint_only(
            in_loaded_process(save_until_full, disk, 0, 0), "it needs 4 MiB, but only 1 MiB are free"
        )


def test_a_full_quota_produces_a_one_sentence_error_and_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64m,usrquota,usrquota_block_hardlimit=1m,mode=777") as disk:
        # Quotas do not apply to root, so the process runs as another user.
        lines = in_loaded_process(save_until_full, disk, 0, 65534)
        require_previous_checkpoint_only(lines, "quota", "free some of your quota on it and try again")


def test_the_error_for_a_full_quota_names_the_quota(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, fill_folder(tmp_path / "c", last="z"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert str(caught.value).endswith("Disk quota exceeded; free some of your quota on it and try again")


def test_lack_of_space_for_a_parent_folder_is_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(NoSpaceError, match="No space left on device; free some space"),
        fill_folder(tmp_path / "p/c", "z"),
    ):
        pass


def test_old_checkpoints_are_deleted_to_free_space_but_never_the_last_good_one(tmp_path: Path) -> None:
    def save_large(step: int, keep: int = 2) -> None:
        Checkpoints(disk / "c", keep).save({"large": torch.ones(250_000)}, Position(step, step))

    with small_disk(tmp_path / "disk", "size=3m") as disk:
        for step in (1, 2, 3, 4):
            save_large(step)
            assert steps_in(disk / "c") == [1, 2, 3, 4][max(0, step - 2) : step]
        (disk / "other").write_bytes(bytes(900_000))
        save_large(5, keep=1)
        (disk / "another").write_bytes(bytes(900_000))
        with pytest.raises(UserError, match="it needs 1 MiB, but only 0 MiB are free; free some space"):
            save_large(6, keep=1)
        assert steps_in(disk / "c") == [5]
        assert damage(disk / "c" / "step-00000005") is None


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path: Path) -> None:
    lines = in_loaded_process(save_until_full, tmp_path / "c", 500_000, 0)
    require_previous_checkpoint_only(lines, "File too large")


# Tests for when a run saves a checkpoint.


class Clock(RunProgress):
    """A `RunProgress` whose clock advances by `seconds` at each training step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        super().__init__()
        self.now, self._seconds = 0.0, seconds
        monkeypatch.setattr("trainer.training.saving.time", SimpleNamespace(monotonic=lambda: self.now))

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        self.now += self._seconds * (phase == "training" and step != self.place[1])
        self.place = (phase, step)


def saved_steps(make_trainer: Callable, job: JobConfig, folder: Path, progress: RunProgress | None = None) -> list[int]:
    make_trainer(job, progress, checkpoints=folder).run()
    return steps_in(folder)


def test_checkpoints_are_saved_at_intervals_of_steps_or_tokens(
    make_job: Callable[..., JobConfig], make_trainer: Callable, tmp_path: Path
) -> None:
    def steps(**train: Any) -> list[int]:
        job = make_job(train={"batch_size": 100, "keep_checkpoints": 99, "checkpoint_every_minutes": 0} | train)
        return saved_steps(make_trainer, job, tmp_path / str(train))

    assert steps() == [20]
    assert steps(checkpoint_every=6) == [6, 12, 18, 20]
    assert steps(checkpoint_every_tokens=750) == [8, 15, 20]
    assert steps(checkpoint_every_tokens=50) == list(range(1, 21))
    assert steps(checkpoint_every_tokens=750, checkpoint_every=6) == [6, 8, 12, 15, 18, 20]


def test_a_checkpoint_is_due_a_set_number_of_minutes_after_the_last_one_of_any_kind(
    make_job: Callable[..., JobConfig], make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(folder: str, **train: Any) -> list[int]:
        job = make_job(train={"keep_checkpoints": 99, "checkpoint_every_minutes": 2.5} | train)
        return saved_steps(make_trainer, job, tmp_path / folder, Clock(monkeypatch, seconds=30))

    # A save is requested at the first step after the 2.5-minute interval has elapsed.
    assert steps("a") == [6, 12, 18, 20]
    assert steps("b", checkpoint_every=8) == [6, 8, 14, 16, 20]


def test_a_sweeps_checkpoint_contains_every_sae_under_its_label(
    make_job: Callable[..., JobConfig], make_trainer: Callable, tmp_path: Path
) -> None:
    trainer = make_trainer(make_job(sae={"k": [2, 4]}, train={"checkpoint_every": 10}))
    trainer.run()
    tensors, position = load(tmp_path / "checkpoints")
    assert position.step == 20
    assert {name.partition("/")[0] for name in tensors} == {"k=2", "k=4"}
    for label, learner in trainer.learners.items():
        for name, tensor in learner.state.tensors():
            assert torch.equal(tensors[f"{label}/{name}"], tensor), name
    assert read_state(tmp_path / "checkpoints" / "step-00000010").heldout_fvu is not None


def test_a_runs_best_checkpoint_outlives_newer_ones(
    make_job: Callable[..., JobConfig], make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([0.4, 0.1, 0.3, 0.2, 0.25])

    def pretend(learners: Mapping[str, Learner], *_: Any) -> dict[str, dict[str, float]]:
        return {label: {"heldout_fvu": next(measured), "heldout_l0": 4.0} for label in learners}

    monkeypatch.setattr("trainer.training.loop.evaluate", pretend)
    job = make_job(train={"checkpoint_every": 4, "keep_checkpoints": 2, "eval_every": 0})
    assert saved_steps(make_trainer, job, tmp_path / "c") == [8, 16, 20]


# A test that kills a rank.


def test_a_run_killed_during_a_step_and_during_a_save_ends_with_the_same_weights(
    make_job: Callable[..., JobConfig], make_trainer: Callable, start_ranks: Callable, tmp_path: Path
) -> None:
    # `dead_after_tokens` is small so that AuxK is active and the dead-latent counters affect the result.
    # 30 steps of 200 tokens reach the third epoch.
    job = make_job(
        train={"batch_size": 200, "n_steps": 30, "checkpoint_every": 10},
        sae={"dead_after_tokens": 400, "d_sae": 256},
    )
    whole = make_trainer(job)
    whole.run()
    (learner,) = whole.learners.values()

    def attempt(number: int, prepare: Prepare | None = None) -> int:
        resume_from = tmp_path / "run" / "checkpoints" if number > 1 else None
        (code,) = start_ranks(job, 1, attempt=number, prepare=prepare, resume_from=resume_from).wait()
        return code

    assert attempt(1, functools.partial(die_in_step, 15)) == -signal.SIGKILL
    assert attempt(2, functools.partial(die_in_save, 20)) == -signal.SIGKILL
    checkpoints = tmp_path / "run" / "checkpoints"
    cut_off, whole_one = sorted(entry.name for entry in checkpoints.iterdir() if entry.name != RESERVE)
    assert re.fullmatch(r"\.step-00000020\.[0-9a-f]{16}\.new", cut_off)
    assert whole_one == "step-00000010"
    assert attempt(3) == EXIT_FINISHED
    tensors, position = load(checkpoints)
    assert position == whole.position
    for name, tensor in learner.state.tensors():
        assert torch.equal(tensors[f"/{name}"], tensor), name
    for file in ("cfg.json", "sae_weights.safetensors"):
        assert (tmp_path / "run" / "sae" / file).read_bytes() == (tmp_path / "sae" / file).read_bytes()


def test_held_out_fvus_measured_on_different_rows_are_not_compared(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=3)
    for step, (fvu, held_out) in enumerate([(0.1, "of other rows"), (0.3, "rows"), (0.2, "rows"), (0.4, "rows")]):
        checkpoints.save({}, Position(step, step), fvu, held_out=held_out)
    assert [folder.name[-1] for folder in best_first(newest_first(tmp_path / "c"))] == ["2", "1", "3"]
    # The checkpoint with the lowest FVU is not kept, because its FVU was measured on different rows.
    assert [folder.name[-1] for folder in newest_first(tmp_path / "c")] == ["3", "2", "1"]
