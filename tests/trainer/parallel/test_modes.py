"""Tests that training in every mode produces the same result as one process on the same global batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.combinations import slow_except

from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import SeriesReader

MakeJob = Callable[..., JobConfig]
BATCH = 240
NAMES = (
    "loss",
    "mse",
    "fvu",
    "explained_variance",
    "l0",
    "l1",
    "dead_fraction",
    "dense_fraction",
    "grad_norm",
    "heldout_fvu",
    "heldout_l0",
)
# Maps each mode to the number of ranks, its settings, and the number of ranks with different tokens.
MODES = {
    "dp-2": (2, {"mode": "dp"}, 2),
    "ddp-2-not-dealt": (2, {"mode": "ddp", "zero": False}, 2),
    "hybrid-4-not-dealt": (4, {"mode": "hybrid", "zero": False}, 2),
    "ddp-2-uneven": (2, {"mode": "ddp", "shares": "3:1"}, 2),
    "tensor-3-uneven": (3, {"mode": "tensor", "shares": "1:4:2"}, 1),
    "hybrid-4-uneven": (4, {"mode": "hybrid", "shares": "1:2:2:4"}, 2),
    "auto-2": (2, {}, 2),
    "ddp-2": (2, {"mode": "ddp"}, 2),
    "tensor-2": (2, {"mode": "tensor"}, 1),
    "tensor-3": (3, {"mode": "tensor"}, 1),
    "hybrid-4": (4, {"mode": "hybrid"}, 2),
}
# `dead_after_tokens` is small so that AuxK is active and the dead-latent counters affect the result.
SAE = {"dead_after_tokens": 960, "d_sae": 128}
# With these held-out rows, some latents die early enough to be resampled.
ROWS = {"hold_out": "rows"}


def curve(run_dir: Path, name: str) -> list[float | None]:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return [point.value for point in reader.points(name)]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run exported. TopK transcoders are exported in sparsify's format."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def same_sae(run_dir: Path, kept: Any, expected: Path, label: str) -> None:
    """Check that all metrics have the same curves, and that the final weights are the same."""
    at = f"@{label}" if label else ""
    for name in NAMES:
        assert curve(run_dir, name + at) == pytest.approx(kept.curve(name + at), rel=1e-3, abs=1e-5), name + at
    exported, wanted = (weights_in(folder / label) for folder in (run_dir / "sae", expected))
    assert exported.keys() == wanted.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-3, msg=name + at)


@pytest.mark.parametrize("mode", slow_except(["dp-2", "tensor-2", "hybrid-4-uneven"], MODES))
def test_with_every_architecture_all_modes_learn_the_same_as_a_single_process(
    mode: str, make_job: MakeJob, make_trainer: Callable, start_ranks: Callable, kept: Any, tmp_path: Path
) -> None:
    n_ranks, parallel, n_data = MODES[mode]
    sae = SAE | {"architecture": list(ARCHITECTURES)}
    alone = make_trainer(make_job(sae=sae, train={"batch_size": BATCH}), kept)
    alone.run()
    ranks = start_ranks(make_job(sae=sae, train={"batch_size": BATCH // n_data}, parallel=parallel), n_ranks)
    assert set(ranks.wait()) == {EXIT_FINISHED}
    for label in alone.learners:
        same_sae(ranks.spec.run_dir, kept, tmp_path / "sae", label)
    # AuxK is active, so the ranks have also exchanged candidates among dead latents.
    assert max(kept.curve("auxk@architecture=topk")) > 0


@pytest.mark.parametrize(
    "mode",
    slow_except(
        ["ddp-2-uneven", "sweep-3"],
        ["ddp-2-not-dealt", "ddp-2-uneven", "tensor-3-uneven", "hybrid-4", "dp-2", "sweep-3"],
    ),
)
def test_all_modes_learn_the_same_skip_connection_as_a_single_process(
    mode: str,
    make_job: MakeJob,
    make_trainer: Callable,
    start_ranks: Callable,
    kept: Any,
    activations: Path,
    tmp_path: Path,
) -> None:
    n_ranks, parallel, n_data = (MODES | {"sweep-3": (3, {"mode": "sweep"}, 1)})[mode]
    transcoders = [name for name, entry in ARCHITECTURES.items() if entry.transcodes != "no"]
    sae = SAE | {"architecture": transcoders, "skip": True, "resample_every_tokens": 960}
    data = {"target_path": str(activations)}
    alone = make_trainer(make_job(data=data, sae=sae, train={"batch_size": BATCH}), kept)
    alone.run()
    job = make_job(data=data, sae=sae, train={"batch_size": BATCH // n_data}, parallel=parallel)
    ranks = start_ranks(job, n_ranks)
    assert set(ranks.wait()) == {EXIT_FINISHED}
    for label in alone.learners:
        same_sae(ranks.spec.run_dir, kept, tmp_path / "sae", label)


@pytest.mark.slow
def test_a_checkpoint_with_a_skip_connection_resumes_in_another_mode(
    make_job: MakeJob, make_trainer: Callable, start_ranks: Callable, activations: Path, tmp_path: Path
) -> None:
    sae = SAE | {"architecture": "batch_topk", "skip": True}
    train, data = {"batch_size": BATCH, "checkpoint_every": 10}, {"target_path": str(activations)}
    make_trainer(make_job(data=data, sae=sae, train=train)).run()
    expected = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    # Each checkpoint is resumed in the next mode: one process, four ranks in hybrid mode, three ranks, and two
    # replicas.
    start = tmp_path / "checkpoints" / "step-00000010"
    for mode, n_ranks, batch_size in (("hybrid", 4, BATCH // 2), ("tensor", 3, BATCH), ("ddp", 2, BATCH // 2)):
        own = train | {"batch_size": batch_size}
        job = make_job(data=data, sae=sae, train=own, parallel={"mode": mode})
        ranks = start_ranks(job, n_ranks, run_dir=tmp_path / mode, resume_from=start)
        assert ranks.wait() == [EXIT_FINISHED] * n_ranks
        alike(load_file(ranks.spec.run_dir / "sae" / "sae_weights.safetensors"), expected)
        whole = start_ranks(job, n_ranks, run_dir=tmp_path / f"{mode}-whole")
        assert whole.wait() == [EXIT_FINISHED] * n_ranks
        start = whole.spec.run_dir / "checkpoints" / "step-00000010"


@pytest.mark.parametrize(
    ("sae", "train"),
    [
        ({"resample_every_tokens": 960}, {"optimizer": "signum"}),
        ({"architecture": "gated", "resample_every_tokens": 960}, {"accumulate": 2}),
        ({}, {"state": "int8", "grad_clip": 0.01}),
    ],
    ids=["resampled-signum", "resampled-gated-accumulated", "int8-clipped"],
)
def test_sharded_latents_are_resampled_clipped_and_quantised_like_unsharded_ones(
    sae: dict,
    train: dict,
    make_job: MakeJob,
    make_trainer: Callable,
    start_ranks: Callable,
    kept: Any,
    tmp_path: Path,
) -> None:
    make_trainer(make_job(data=ROWS, sae=SAE | sae, train={"batch_size": BATCH} | train), kept).run()
    assert ("resample_every_tokens" in sae) == any(kind == "resampled" for kind, _, _ in kept.events)
    job = make_job(data=ROWS, sae=SAE | sae, train={"batch_size": BATCH} | train, parallel={"mode": "tensor"})
    ranks = start_ranks(job, 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    same_sae(ranks.spec.run_dir, kept, tmp_path / "sae", "")


def test_gradients_sent_in_16_bits_lead_to_nearly_the_same_losses(
    make_job: MakeJob, make_trainer: Callable, start_ranks: Callable, kept: Any
) -> None:
    make_trainer(make_job(sae=SAE, train={"batch_size": BATCH}), kept).run()
    job = make_job(sae=SAE, train={"batch_size": BATCH // 2}, parallel={"mode": "ddp", "gradients": "bf16"})
    ranks = start_ranks(job, 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    losses = curve(ranks.spec.run_dir, "loss")
    assert losses == pytest.approx(kept.curve("loss"), rel=0.02)
    assert losses != pytest.approx(kept.curve("loss"), rel=1e-6)


@pytest.mark.parametrize(
    "how",
    slow_except(
        [("tensor", 2, {}), ("ddp", 2, {})],
        [
            ("tensor", 2, {}),
            ("hybrid", 4, {}),
            ("ddp", 2, {}),
            ("ddp", 2, {"zero": False}),
            ("hybrid", 4, {"zero": True}),
        ],
    ),
    ids=str,
)
def test_a_checkpoint_resumes_in_another_mode_with_the_same_result(
    how: tuple[str, int, dict],
    make_job: MakeJob,
    make_trainer: Callable,
    start_ranks: Callable,
    kept: Any,
    tmp_path: Path,
) -> None:
    mode, n_ranks, parallel = how
    train = {"batch_size": BATCH, "checkpoint_every": 10, "state": "int8"}
    alone = make_job(sae=SAE, train=train)
    make_trainer(alone, kept).run()
    own_tokens = {"batch_size": BATCH // 2} if mode != "tensor" else {}
    job = make_job(sae=SAE, train=train | own_tokens, parallel={"mode": mode} | parallel)

    # Several ranks resume from a checkpoint saved by one process.
    from_one = tmp_path / "checkpoints" / "step-00000010"
    ranks = start_ranks(job, n_ranks, resume_from=from_one)
    assert ranks.wait() == [EXIT_FINISHED] * n_ranks
    expected = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    alike(load_file(ranks.spec.run_dir / "sae" / "sae_weights.safetensors"), expected)
    # The checkpoints saved by several ranks and by one process are equal, tensor by tensor.
    last = "step-00000020"
    one, several = (folder / "checkpoints" / last for folder in (tmp_path, ranks.spec.run_dir))
    alike(load_file(several / "tensors.safetensors"), load_file(one / "tensors.safetensors"), atol=2.0)

    # One process resumes from a checkpoint saved by several ranks.
    whole = start_ranks(job, n_ranks, run_dir=tmp_path / "again")
    assert whole.wait() == [EXIT_FINISHED] * n_ranks
    start = whole.spec.run_dir / "checkpoints" / "step-00000010"
    make_trainer(alone, resume_from=start, checkpoints=tmp_path / "c3", output=tmp_path / "o3").run()
    alike(load_file(tmp_path / "o3" / "sae_weights.safetensors"), expected)


def alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-3) -> None:
    """Check that states are the same. `atol` allows an 8-bit moment to be rounded to an adjacent code."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        slack = atol if "optimizer" in name else 1e-3
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=1e-3, atol=slack, msg=name)


