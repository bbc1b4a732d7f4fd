from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.combinations import slow_except
from support.steps import skips, take_alone

from trainer.activations.outliers import LeftOut
from trainer.activations.training_data import IndexedData
from trainer.checkpoints.checkpoint import load
from trainer.contract.errors import UserError
from trainer.contract.planning import latent_capacity
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import MetricRow
from trainer.metrics import pace
from trainer.parallel import totals
from trainer.parallel.base import Parallel
from trainer.parallel.threads import Threads, on_all
from trainer.reporting.report import Report
from trainer.runtime.device_queue import HostCopy
from trainer.saes import base
from trainer.training import evaluate
from trainer.training.bad_rows import BadRows
from trainer.training.learner import Learner
from trainer.training.loop import Trainer

SAMPLE = Path(__file__).parents[3] / "data" / "sample"
CPU = torch.device("cpu")
MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]
PACE = "_s$|_ms$|memory|data_wait"


HERE = threading.local()


class Noted(HostCopy):
    """A host copy that records whether it is read during the step in which it was made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._made_at = HERE.trainer.position.step

    def read(self) -> torch.Tensor:
        if HERE.trainer.position.step == self._made_at:
            HERE.waited_at.add(self._made_at)
        return super().read()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all tensors that training changes, for every SAE."""
    learners = trainer.learners.items()
    return {f"{label}/{name}": tensor.clone() for label, one in learners for name, tensor in one.state.tensors()}


def only(trainer: Trainer) -> Learner:
    (learner,) = trainer.learners.values()
    return learner


