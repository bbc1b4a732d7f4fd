from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.contract.config import JobConfig
from trainer.contract.problems import UserError
from trainer.loop import Trainer

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.sae.state_dict().items()}


def test_twenty_steps_are_bit_for_bit_ten_a_checkpoint_and_ten_more(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    # A small dead_after_tokens, so that AuxK and the dead counters matter; 20 × 200 tokens reach a second epoch.
    job = make_job(train={"batch_size": 200, "checkpoint_every": 10}, sae={"dead_after_tokens": 400, "d_sae": 256})
    whole = make_trainer(job)
    assert whole.run()
    assert (whole.sae.n_tokens_since_fired >= 400).any()

    resumed = make_trainer(
        job, resume_from=tmp_path / "checkpoints" / "step-00000010", checkpoints=tmp_path / "c2", output=tmp_path / "o2"
    )
    assert resumed.position.step == 10
    assert resumed.run()
    assert resumed.position == whole.position
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, resumed.sae.state_dict()[name]), name
    last = "step-00000020"
    for file in ("optimizer.safetensors", "weights.safetensors", "state.json"):
        assert (tmp_path / "checkpoints" / last / file).read_bytes() == (tmp_path / "c2" / last / file).read_bytes()


def test_micro_batches_give_the_step_of_one_large_batch(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    large = make_trainer(make_job(train={"batch_size": 240}))
    parts = make_trainer(make_job(train={"batch_size": 60, "accumulate": 4}), checkpoints=tmp_path / "c2")
    for trainer in (large, parts):
        trainer.run()
    for name, tensor in weights(large).items():
        torch.testing.assert_close(parts.sae.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_training_explains_most_of_the_variance_of_the_sample_shipped_with_the_app(
    make_job: MakeJob, make_trainer: MakeTrainer, kept
) -> None:
    job = make_job(
        data={"path": str(SAMPLE)},
        sae={"d_sae": 768, "k": 32},
        train={"batch_size": 512, "n_steps": 40, "lr": "auto"},
    )
    make_trainer(job, kept).run()
    fvu = kept.curve("fvu")
    assert fvu[0] > 0.4
    assert fvu[-1] < 0.3
    assert fvu == sorted(fvu, reverse=True)
    assert kept.curve("l0")[-1] == pytest.approx(32, abs=0.1)


def test_every_log_interval_has_a_row_of_every_metric(make_job: MakeJob, make_trainer: MakeTrainer, kept) -> None:
    make_trainer(make_job(train={"n_steps": 12, "log_every": 5}), kept).run()
    steps: dict[str, list[int]] = {}
    for row in kept.reported:
        steps.setdefault(row.name, []).append(row.step)
    names = "loss mse auxk fvu l0 dead_fraction tokens_per_s lr grad_norm rank_tokens_per_s step_ms"
    assert steps == {name: [5, 10, 12] for name in names.split()}


def test_the_logged_loss_is_the_share_of_variance_left(make_job: MakeJob, make_trainer: MakeTrainer, kept) -> None:
    trainer = make_trainer(make_job(sae={"auxk_alpha": 0.0}), kept)
    trainer.run()
    expected = [mse / float(trainer.sae.x_variance) for mse in kept.curve("mse")]
    assert kept.curve("loss") == pytest.approx(expected, rel=1e-4)


def test_decoder_rows_have_length_one_after_every_run(make_job: MakeJob, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(make_job())
    trainer.run()
    torch.testing.assert_close(trainer.sae.W_dec.detach().norm(dim=1), torch.ones(64))


def test_a_stop_ends_at_the_next_step_with_a_checkpoint_and_an_sae(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    stop = threading.Event()
    stop.set()
    trainer = make_trainer(make_job(train={"n_steps": 1000}), stop=stop)
    assert not trainer.run()
    assert trainer.position.step == 1
    assert (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").exists()
    assert (tmp_path / "sae" / "cfg.json").exists()


def spoil(folder: Path, value: float, row: int) -> None:
    x = load_file(folder / "a.safetensors")["activations"]
    x[row, 3] = value
    save_file({"activations": x}, folder / "a.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_nan_or_infinity_in_the_data_ends_the_run_with_the_name_of_the_setting(
    value: float, make_job: MakeJob, make_trainer: MakeTrainer, activations: Path
) -> None:
    spoil(activations, value, row=1234)
    with pytest.raises(UserError, match=r"^data\.path: .* holds NaN or infinite values in row 1234 of a\.safetensors"):
        make_trainer(make_job())


def test_a_nan_outside_the_first_sample_is_found_within_a_log_interval_and_no_checkpoint_is_spoilt(
    make_job: MakeJob, make_trainer: MakeTrainer, activations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(activations, float("nan"), row=1234)
    monkeypatch.setattr("trainer.loop.SAMPLE_TOKENS", 8)
    trainer = make_trainer(make_job(train={"n_steps": 100, "checkpoint_every": 1}))
    with pytest.raises(UserError, match=r"^data\.path: .* in row 1234 of a\.safetensors;"):
        trainer.run()
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        assert load_file(folder / "weights.safetensors")["W_enc"].isfinite().all()


def test_a_loss_that_explodes_blames_the_rate_and_not_the_data(make_job: MakeJob, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"^train\.lr: the loss is not finite at step \d+"):
        make_trainer(make_job(train={"lr": 9e18, "n_steps": 200, "grad_clip": 0})).run()


def test_a_run_of_finished_length_is_only_exported(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    job = make_job()
    make_trainer(job).run()
    again = make_trainer(job, resume_from=tmp_path / "checkpoints" / "step-00000020", output=tmp_path / "again")
    assert again.run()
    assert again.position.step == 20
    assert (tmp_path / "again" / "cfg.json").exists()


@pytest.mark.parametrize("checkpoint_every", [0, 20])
def test_a_last_checkpoint_that_cannot_be_written_does_not_lose_the_sae(
    checkpoint_every: int, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trainer = make_trainer(make_job(train={"checkpoint_every": checkpoint_every}))
    with pytest.raises(UserError, match=str(tmp_path / "checkpoints")):
        trainer.run()
    assert trainer.position.step == 20
    exported = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    assert torch.equal(exported["W_dec"], trainer.sae.W_dec.detach())


def test_no_row_of_the_speed_is_far_from_the_others(make_job: MakeJob, make_trainer: MakeTrainer, kept) -> None:
    job = make_job(sae={"d_sae": 1024}, train={"batch_size": 512, "n_steps": 41, "log_every": 10})
    make_trainer(job, kept).run()
    for name in ("tokens_per_s", "rank_tokens_per_s", "step_ms"):
        rates = kept.curve(name)
        median = sorted(rates)[len(rates) // 2]
        assert len(rates) == 5
        assert all(median / 5 < rate < 5 * median for rate in rates), (name, rates)


def test_the_log_says_what_is_trained_and_every_row_and_what_is_saved(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(make_job()).run()
    first, *rows, checkpoint, sae, last = capsys.readouterr().out.splitlines()
    time_stamp = r"\d\d:\d\d:\d\d  "
    assert re.fullmatch(time_stamp + r"rank 0 of 1 on CPU, .*d_in 16, d_sae 64, .*20 steps × 128 tokens, .*", first)
    pattern = r"step 20/20  loss 0\.\d{4}  fvu 0\.\d{4}  l0 \d\.\d  dead .*%  lr \d\.\de-\d\d  [\d,]+ tok/s"
    assert re.fullmatch(time_stamp + pattern, rows[-1])
    assert len(rows) == 4
    assert checkpoint.endswith(str(tmp_path / "checkpoints" / "step-00000020"))
    assert sae.endswith(str(tmp_path / "sae"))
    assert last.endswith("finished at step 20/20")
