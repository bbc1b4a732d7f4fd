"""Tests for `sae-train resume`: which runs it resumes, which it refuses, and how it continues the run's metrics."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoints.checkpoint import Checkpoints, load
from trainer.cli import main
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.json_file import write_json
from trainer.contract.planning.plan import Plan
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.data_record import record_of, sampled
from trainer.contract.runs.lock import RunLock, hold
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE, RankSpec, write_spec
from trainer.contract.runs.resume import data_notes, stored_job, stored_run, with_same_step
from trainer.contract.runs.run_job import load_any_run_job
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, load_job
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter
from trainer.evaluation.evaluated_job import evaluated_job
from trainer.sharing.base import BELOW_K
from trainer.training.export_checkpoint import export_checkpoint

MakeJob = Callable[..., JobConfig]


@pytest.fixture
def run_dir(make_job: MakeJob, tmp_path: Path) -> Path:
    """Write the files of a run whose second attempt stopped at step 10 of 20."""
    folder = tmp_path / "run"
    spec = RankSpec(run_dir=folder, output_dir=folder / "sae", attempt=2, world_size=1, device="cpu")
    write_spec(spec)
    (folder / "attempt1").mkdir()
    (folder / "job.toml").write_text(dump_job(make_job(launch={"gpus": "cpu"})))
    Checkpoints(folder / "checkpoints").save({}, Position(10, 1280))
    return folder


def finish(run_dir: Path) -> None:
    Checkpoints(run_dir / "checkpoints").save({}, Position(20, 2560))
    (run_dir / "sae").mkdir()
    (run_dir / "sae" / "cfg.json").write_text("{}")


@pytest.mark.parametrize("setting", ["train.lr=1", "sae.k=3", "data.weights=[1]", "name=other", "k=2"])
def test_the_error_for_a_change_to_a_runs_config_names_the_flag(
    setting: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_dir / "job.toml").read_text()
    assert main(["resume", str(run_dir), "--set", "train.n_steps=40", "--set", setting]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--set {setting.partition('=')[0]}: the config of a run is frozen")
    assert (run_dir / "job.toml").read_text() == before


def test_the_data_may_be_elsewhere_only_if_a_checkpoint_records_the_same_shards(
    run_dir: Path, activations: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    with pytest.raises(JobFileError, match=r"--set data.path: no checkpoint of the run says which shards"):
        stored_job(run_dir, [f"data.path={moved}"])
    data = sampled(record_of(stored_job(run_dir, []).hooks.values()))
    Checkpoints(run_dir / "checkpoints", data=lambda: data).save({}, Position(15, 1920))
    activations.rename(moved)
    for file in moved.iterdir():
        os.utime(file, (1, 1))
    job = stored_job(run_dir, [f"data.path={moved}"])
    assert data_notes(job, stored_run(run_dir)) == []
    shard = next(moved.iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(JobFileError, match=f"{shard.name} in {moved}, which contains different values"):
        data_notes(job, stored_run(run_dir))


def test_a_runs_length_and_intervals_and_devices_may_change(run_dir: Path) -> None:
    changes = {
        "n_steps": 50, "log_every": 3, "eval_every": 7, "checkpoint_every": 9, "checkpoint_every_tokens": 11,
        "checkpoint_every_minutes": 1.5, "keep_checkpoints": 4,
    }  # fmt: skip
    overrides = [f"train.{key}={value}" for key, value in changes.items()]
    job = stored_job(run_dir, [*overrides, "launch.gpus=cpu:2"])
    assert {key: getattr(job.train, key) for key in changes} == changes
    assert job.launch.gpus == "cpu:2"
    assert job.sae == stored_job(run_dir, []).sae


def test_a_run_from_before_encoder_follows_existed_continues_without_it(run_dir: Path) -> None:
    assert stored_job(run_dir, []).sae.encoder_follows == "auto"
    file = run_dir / "job.toml"
    file.write_text(file.read_text().replace('encoder_follows = "auto"\n', ""))
    assert stored_job(run_dir, ["train.n_steps=50"]).sae.encoder_follows == "off"


def test_a_run_from_before_lr_scaling_existed_continues_without_it(run_dir: Path) -> None:
    file = run_dir / "job.toml"
    file.write_text(file.read_text().replace('lr_scaling = "auto"\n', ""))
    assert stored_job(run_dir, []).train.lr_scaling == "off"


def test_a_run_from_before_lr_length_existed_keeps_its_learning_rate(run_dir: Path) -> None:
    file = run_dir / "job.toml"
    assert stored_job(run_dir, []).train.lr_length == "auto"
    file.write_text(file.read_text().replace('lr_length = "auto"\n', ""))
    assert stored_job(run_dir, ["train.n_steps=50000"]).train.lr_length == "off"


@pytest.mark.parametrize(("seed", "first"), [("3", 3), ("[5, 6]", 5)])
def test_a_run_from_an_earlier_program_version_keeps_its_held_out_rows(seed: str, first: int, run_dir: Path) -> None:
    file = run_dir / "job.toml"
    text = file.read_text()
    assert stored_job(run_dir, []).data.hold_out == "auto"
    for line, other in (('hold_out = "auto"\n', ""), ("split_seed = 0\n", ""), ("\nseed = 0\n", f"\nseed = {seed}\n")):
        assert line in text
        text = text.replace(line, other)
    file.write_text(text)
    for job in (stored_job(run_dir, ["train.n_steps=50"]), evaluated_job(file), load_any_run_job(file)):
        assert (job.data.hold_out, job.data.split_seed) == ("rows", first)


def test_a_run_keeps_its_tokens_per_step_even_if_auto_would_choose_another_number(
    run_dir: Path, make_job: MakeJob
) -> None:
    job = make_job(train={"batch_size": "auto", "n_tokens": 12_800, "n_steps": None}, launch={"gpus": "cpu"})
    (run_dir / "job.toml").write_text(dump_job(job))
    plan = Plan("single", 1, 1, 512, 512, 1, step_s=0.1, needs_bytes=0)
    for tokens, expected in ((512, 512), (4096, 4096)):
        # An attempt that fails early writes no plan, so the first attempt's plan is used.
        write_json(run_dir / "attempt1" / "plan.json", msgspec.structs.replace(plan, tokens_per_step=tokens))
        for overrides in ([], ["train.n_tokens=25_600_000"]):
            was, longer = stored_job(run_dir, []), stored_job(run_dir, overrides)
            longer, notes = with_same_step(was, longer, 1, 1)
            assert Layout(was, 1).tokens_per_step == Layout(longer, 1).tokens_per_step == expected
            assert all(note.startswith("train.n_tokens: changed; a step still has 512 tokens") for note in notes)


def test_overriding_n_tokens_alone_replaces_n_steps_as_the_length(run_dir: Path) -> None:
    assert Layout(stored_job(run_dir, ["train.n_tokens=12800"]), 1).total_steps == 100
    assert Layout(stored_job(run_dir, ["train.n_tokens=12800", "train.n_steps=40"]), 1).total_steps == 40


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["resume", str(folder)]) == EXIT_USAGE
        assert capsys.readouterr().err == f"RUN_DIR: there is no run in {folder}: it contains no job.toml\n"


def test_a_run_without_checkpoints_restarts_but_damaged_checkpoints_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tensors,) = (run_dir / "checkpoints").glob("step-*/tensors.safetensors")
    tensors.write_bytes(b"")
    assert main(["resume", str(run_dir)]) == EXIT_FAILED
    assert "is damaged (step-00000010 is damaged and skipped: tensors.safetensors" in capsys.readouterr().err
    again = ["run", str(run_dir / "job.toml"), "--out", str(run_dir)]
    assert main(again) == EXIT_USAGE
    assert capsys.readouterr().err.endswith("choose another folder, or resume the run\n")
    shutil.rmtree(run_dir / "checkpoints")
    # Each command suggests a fix, which must work.
    assert main(again) == EXIT_USAGE
    told = capsys.readouterr().err
    remedy = "remove the folder, choose another, or `resume` it from the beginning"
    assert f"already contains a run, which has no checkpoint; {remedy}" in told
    assert main(["resume", str(run_dir), "--json"]) == EXIT_FINISHED
    out, err = capsys.readouterr()
    assert "warning: the run had saved no checkpoint, so it starts from the beginning" in err
    assert (json.loads(out)["steps"], json.loads(out)["tokens"]) == (20, 2560)
    assert (run_dir / "attempt3").exists()


def test_a_finished_run_is_left_alone_unless_it_is_made_longer(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(run_dir)
    with contextlib.closing(SeriesWriter(run_dir / "metrics.db")) as writer:
        writer.write([MetricRow("heldout_fvu", 20, 0.25)], Heartbeat("finished", 20, 20, 2560, 1.0))
    assert main(["resume", str(run_dir)]) == EXIT_FINISHED
    assert capsys.readouterr().out.startswith("already finished after 20 steps; the SAE is in")
    assert main(["resume", str(run_dir), "--json"]) == EXIT_FINISHED
    assert json.loads(capsys.readouterr().out)["heldout_fvu"] == 0.25
    assert not (run_dir / "attempt3").exists()
    assert not stored_run(run_dir).is_finished(stored_job(run_dir, ["train.n_steps=21"]))


def test_a_run_whose_sae_was_not_written_is_not_finished(run_dir: Path) -> None:
    finish(run_dir)
    shutil.rmtree(run_dir / "sae")
    assert not stored_run(run_dir).is_finished(stored_job(run_dir, []))


def test_a_length_that_does_not_exceed_the_checkpoints_step_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run_dir), "--set", "train.n_steps=10"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("train.n_steps: the run is already at step 10")
    assert load_job(run_dir / "job.toml").train.n_steps == 20


def record_data(run_dir: Path) -> None:
    """Replace the run's checkpoint with one that records the data."""
    record = sampled(record_of(load_job(run_dir / "job.toml").hooks.values()))
    Checkpoints(run_dir / "checkpoints", data=lambda: record).save({}, Position(10, 1280))