@pytest.mark.parametrize(
    ("sae", "train"),
    [({"architecture": name}, {}) for name in ARCHITECTURES]
    + [({}, {"optimizer": "signum"}), ({}, {"optimizer": "muon"}), ({}, {"state": "bf16"}), ({}, {"state": "int8"})]
    + [({"architecture": "standard", "sparsity_coefficient": 50.0}, {}), ({"k_anneal_fraction": 0.9}, {})],
    ids=str,
)
def test_a_run_resumed_at_step_10_of_20_is_bit_identical(
    sae: dict, train: dict, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    # `dead_after_tokens` is small so that AuxK is active and the dead-latent counters affect the result.
    # 20 steps of 200 tokens reach the second epoch.
    sae = {"dead_after_tokens": 400, "d_sae": 256} | sae
    job = make_job(train={"batch_size": 200, "checkpoint_every": 10} | train, sae=sae)
    whole = make_trainer(job)
    assert whole.run()
    assert (only(whole).sae.n_tokens_since_fired >= 400).any()
    goes_on_from(10, job, whole, make_trainer, tmp_path)


@pytest.mark.parametrize("train", [{}, {"optimizer": "signum"}, {"optimizer": "muon"}, {"state": "int8"}], ids=str)
def test_a_resumed_run_with_a_skip_connection_is_bit_identical(
    train: dict, activations: Path, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    sae = {"architecture": "jumprelu", "skip": True}
    train = {"batch_size": 200, "checkpoint_every": 10} | train
    job = make_job(data={"target_path": str(activations)}, train=train, sae=sae)
    whole = make_trainer(job)
    assert whole.run()
    assert weights(whole)["/sae.W_skip"].any()
    goes_on_from(10, job, whole, make_trainer, tmp_path)


def goes_on_from(step: int, job: JobConfig, whole: Trainer, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Resume from a checkpoint of `whole`, and check that the final weights, states and files are the same."""
    start = tmp_path / "checkpoints" / f"step-{step:08d}"
    resumed = make_trainer(job, resume_from=start, checkpoints=tmp_path / "c2", output=tmp_path / "o2")
    assert resumed.position.step == step
    assert resumed.run()
    assert resumed.position == whole.position
    reached = weights(resumed)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, reached[name]), name
    last = "step-00000020"
    for file in ("tensors.safetensors", "random.safetensors", "state.json"):
        assert (tmp_path / "checkpoints" / last / file).read_bytes() == (tmp_path / "c2" / last / file).read_bytes()


def test_resampling_is_reported_and_repeated_by_a_resumed_run(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    sae = {"dead_after_tokens": 300, "d_sae": 256, "resample_every_tokens": 800}
    job = make_job(train={"batch_size": 200, "checkpoint_every": 5, "keep_checkpoints": 9}, sae=sae)
    whole = make_trainer(job, kept)
    assert whole.run()
    messages = [message for kind, _, message in kept.events if kind == "resampled"]
    # Latents are resampled every 800 tokens in the first half of the run.
    # Some latents never fire, so resampling already happens after 4 steps.
    assert [int(message.rsplit(" ", 1)[1]) for message in messages] == [4, 8]
    assert all(re.fullmatch(r"[1-9]\d* dead latents resampled at step \d+", message) for message in messages)
    goes_on_from(5, job, whole, make_trainer, tmp_path)


def test_micro_batches_produce_the_same_step_as_one_large_batch(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    large = make_trainer(make_job(train={"batch_size": 240}))
    parts = make_trainer(make_job(train={"batch_size": 60, "accumulate": 4}), checkpoints=tmp_path / "c2")
    for trainer in (large, parts):
        trainer.run()
    for name, tensor in only(large).sae.state_dict().items():
        torch.testing.assert_close(only(parts).sae.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("architecture", slow_except(["topk", "jumprelu"], ARCHITECTURES))
def test_training_steadily_lowers_the_fvu_on_the_sample_bundled_with_the_app(
    architecture: str, make_job: MakeJob, make_trainer: MakeTrainer, kept
) -> None:
    job = make_job(
        data={"path": str(SAMPLE)},
        sae={"architecture": architecture, "d_sae": 768, "k": 32},
        train={"batch_size": 512, "n_steps": 60, "lr": "auto", "log_every": 10},
    )
    make_trainer(job, kept).run()
    fvu = kept.curve("fvu")
    assert fvu[0] > 0.4
    assert fvu[-1] < 0.3
    assert fvu == sorted(fvu, reverse=True)
    # After so few steps, a penalty is still adjusting L0, whereas a fixed k makes L0 exact.
    slack = 0.1 if "topk" in architecture else 16
    assert kept.curve("l0")[-1] == pytest.approx(32, abs=slack)


def test_every_log_interval_has_a_row_for_every_metric(make_job: MakeJob, make_trainer: MakeTrainer, kept) -> None:
    make_trainer(make_job(train={"n_steps": 12, "log_every": 5}), kept).run()
    steps: dict[str, list[int]] = {}
    for row in kept.reported:
        steps.setdefault(row.name, []).append(row.step)
    of_sae = "loss mse auxk fvu explained_variance l0 l1 dead_fraction dense_fraction lr grad_norm skipped_steps"
    of_run = "tokens_per_s data_wait memory_bytes rank_tokens_per_s step_ms busy_ms data_ms rank_memory_bytes"
    names = f"{of_sae} {of_run} outlier_fraction not_finite_fraction"
    at_the_end = ("heldout_fvu", "heldout_l0", "best_heldout_fvu", "best_step", "passes")
    assert steps == {name: [5, 10, 12] for name in names.split()} | {name: [12] for name in at_the_end}


def test_reading_values_a_step_late_produces_the_same_metric_rows(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, activations: Path
) -> None:
    spoil(activations, float("nan"), rows=[1234])
    # A log point may be followed by a step, a save, an evaluation, another log point, or the end of the run.
    train = {"n_steps": 23, "log_every": 3, "eval_every": 6, "checkpoint_every": 7}
    job, rows, events = make_job(train=train, sae={"dead_after_tokens": 400, "d_sae": 256}), [], []
    for late in (False, True):
        trainer = make_trainer(job, kept, checkpoints=tmp_path / f"c{late}", output=tmp_path / f"o{late}")
        trainer._pending.reads_late = late
        trainer.run()
        rows.append([(row.name, row.step, row.value) for row in kept.reported if not re.search(PACE, row.name)])
        events.append(list(kept.events))
        kept.reported.clear()
        kept.events.clear()
    assert len(rows[0]) > 100
    assert rows[0] == rows[1]
    assert [event[0] for event in events[0]] == [event[0] for event in events[1]]


def test_a_metric_row_read_late_is_written_after_the_next_step_or_at_the_end(
    make_job: MakeJob, make_trainer: MakeTrainer, kept
) -> None:
    trainer = make_trainer(make_job(train={"n_steps": 11, "log_every": 4}), kept)
    trainer._pending.reads_late = True
    add, at = kept.rows, []

    def note(rows: Iterable[MetricRow]) -> None:
        rows = list(rows)
        at.extend((row.step, trainer.position.step) for row in rows if row.name == "loss")
        add(rows)

    kept.rows = note
    trainer.run()
    assert at == [(4, 5), (8, 9), (11, 11)]


@pytest.mark.parametrize("log_every", [1, 4])
def test_ranks_that_read_values_late_never_wait_for_the_step_just_queued(
    log_every: int, make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(totals, "HostCopy", Noted)
    # Ranks may wait for evaluations and at the end of the run.
    job = make_job(train={"n_steps": 21, "log_every": log_every, "eval_every": 10}, parallel={"mode": "ddp"})

    def rows_of(late: bool) -> list[tuple[str, int, int, float]]:
        def of_rank(group: Threads) -> None:
            parallel = Parallel(CPU, data=group, world=group)
            folders = {name: tmp_path / f"{name}-{late}-{group.index}" for name in ("checkpoints", "output")}
            trainer = make_trainer(job, kept if group.index == 0 else None, parallel=parallel, **folders)
            trainer._pending.reads_late = late
            HERE.trainer, HERE.waited_at = trainer, set()
            trainer.run()
            assert not late or HERE.waited_at <= {10, 20, 21}

        kept.reported.clear()
        on_all(2, of_rank, timeout_s=60)
        return [(row.name, row.rank, row.step, row.value) for row in kept.reported if not re.search(PACE, row.name)]

    at_once = rows_of(late=False)
    assert len(at_once) > 50
    assert rows_of(late=True) == at_once


def test_a_metric_row_read_late_is_written_even_if_the_next_step_fails(
    make_job: MakeJob, make_trainer: MakeTrainer, kept
) -> None:
    trainer = make_trainer(make_job(train={"n_steps": 11, "log_every": 4}), kept)
    trainer._pending.reads_late = True
    take = trainer._train_step

    def fail() -> None:
        if trainer.position.step == 4:
            raise OSError("the disk is gone")
        take()

    trainer._train_step = fail
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.run()
    assert [row.step for row in kept.reported if row.name == "loss"] == [4]


def test_the_logged_loss_is_the_unexplained_share_of_the_variance(
    make_job: MakeJob, make_trainer: MakeTrainer, kept
) -> None:
    trainer = make_trainer(make_job(sae={"auxk_alpha": 0.0}), kept)
    trainer.run()
    expected = [mse / float(only(trainer).sae.y_variance) for mse in kept.curve("mse")]
    assert kept.curve("loss") == pytest.approx(expected, rel=1e-4)


def test_decoder_rows_have_unit_norm_after_a_run(make_job: MakeJob, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(make_job())
    trainer.run()
    torch.testing.assert_close(only(trainer).sae.W_dec.detach().norm(dim=1), torch.ones(64))


def test_a_stopped_run_ends_after_the_next_step_with_a_checkpoint_and_an_sae(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    stop = threading.Event()
    stop.set()
    trainer = make_trainer(make_job(train={"n_steps": 1000}), stop=stop)
    assert not trainer.run()
    assert trainer.position.step == 1
    assert (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").exists()
    assert (tmp_path / "sae" / "cfg.json").exists()


def spoil(folder: Path, value: float, rows: Iterable[int]) -> None:
    x = load_file(folder / "a.safetensors")["activations"]
    x[list(rows), 3] = value
    save_file({"activations": x}, folder / "a.safetensors")


@pytest.mark.parametrize("max_norm", [0.0, 10.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e19, 3e38])
def test_rows_outside_the_fp32_range_are_replaced_counted_and_named(
    value: float, max_norm: float, make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path
) -> None:
    x = load_file(activations / "a.safetensors")["activations"].float()
    # The ten rows are consecutive, so a batch of adjacent rows would contain several of them.
    x[1234:1244, 3] = value
    save_file({"activations": x}, activations / "a.safetensors")
    data = {"held_out_tokens": 0, "max_norm": max_norm}
    trainer = make_trainer(make_job(train={"n_steps": 22, "log_every": 2}, data=data), kept)
    assert trainer.run()
    assert sum(kept.curve("skipped_steps")) == 0
    assert kept.curve("fvu")[-1] < kept.curve("fvu")[0]
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())
    left_out = max(kept.curve("not_finite_fraction")[-1], kept.curve("outlier_fraction")[-1])
    assert 0.001 < left_out < 0.01
    messages = [message for kind, level, message in kept.events if kind == "not_finite" and level == "warning"]
    # A row with a norm of 1e19 is finite, so it is reported as an outlier rather than a bad row.
    assert len(messages) == (value != 1e19)
    assert all("(10 of 3,000) are not finite" in one and "row 1234 of a.safetensors" in one for one in messages)


def test_outlier_rows_are_reported_and_do_not_affect_measurements(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path
) -> None:
    x = load_file(activations / "a.safetensors")["activations"]
    # Like the first tokens of texts, these rows all have the same direction.
    # Rows like these are easy to learn, and account for most of the variance.
    x[::50] = 170 * x.float().norm(dim=1).median() * torch.nn.functional.normalize(torch.ones(1, x.shape[1]))
    x[7::150, 5] = torch.nan
    save_file({"activations": x}, activations / "a.safetensors")
    trainer = make_trainer(make_job(train={"n_steps": 60}, data={"held_out_tokens": 1000}), kept)
    assert trainer.run()
    ((_, level, message),) = [event for event in kept.events if event[0] == "outliers"]
    assert level == "warning"
    assert "data.max_norm" in message
    # Outliers are reported for the first sample, because a run may end before its first log interval.
    assert " % of a sample of 2,000 rows have" in message
    assert 0.01 < kept.curve("outlier_fraction")[-1] < 0.03
    rows = torch.cat([rows for rows, _ in trainer.data.of_hook(0).held_out(128)]).float()
    norms = rows.norm(dim=1)
    ordinary = rows[norms < 100 * norms.nanmedian()]
    n_bad = int(norms.isnan().sum())
    assert 0 < n_bad < len(rows) - len(ordinary) < 0.1 * len(rows)
    ((_, _, left_out),) = [event for event in kept.events if event[0] == "heldout_rows"]
    n_outliers = len(rows) - len(ordinary) - n_bad
    assert left_out.endswith(f" leave out {n_bad} not finite and {n_outliers} with a huge norm")
    learner = only(trainer)
    with torch.no_grad(), learner.evaluating():
        target = ordinary * learner.sae.y_scale
        left = (learner.forward(ordinary * learner.sae.x_scale, target).x_hat - target).double().square().sum()
    spread = (target - target.mean(0)).double().square().sum()
    assert kept.curve("heldout_fvu")[-1] == pytest.approx(float(left / spread), rel=0.01)


def test_dimensions_accounting_for_most_of_the_variance_are_reported_at_the_start(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path
) -> None:
    make_trainer(make_job(), kept)
    assert not [event for event in kept.events if event[0] == "heavy_dimensions"]
    x = load_file(activations / "a.safetensors")["activations"]
    x[:, 3] *= 1000
    save_file({"activations": x}, activations / "a.safetensors")
    make_trainer(make_job(data={"max_norm": 0.0}), kept)
    ((_, level, message),) = [event for event in kept.events if event[0] == "heavy_dimensions"]
    assert level == "warning"
    told = "1 dimension of 16 (number 3) accounts for 100.0 % of the variance; FVU mostly measures it: "
    assert message.startswith(told)
    assert "data.drop_dimensions = [3]" in message


def test_a_skipped_step_changes_no_state(make_job: MakeJob, make_trainer: MakeTrainer, activations: Path) -> None:
    trainer = make_trainer(make_job())
    learner = only(trainer)
    good, bad = torch.randn(128, 16), torch.randn(128, 16)
    bad[7, 3] = float("nan")
    for x in (good, good):
        take_alone(learner, 0, x)
    before = {name: tensor.clone() for name, tensor in learner.state.tensors()}
    take_alone(learner, 2, bad)
    for name, tensor in learner.state.tensors():
        # Rows of W_dec are normalised once more, and rounding may change their last digits.
        torch.testing.assert_close(tensor, before[name], rtol=1e-6 if name == "sae.W_dec" else 0, atol=0, msg=name)
    assert skips(learner) == (1, 1, 0)


def test_steps_skipped_for_a_buffer_overflow_are_not_reported_as_bad_gradients(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(make_job(sae={"architecture": "standard"}, train={"n_steps": 20, "log_every": 20}), kept)
    # On the GPU code path, a buffer for a tenth of the expected latents always overflows.
    monkeypatch.setattr(latent_capacity, "DENSE", 1)
    monkeypatch.setattr(latent_capacity, "MARGIN", 0.1)
    monkeypatch.setattr(base, "above", only(trainer).sae._buffer_sizer.above)
    assert trainer.run()
    ((_, level, message),) = [event for event in kept.events if event[0] == "skipped"]
    assert level == "warning"
    # Every fifth step overflows, because each guess for the buffer size requires the counts from four complete steps.
    assert message.startswith("4 steps skipped up to step 20: many more latents were active than in earlier steps")
    assert kept.curve("skipped_steps") == [4]
    assert kept.curve("fvu")[-1] > 0


def test_a_run_with_many_non_finite_rows_fails_and_names_one_of_them(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(activations, float("nan"), rows=range(0, 1700, 20))
    # The sample is so small that it contains no bad row.
    monkeypatch.setattr("trainer.activations.training_data.SAMPLE_TOKENS", 2)
    trainer = make_trainer(make_job(train={"n_steps": 100, "log_every": 10}))
    with pytest.raises(
        UserError, match=r"^data\.path: .* in row \d+ of a\.safetensors \(\d+ of .* rows read so far are not finite\);"
    ):
        trainer.run()
    assert not (tmp_path / "sae").exists()


def test_the_first_bad_row_at_each_hook_is_named(kept) -> None:
    report = Report(kept, is_main=True, labels=[""])
    bad_rows = BadRows(SimpleNamespace(bad_row=lambda *_: "row 7 of b"), report, 10)
    bad_rows.sampled(1, 100, "row 3 of a", "a")
    at = [Position(step, 10 * step) for step in (0, 5)]
    bad_rows.look_at(LeftOut(0, 2, 0, 50), *at, "a")
    bad_rows.look_at(LeftOut(0, 2, 0, 50), *at, "b")
    messages = [message for kind, _, message in kept.events if kind == "not_finite"]
    assert [message.rpartition(": ")[2] for message in messages] == ["row 3 of a", "row 7 of b"]
    with pytest.raises(UserError, match=r"^data\.path: row 7 of b \(50 of 50 rows"):
        bad_rows.look_at(LeftOut(0, 50, 0, 50), *at, "b")


def test_many_non_finite_rows_in_the_first_sample_are_refused_before_any_step(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path
) -> None:
    spoil(activations, float("nan"), rows=range(1000))
    with pytest.raises(UserError, match=r"^data\.path: .* contains NaN or infinite values in row 0 of a\.safetensors"):
        make_trainer(make_job(data={"held_out_tokens": 0}))


def test_the_error_for_a_diverging_run_blames_the_learning_rate_rather_than_the_data(
    make_job: MakeJob, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError, match=r"^train\.lr: the gradient is not finite, \d+ steps in a row up to step \d+"):
        make_trainer(make_job(train={"lr": 9e18, "n_steps": 200, "grad_clip": 0})).run()


def test_each_sae_in_a_sweep_learns_the_same_as_if_trained_alone(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    sweep = make_trainer(make_job(sae={"k": [2, 4], "d_sae": [32, 64]}), kept)
    assert sweep.run()
    alone = make_trainer(make_job(sae={"k": 4, "d_sae": 32}), checkpoints=tmp_path / "c2", output=tmp_path / "o2")
    alone.run()
    label = "k=4,d_sae=32"
    assert list(sweep.learners) == ["k=2,d_sae=32", "k=2,d_sae=64", label, "k=4,d_sae=64"]
    for name, tensor in only(alone).state.tensors():
        assert torch.equal(tensor, dict(sweep.learners[label].state.tensors())[name]), name
    assert len(kept.curve(f"fvu@{label}")) == len(kept.curve("fvu@k=2,d_sae=64")) == 4
    assert kept.curve("fvu") == kept.curve("fvu@k=2,d_sae=32")
    assert kept.curve("l0@k=2,d_sae=64")[-1] <= 2 < kept.curve(f"l0@{label}")[-1]
    assert {folder.name for folder in (tmp_path / "sae").iterdir()} == set(sweep.learners)


def test_a_diverging_sae_does_not_stop_the_other_saes_in_a_sweep(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    trainer = make_trainer(make_job(train={"lr": [3e-3, 9e17]}), kept)
    assert trainer.run()
    (given_up,) = [message for kind, _, message in kept.events if kind == "given_up"]
    assert given_up.startswith("train.lr: the gradient is not finite")
    assert given_up.endswith("choose a lower rate (lr=9e+17)")
    assert [folder.name for folder in (tmp_path / "sae").iterdir()] == ["lr=0.003"]
    with pytest.raises(UserError, match=r"^train\.lr: the gradient is not finite"):
        make_trainer(make_job(train={"lr": [8e17, 9e17]}), checkpoints=tmp_path / "c2").run()


def test_a_run_reports_that_a_penalty_has_not_reached_the_requested_l0(
    make_job: MakeJob, make_trainer: MakeTrainer, kept
) -> None:
    # Three large encoder steps are too few for the thresholds to adapt.
    make_trainer(make_job(sae={"architecture": "jumprelu", "k": 2}, train={"n_steps": 3, "lr": 0.1}), kept).run()
    (missed,) = [(level, message) for kind, level, message in kept.events if kind == "missed_l0"]
    assert missed[0] == "warning"
    assert re.match(r"L0 is \d+\.\d \(2 asked, [+-]\d+%\): .*to get closer, train longer", missed[1])


def test_a_resumed_sweep_is_bit_identical(make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    job = make_job(sae={"k": [2, 4]}, train={"seed": [0, 1], "checkpoint_every": 10})
    whole = make_trainer(job)
    whole.run()
    resumed = make_trainer(job, resume_from=tmp_path / "checkpoints" / "step-00000010", output=tmp_path / "o2")
    resumed.run()
    reached = weights(resumed)
    assert all(torch.equal(tensor, reached[name]) for name, tensor in weights(whole).items())


def test_a_resumed_run_reports_its_position_before_its_first_step(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, monkeypatch, tmp_path: Path
) -> None:
    job = make_job(train={"checkpoint_every": 10})
    make_trainer(job).run()
    indices: list[tuple[str, int, int]] = []
    monkeypatch.setattr(kept, "heartbeat", lambda *place: indices.append(place))
    make_trainer(job, kept, resume_from=tmp_path / "checkpoints" / "step-00000010", output=tmp_path / "o2")
    assert indices == [("preparing", 10, 1280)]


@pytest.mark.parametrize("at_once", [60, evaluate.MOST_TOKENS])
def test_the_held_out_fvu_equals_that_of_the_exported_sae(
    at_once: int,
    make_job: MakeJob,
    make_trainer: MakeTrainer,
    kept,
    activations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "MOST_TOKENS", at_once)
    trainer = make_trainer(make_job(data={"held_out_tokens": 500}, train={"eval_every": 7}), kept)
    trainer.run()
    assert [row.step for row in kept.reported if row.name == "heldout_fvu"] == [7, 14, 20]
    shards = [load_file(activations / name)["activations"].double() for name in ("a.safetensors", "b.safetensors")]
    x = torch.cat(shards)[trainer.data.split.held_out]
    weights = {name: value.double() for name, value in load_file(tmp_path / "sae" / "sae_weights.safetensors").items()}
    pre_acts = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    values, indices = pre_acts.topk(4, dim=1)
    x_hat = torch.zeros_like(pre_acts).scatter(1, indices, values.relu()) @ weights["W_dec"] + weights["b_dec"]
    fvu = (x - x_hat).square().sum() / (x - x.mean(dim=0)).square().sum()
    assert kept.curve("heldout_fvu")[-1] == pytest.approx(float(fvu), rel=1e-4)


def test_evaluation_batches_shrink_as_d_sae_grows() -> None:
    assert [evaluate.most_tokens(d_sae) for d_sae in (24_576, 65_536, 2**20, 2**32)] == [8192, 8192, 2047, 1]


def test_a_run_that_is_already_complete_only_exports_its_sae(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    job = make_job()
    make_trainer(job).run()
    again = make_trainer(job, resume_from=tmp_path / "checkpoints" / "step-00000020", output=tmp_path / "again")
    assert again.run()
    assert again.position.step == 20
    assert (tmp_path / "again" / "cfg.json").exists()


@pytest.mark.parametrize("checkpoint_every", [0, 20])
def test_the_sae_is_exported_even_if_the_last_checkpoint_cannot_be_written(
    checkpoint_every: int, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trainer = make_trainer(make_job(train={"checkpoint_every": checkpoint_every}))
    with pytest.raises(UserError, match=str(tmp_path / "checkpoints")):
        trainer.run()
    assert trainer.position.step == 20
    exported = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    assert torch.equal(exported["W_dec"], only(trainer).sae.W_dec.detach())


def test_training_continues_if_an_intermediate_checkpoint_cannot_be_written(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.write_text("in the way")
    add = kept.rows

    def clear_the_way(rows: Iterable[MetricRow]) -> None:
        rows = list(rows)
        if any(row.step == 15 for row in rows):
            checkpoints.unlink(missing_ok=True)
        add(rows)

    kept.rows = clear_the_way
    assert make_trainer(make_job(train={"checkpoint_every": 5}), kept).run()
    failed, saved, last = [event for event in kept.events if event[0] == "checkpoint"]
    assert failed[1] == "error"
    assert str(checkpoints) in failed[2]
    assert failed[2].endswith("training continues until the next checkpoint is due")
    assert saved[1:] == ("info", "checkpoint saved at step 15, the first after 2 that could not be written")
    assert last[1:] == ("info", "checkpoint saved at step 20")
    assert load(checkpoints)[1].step == 20


def test_all_speeds_logged_by_a_run_are_similar(make_job: MakeJob, make_trainer: MakeTrainer, kept) -> None:
    job = make_job(sae={"d_sae": 1024}, train={"batch_size": 512, "n_steps": 41, "log_every": 10})
    make_trainer(job, kept).run()
    for name in ("tokens_per_s", "rank_tokens_per_s", "step_ms"):
        rates = kept.curve(name)
        median = sorted(rates)[len(rates) // 2]
        assert len(rates) == 5
        assert all(median / 5 < rate < 5 * median for rate in rates), (name, rates)


def test_a_run_that_waits_for_its_data_warns_once_and_suggests_a_remedy(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LASTING_S", 0.1)
    read = IndexedData.read

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(IndexedData, "read", slowly)
    make_trainer(make_job(train={"n_steps": 20, "log_every": 4}), kept).run()
    ((_, level, message),) = [event for event in kept.events if event[0] == "data_wait"]
    assert level == "warning"
    assert re.search(r"^training waits for data \d+% of the time: copy the rows of data.path to a local disk", message)


def test_the_log_lists_the_sae_every_metric_row_and_all_saved_files(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(make_job()).run()
    lines = capsys.readouterr().out.splitlines()
    # The log starts with lines about the held-out rows and about copies among these random rows.
    begin = next(number for number, line in enumerate(lines) if "rank 0 of 1" in line)
    first, *rows, heldout, checkpoint, sae, last = lines[begin:]
    time_stamp = r"\d\d:\d\d:\d\d  "
    assert re.fullmatch(time_stamp + r"rank 0 of 1 on CPU, .*d_in 16, d_sae 64, .*20 steps × 128 tokens, .*", first)
    pattern = r"step 20/20  loss 0\.\d{4}  batch FVU 0\.\d{4}  batch L0 \d\.\d  dead .*%  lr \d\.\de-\d\d  [\d,]+ tok/s"
    assert re.fullmatch(time_stamp + pattern, rows[-1])
    assert len(rows) == 4
    assert re.fullmatch(time_stamp + r"step 20  held-out FVU 0\.\d{4}  held-out L0 \d\.\d", heldout)
    assert checkpoint.endswith(str(tmp_path / "checkpoints" / "step-00000020"))
    assert sae.endswith(str(tmp_path / "sae"))
    assert last.endswith("finished at step 20/20")