def test_saes_in_a_sweep_spread_over_ranks_learn_the_same_as_in_a_single_process(
    make_job: MakeJob, make_trainer: Callable, start_ranks: Callable, kept: Any, tmp_path: Path
) -> None:
    sae = SAE | {"architecture": [*ARCHITECTURES], "resample_every_tokens": 960}
    train = {"batch_size": BATCH, "checkpoint_every": 10, "checkpoint_every_minutes": 0}
    alone = make_trainer(make_job(sae=sae, train=train), kept)
    alone.run()
    parallel = {"mode": "sweep"}
    ranks = start_ranks(make_job(sae=sae, train=train, parallel=parallel), 3)
    assert ranks.wait() == [EXIT_FINISHED] * 3
    for label in alone.learners:
        same_sae(ranks.spec.run_dir, kept, tmp_path / "sae", label)
    with contextlib.closing(SeriesReader(ranks.spec.run_dir / "metrics.db")) as reader:
        messages = sorted(event.message for event in reader.events() if event.kind == "resampled")
    assert messages == sorted(message for kind, _, message in kept.events if kind == "resampled")
    # One checkpoint contains all SAEs, and a single process can resume from it.
    start = ranks.spec.run_dir / "checkpoints" / "step-00000010"
    one = load_file(tmp_path / "checkpoints" / "step-00000010" / "tensors.safetensors")
    alike(load_file(start / "tensors.safetensors"), one)
    job = make_job(sae=sae, train=train)
    make_trainer(job, resume_from=start, checkpoints=tmp_path / "c3", output=tmp_path / "o3").run()
    for label in alone.learners:
        weights, wanted = (load_file(tmp_path / out / label / "sae_weights.safetensors") for out in ("o3", "sae"))
        alike(weights, wanted)