def test_a_run_with_changed_data_is_not_resumed(
    run_dir: Path, activations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_data(run_dir)
    (activations / "b.safetensors").unlink()
    before = sorted(run_dir.rglob("*"))
    assert main(["resume", str(run_dir), "--set", "train.n_steps=40"]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data.path: the run was trained on b.safetensors in {activations}, which is missing; ")
    assert load_job(run_dir / "job.toml").train.n_steps == 20
    assert {*run_dir.rglob("*")} - {*before} <= {run_dir / "run.lock"}


def test_resume_reports_new_data_and_a_checkpoint_without_a_data_record(run_dir: Path, activations: Path) -> None:
    job = load_job(run_dir / "job.toml")
    (note,) = data_notes(job, stored_run(run_dir))
    assert note.startswith("data.path: the checkpoint is from an older version, which recorded no shards; ")
    record_data(run_dir)
    assert data_notes(job, stored_run(run_dir)) == []
    shutil.copy(activations / "a.safetensors", activations / "0.safetensors")
    (note,) = data_notes(job, stored_run(run_dir))
    assert note.startswith("data.path: the data has grown by 1,700 rows in 0.safetensors; ")


# Tests for a run folder's lock.


@pytest.fixture
def holder(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds a run's lock, as a rank does."""
    code = "import sys, pathlib; from trainer.contract.runs.lock import hold; hold(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", str(run_dir / "run.lock")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "\n"
        yield process
        process.kill()


def test_an_active_run_is_not_started_a_second_time(
    run_dir: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run_dir)]) == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == f"the run in {run_dir} is still running; stop it, wait until it has saved a checkpoint, and try again"
    )
    holder.kill()
    holder.wait()
    with RunLock(run_dir):
        pass


def test_only_one_of_two_simultaneous_resumes_gets_the_lock(run_dir: Path) -> None:
    with RunLock(run_dir) as first:
        with pytest.raises(UserError, match="still running"):
            RunLock(run_dir)
        first.share()
        with pytest.raises(UserError, match="still running"):
            RunLock(run_dir)
        # Ranks in the process that holds the lock can share it.
        hold(run_dir / "run.lock")


def test_a_run_can_train_on_a_file_system_without_locks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(run_dir) as lock:
        lock.share()
    hold(run_dir / "run.lock")


# Tests for a run's next attempt.


def test_the_next_attempt_continues_from_the_last_checkpoint(run_dir: Path) -> None:
    (run_dir / "attempt10").mkdir()
    shutil.copy(run_dir / "attempt2" / "ranks.json", run_dir / "attempt10")
    spec = stored_run(run_dir).next_attempt(1, "cpu", ())
    assert (spec.attempt, spec.output_dir) == (11, run_dir / "sae")
    assert spec.resume_from == run_dir / "checkpoints" / "step-00000010"


@pytest.mark.parametrize("written", [None, b'{"run_dir":'])
def test_an_attempt_killed_before_it_started_is_skipped(run_dir: Path, written: bytes | None) -> None:
    (run_dir / "attempt3").mkdir()
    if written:
        (run_dir / "attempt3" / "ranks.json").write_bytes(written)
    spec = stored_run(run_dir).next_attempt(1, "cpu", ())
    assert (spec.attempt, spec.output_dir) == (4, run_dir / "sae")
    for folder in run_dir.glob("attempt*"):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="contains no attempts"):
        stored_run(run_dir)


@pytest.fixture
def launched(run_dir: Path, tmp_path: Path) -> Path:
    """Move the run to job 7's folder in the app's data folder."""
    data = tmp_path / "data"
    (data / "runs").mkdir(parents=True)
    folder = run_dir.rename(data / "runs" / "7")
    write_spec(RankSpec(folder, data / "saes" / "7", 2, 1, "cpu", control_db=data / "control.db", job_id=7))
    return folder