def test_a_diverging_sae_in_a_sweep_over_ranks_does_not_stop_the_other_saes(
    make_job: MakeJob, start_ranks: Callable, tmp_path: Path
) -> None:
    train = {"optimizer": "signum", "grad_clip": 0.0, "lr": [1e-3, 1e15], "n_steps": 40}
    job = make_job(train=train, parallel={"mode": "sweep"})
    ranks = start_ranks(job, 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    assert sorted(file.name for file in (ranks.spec.run_dir / "sae").iterdir()) == ["lr=0.001"]
    with contextlib.closing(SeriesReader(ranks.spec.run_dir / "metrics.db")) as reader:
        kinds = [event.kind for event in reader.events()]
    assert kinds.count("given_up") == kinds.count("pace") == 1


def test_all_ranks_fail_with_the_reason_if_every_sae_in_a_sweep_diverges(
    make_job: MakeJob, start_ranks: Callable
) -> None:
    train = {"optimizer": "signum", "grad_clip": 0.0, "lr": [1e15, 2e15], "n_steps": 60}
    ranks = start_ranks(make_job(train=train, parallel={"mode": "sweep"}), 2)
    assert ranks.wait() == [EXIT_FAILED] * 2
    assert "choose a lower rate" in (ranks.processes[0].stderr.read() if ranks.processes[0].stderr else "")


def test_replicas_sharing_the_optimizer_reset_the_state_of_resampled_latents(
    make_job: MakeJob, make_trainer: Callable, start_ranks: Callable, kept: Any, tmp_path: Path
) -> None:
    sae, train = SAE | {"resample_every_tokens": 960}, {"state": "int8", "grad_clip": 0.01}
    make_trainer(make_job(data=ROWS, sae=sae, train={"batch_size": BATCH} | train), kept).run()
    assert any(kind == "resampled" for kind, _, _ in kept.events)
    parallel = {"mode": "ddp", "shares": "2:1"}
    ranks = start_ranks(make_job(data=ROWS, sae=sae, train={"batch_size": BATCH // 2} | train, parallel=parallel), 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    same_sae(ranks.spec.run_dir, kept, tmp_path / "sae", "")


def test_a_deterministic_job_on_several_ranks_is_reproducible_bit_for_bit(
    make_job: MakeJob, start_ranks: Callable, tmp_path: Path
) -> None:
    job = make_job(sae=SAE, train={"batch_size": BATCH // 2, "deterministic": True})
    exports = []
    for name in ("one", "two"):
        ranks = start_ranks(job, 2, run_dir=tmp_path / name)
        assert ranks.wait() == [EXIT_FINISHED] * 2
        exports.append((tmp_path / name / "sae" / "sae_weights.safetensors").read_bytes())
    assert exports[0] == exports[1]