def next_output(run_dir: Path) -> Path:
    return stored_run(run_dir).next_attempt(1, "cpu", ()).output_dir


def test_a_run_launched_by_the_app_keeps_its_output_but_not_its_old_requests(launched: Path, tmp_path: Path) -> None:
    spec = stored_run(launched).next_attempt(1, "cpu", ())
    assert spec.output_dir == tmp_path / "data" / "saes" / "7"
    assert (spec.control_db, spec.job_id) == (None, None)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert next_output(tmp_path / "link" / "runs" / "7") == spec.output_dir


def test_a_copy_of_a_launched_run_writes_its_own_sae(launched: Path, tmp_path: Path) -> None:
    for copy in (tmp_path / "copy", launched.with_name("8"), tmp_path / "other" / "runs" / "7"):
        shutil.copytree(launched, copy)
        assert next_output(copy) == copy / "sae"


@pytest.mark.parametrize("named", ["precious", "data/saes/7", "run/checkpoints", "run/../precious"])
def test_a_runs_files_cannot_redirect_its_sae_to_another_folder(named: str, run_dir: Path, tmp_path: Path) -> None:
    write_spec(RankSpec(run_dir, tmp_path / named, 2, 1, "cpu"))
    assert next_output(run_dir) == run_dir / "sae"


def test_a_moved_run_folder_keeps_its_sae_inside(run_dir: Path, tmp_path: Path) -> None:
    run_dir.rename(tmp_path / "elsewhere")
    run = stored_run(tmp_path / "elsewhere")
    assert run.next_attempt(1, "cpu", ()).output_dir == tmp_path / "elsewhere" / "sae"


@pytest.mark.parametrize(
    ("train", "before", "now", "expected"),
    [
        ({"batch_size": 128}, 1, 2, (64, 1)),
        ({"batch_size": 128}, 2, 1, (128, 2)),
        ({"batch_size": 128, "accumulate": 4}, 1, 2, (128, 2)),
        ({"batch_size": 96}, 3, 2, (72, 2)),
        ({"batch_size": 5}, 3, 1, (5, 3)),
        ({"batch_size": 128}, 1, 3, (43, 1)),
        ({"batch_size": 128}, 2, 2, (128, 1)),
    ],
)
def test_a_step_keeps_its_number_of_tokens_on_a_different_number_of_ranks(
    train: dict[str, int], before: int, now: int, expected: tuple[int, int], make_job: MakeJob
) -> None:
    job = make_job(train=train)
    shared, notes = with_same_step(job, job, before, now)
    assert (Layout(shared, now).micro_batch, Layout(shared, now).micro_batches) == expected
    assert Layout(shared, now).tokens_per_step == Layout(job, before).tokens_per_step
    assert Layout(shared, now).total_steps == Layout(job, before).total_steps
    following = {"lr_scaling": "linear", "lr_tokens": 64}
    then = Layout(job.replace("train", **following), before).lr_scale
    assert Layout(shared.replace("train", **following), now).lr_scale == then
    assert bool(notes) == (before != now)


@pytest.mark.parametrize(
    ("parallel", "before", "now"),
    [({"mode": "tensor"}, 2, 4), ({"mode": "tensor"}, 4, 1), ({"mode": "hybrid"}, 4, 8), ({"mode": "hybrid"}, 8, 2)],
)
def test_the_tokens_per_step_do_not_depend_on_how_many_ranks_share_the_latents(
    parallel: dict[str, str], before: int, now: int, make_job: MakeJob
) -> None:
    job = make_job(parallel=parallel)
    shared, _ = with_same_step(job, job, before, now)
    assert Layout(shared, now).tokens_per_step == Layout(job, before).tokens_per_step


def test_a_step_keeps_its_number_of_tokens_in_a_different_mode(make_job: MakeJob) -> None:
    job = make_job()
    shared, notes = with_same_step(job, job.replace("parallel", mode="tensor"), 4, 4)
    assert Layout(shared, 4).tokens_per_step == Layout(job, 4).tokens_per_step
    assert (Layout(shared, 4).micro_batch, Layout(shared, 4).micro_batches) == (128, 4)
    assert notes[0].startswith("parallel.mode: changed; a step still has 512 tokens")


# Tests for the metrics history.


def read(metrics_db: Path) -> dict[str, list[tuple[int, float | None]]]:
    with contextlib.closing(SeriesReader(metrics_db)) as reader:
        return {
            f"{name}/{rank}": [(point.step, point.value) for point in reader.points(name, rank)]
            for name, rank in reader.series()
        }


# End-to-end tests.


def run_trainer(*arguments: object) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "trainer", *map(str, arguments), "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == EXIT_FINISHED, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_a_run_that_has_lost_its_last_steps_resumes_to_the_same_result(
    make_job: MakeJob, make_trainer: Callable, tmp_path: Path
) -> None:
    job = make_job(
        train={"checkpoint_every": 10, "keep_checkpoints": 9}, sae={"dead_after_tokens": 400}, launch={"gpus": "cpu"}
    )
    make_trainer(job).run()
    (tmp_path / "job.toml").write_text(dump_job(job))
    first, _ = run_trainer("run", tmp_path / "job.toml", "--out", tmp_path / "run")
    with (tmp_path / "run" / "checkpoints" / "step-00000020" / "tensors.safetensors").open("r+b") as file:
        file.truncate(100)
    shutil.rmtree(tmp_path / "run" / "sae")
    history = read(tmp_path / "run" / "metrics.db")

    resumed, errors = run_trainer("resume", tmp_path / "run")
    assert errors.startswith("warning: step-00000020 is damaged and skipped: tensors.safetensors")
    for key in ("steps", "tokens", "fvu", "l0", "heldout_fvu", "output_path"):
        assert resumed[key] == first[key], key
    whole, whole_position = load(tmp_path / "checkpoints")
    tensors, position = load(tmp_path / "run" / "checkpoints")
    assert position == whole_position
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(whole[name], tensors[name]) for name in whole)
    exported = load_file(tmp_path / "run" / "sae" / "sae_weights.safetensors")
    for name, tensor in load_file(tmp_path / "sae" / "sae_weights.safetensors").items():
        assert torch.equal(tensor, exported[name]), name
    export_checkpoint(tmp_path / "run", tmp_path / "out", form="saelens", best=False, force=False)
    configs = [json.loads((folder / "cfg.json").read_text()) for folder in (tmp_path / "out", tmp_path / "run" / "sae")]
    # Only an export after training includes what the report card measured.
    assert configs[0]["metadata"].pop(BELOW_K) == 0
    assert configs[0] == configs[1]
    again = read(tmp_path / "run" / "metrics.db")
    assert again["loss/0"] == history["loss/0"]
    # Every attempt reports the expected step time once, so this series has one point per attempt.
    once_each = {"expected_step_ms/0"}
    lengths, wanted = (
        {name: len(p) for name, p in curves.items() if name not in once_each} for curves in (again, history)
    )
    assert lengths == wanted
    spec = json.loads((tmp_path / "run" / "attempt2" / "ranks.json").read_text())
    assert (spec["attempt"], Path(spec["resume_from"]).name) == (2, "step-00000010")
    assert load_job(tmp_path / "run" / "job.toml") == job


@pytest.mark.slow
def test_extending_a_finished_run_on_two_ranks_reports_what_changes(
    make_job: MakeJob, make_trainer: Callable, run_dir: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    make_trainer(make_job(), checkpoints=run_dir / "checkpoints", output=run_dir / "sae").run()
    # If a run was copied from another user, its spec may name an output folder containing other files.
    (precious := run_dir.parent / "precious").mkdir()
    (precious / "thesis.tex").write_text("mine")
    write_spec(RankSpec(run_dir, precious, 2, 1, "cpu"))
    (run_dir / "sae" / "evals.json").write_text("mine")
    longer = ("--set", "train.n_steps=30", "--set", "launch.gpus=cpu:2")
    resumed, errors = run_trainer("resume", run_dir, *longer)
    assert (resumed["steps"], resumed["tokens"]) == (30, 30 * 128)
    assert "the run ends at step 30 instead of 20, and its schedules change" in errors
    assert "a step still has 128 tokens (train.global_batch_size)" in errors
    stored = load_job(run_dir / "job.toml")
    assert (stored.train.n_steps, stored.train.global_batch_size, stored.launch.gpus) == (30, 128, "cpu:2")
    assert [entry.name for entry in precious.iterdir()] == ["thesis.tex"]
    assert resumed["output_path"] == str(run_dir / "sae")
    assert (run_dir / "sae" / "evals.json").read_text() == "mine"
    assert json.loads((run_dir / "sae" / "cfg.json").read_text())["metadata"]["training_tokens"] == 30 * 128
    made = [run_dir / "logs" / "rank0.log", run_dir / "attempt3" / "ranks.json", run_dir / "job.toml"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in made} == {0o600}
