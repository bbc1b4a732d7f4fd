"""Tests that `train.halving` drops the worse SAEs of a sweep and leaves the training of the other SAEs unchanged."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.combinations import slow_unless

from trainer.contract.errors import JobFileError
from trainer.contract.planning.halving import rungs
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import Halved, newest_whole, read_state
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings import schedule
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import SeriesReader, best_sae
from trainer.reporting.progress import RunProgress
from trainer.training.export_checkpoint import labels_of
from trainer.training.halving import Halving

MakeJob = Callable[..., JobConfig]
MakeTrainer = Callable[..., Any]

# With these rates, the lowest is always the worst, since it barely changes the weights.
RATES = [0.02, 0.01, 1e-5]
STEPS = 160
# Enough steps for tests in which only the order of the SAEs matters.
FEW_STEPS = 100
FIRST, LAST = rungs(STEPS, len(RATES))


def sweep(make_job: MakeJob, **sections: dict[str, Any]) -> JobConfig:
    train = {"lr": RATES, "n_steps": STEPS, "halving": True, "eval_every": 50} | sections.pop("train", {})
    return make_job(train=train, **sections)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "sae_weights.safetensors")


def same_weights(one: Path, other: Path) -> None:
    wanted = weights_in(other)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights_in(one).items())


class StopAt(RunProgress):
    """A `RunProgress` that sets an event once a step has been reached."""

    def __init__(self, step: int) -> None:
        self.event_of_step, self._step = threading.Event(), step

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        if step >= self._step:
            self.event_of_step.set()


@pytest.mark.parametrize(
    ("architecture", "optimizer"),
    slow_unless(
        lambda architecture, optimizer: architecture != "batch_topk" and optimizer != "signum",
        [("topk", "adam"), ("batch_topk", "adam"), ("matryoshka_batch_topk", "muon"), ("topk", "signum")],
    ),
)
def test_the_sae_that_is_kept_has_every_bit_of_the_same_sae_in_a_full_sweep(
    make_job: MakeJob, make_trainer: MakeTrainer, kept: Any, tmp_path: Path, architecture: str, optimizer: str
) -> None:
    options = {"sae": {"architecture": architecture, "resample_every_tokens": 5000}}
    train = {"optimizer": optimizer, "n_steps": FEW_STEPS}
    halved = make_trainer(sweep(make_job, train=train, **options), kept)
    assert halved.run()
    (label,) = halved.learners
    full = {"checkpoints": tmp_path / "full", "output": tmp_path / "all"}
    assert make_trainer(sweep(make_job, train=train | {"halving": False}, **options), **full).run()
    assert [folder.name for folder in (tmp_path / "sae").iterdir()] == [label]
    same_weights(tmp_path / "sae" / label, tmp_path / "all" / label)
    assert not halved._halving.copies
    messages = [message for kind, _, message in kept.events if kind == "halving"]
    assert len(messages) == 2
    end = rungs(FEW_STEPS, len(RATES))[0].end
    assert messages[0].startswith(f"step {end}, comparison of cooled-down copies: keeps lr=")
    assert "drops lr=1e-05 (FVU" in messages[0]


def test_a_dropped_sae_ends_with_its_step_recorded_and_is_never_the_best(
    make_job: MakeJob, make_trainer: MakeTrainer, kept: Any
) -> None:
    make_trainer(sweep(make_job), kept).run()
    assert kept.curve("dropped_at_step@lr=1e-05") == [FIRST.end]
    steps = [row.step for row in kept.reported if row.name == "fvu@lr=1e-05"]
    assert max(steps) <= FIRST.end
    latest = {row.name: row.value for row in kept.reported}
    (winner,) = {f"lr={rate}" for rate in RATES} - {name.partition("@")[2] for name in latest if "dropped" in name}
    assert best_sae(latest) == winner
    # A low FVU from before the comparison does not matter.
    assert best_sae(latest | {"heldout_fvu@lr=1e-05": 0.0}) == winner


def test_the_fvu_of_a_copy_is_that_of_a_run_that_ends_with_the_same_cool_down(
    make_job: MakeJob, make_trainer: MakeTrainer, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(sweep(make_job), kept).run()
    share = LAST.length / LAST.begin
    monkeypatch.setattr(schedule, "COOL_DOWN_SHARE", share)
    progress = StopAt(LAST.begin - 1)
    alone = make_trainer(
        make_job(train={"lr": RATES[0], "n_steps": STEPS, "eval_every": 0}),
        progress, finish=progress.event_of_step, checkpoints=tmp_path / "c", output=tmp_path / "o",
    )  # fmt: skip
    alone.run()
    assert alone.position.step == LAST.end
    assert kept.curve(f"cooled_fvu@lr={RATES[0]}")[-1] == alone.report.values[""]["heldout_fvu"]


def test_a_sae_with_a_penalty_trains_to_the_end_while_others_are_dropped(
    make_job: MakeJob, make_trainer: MakeTrainer
) -> None:
    rates, architectures = [0.01, 1e-5], ["topk", "jumprelu"]
    train = {"lr": rates, "n_steps": 100, "eval_every": 100}
    trainer = make_trainer(sweep(make_job, train=train, sae={"architecture": architectures}))
    assert trainer.run()
    kept = ["architecture=topk,lr=0.01", "architecture=jumprelu,lr=0.01", "architecture=jumprelu,lr=1e-05"]
    assert [*trainer.learners] == kept


def test_seeds_are_kept_or_dropped_together(make_job: MakeJob, make_trainer: MakeTrainer, kept: Any) -> None:
    trainer = make_trainer(sweep(make_job, train={"lr": [0.01, 1e-5], "seed": [0, 1], "n_steps": FEW_STEPS}), kept)
    trainer.run()
    assert [*trainer.learners] == ["lr=0.01,seed=0", "lr=0.01,seed=1"]
    (message,) = [message for kind, _, message in kept.events if kind == "halving"]
    values = [kept.curve(f"cooled_fvu@lr=0.01,seed={seed}")[0] for seed in (0, 1)]
    assert f"keeps lr=0.01 (FVU {sum(values) / 2:.4f})" in message


def test_a_random_twin_is_dropped_with_its_sae(make_job: MakeJob, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(sweep(make_job, train={"lr": [0.01, 1e-5], "random_twin": True, "n_steps": FEW_STEPS}))
    trainer.run()
    assert [*trainer.learners] == ["freeze=off,lr=0.01", "freeze=decoder,lr=0.01"]


@pytest.mark.parametrize("rates", [[3e-3, 9e17], [8e17, 9e17, 3e-3]])
def test_a_diverged_sae_is_dropped_and_the_run_finishes(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path, rates: list[float]
) -> None:
    assert make_trainer(sweep(make_job, train={"lr": rates, "n_steps": FEW_STEPS})).run()
    assert [folder.name for folder in (tmp_path / "sae").iterdir()] == ["lr=0.003"]


def test_a_sae_that_diverges_only_later_is_dropped_although_its_last_weights_are_good(
    make_job: MakeJob, make_trainer: MakeTrainer, kept: Any
) -> None:
    trainer = make_trainer(sweep(make_job, train={"lr": [0.02, 1e-5], "n_steps": FEW_STEPS}), kept)
    diverging = trainer.learners["lr=0.02"]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan if trainer.position.step >= 10 else gradient

    diverging.sae.W_dec.register_hook(spoil)
    assert trainer.run()
    assert [*trainer.learners] == ["lr=1e-05"]
    (message,) = [message for kind, _, message in kept.events if kind == "halving"]
    assert message.endswith("drops lr=0.02 (FVU nan)")


def test_the_memory_of_dropped_saes_and_copies_is_freed_at_once(make_job: MakeJob, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(sweep(make_job, train={"lr": [0.02, 1e-5]}))
    saes = [weakref.ref(one.sae) for one in trainer.learners.values()]
    new_learner, report, n_alive = trainer._new_learner, trainer.report.halved, list[int]()

    def created(label: str) -> Any:
        made = new_learner(label)
        saes.append(weakref.ref(made.sae))
        return made

    def count(*result: Any) -> None:
        n_alive.append(sum(one() is not None for one in saes))
        report(*result)

    trainer._new_learner, trainer.report.halved = created, count
    gc.disable()
    try:
        trainer.run()
    finally:
        gc.enable()
    assert (len(saes), n_alive) == (4, [1])


def test_the_evaluation_of_copies_does_not_count_as_training_time(
    make_job: MakeJob, make_trainer: MakeTrainer, kept: Any
) -> None:
    make_trainer(sweep(make_job, train={"log_every": 7}), kept).run()
    steps = [row.step for row in kept.reported if row.name == "step_ms"]
    assert {FIRST.end, LAST.end} <= {*steps}


def test_a_resumed_run_drops_the_same_saes_and_ends_with_the_same_weights(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    job = sweep(make_job)
    make_trainer(job).run()
    (label,) = (folder.name for folder in (tmp_path / "sae").iterdir())
    assert FIRST.end < LAST.begin
    for stop in (FIRST.begin + 3, FIRST.end + 1, LAST.begin + 3, LAST.end + 20):
        folder = tmp_path / str(stop)
        progress, parts = StopAt(stop), {"checkpoints": folder / "parts", "output": folder / "resumed"}
        assert not make_trainer(job, progress, stop=progress.event_of_step, **parts).run()
        saved = newest_whole(folder / "parts")
        state = read_state(saved)
        assert state.halved.n_rungs == (stop > FIRST.end) + (stop > LAST.end), stop
        assert [*state.halved.dropped.items()][:1] == [("lr=1e-05", FIRST.end)] * (stop > FIRST.end), stop
        resumed = make_trainer(job, resume_from=saved, **parts)
        assert resumed.run()
        assert [*resumed.learners] == [label], stop
        # The stopped run exported all SAEs that it had.
        assert [one.name for one in (folder / "resumed").iterdir()] == [label], stop
        same_weights(folder / "resumed" / label, tmp_path / "sae" / label)
        assert read_state(newest_whole(folder / "parts")).halved.n_rungs == 2, stop


def test_a_run_that_is_asked_to_finish_early_drops_no_more_saes(
    make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    progress = StopAt(FIRST.begin + 2)
    trainer = make_trainer(sweep(make_job), progress, finish=progress.event_of_step)
    assert trainer.run()
    assert trainer.position.step < FIRST.begin + 20
    assert len(trainer.learners) == len(RATES)
    assert not trainer._halving.copies
    assert read_state(newest_whole(tmp_path / "checkpoints")).halved == Halved()


@pytest.mark.parametrize("mode", ["ddp", "tensor"])
def test_several_ranks_drop_the_same_saes_as_a_single_process(
    make_job: MakeJob, make_trainer: MakeTrainer, start_ranks: Callable[..., Any], kept: Any, tmp_path: Path, mode: str
) -> None:
    train = {"lr": [0.01, 1e-5, 0.003], "batch_size": 60}
    make_trainer(sweep(make_job, train=train), kept).run()
    train |= {"batch_size": 30} if mode == "ddp" else {}
    ranks = start_ranks(sweep(make_job, train=train, parallel={"mode": mode}), 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    wanted = {
        name: kept.curve(name) for name in {row.name for row in kept.reported if row.name[:6] in ("cooled", "droppe")}
    }
    assert len(wanted) == 3 + 2
    with contextlib.closing(SeriesReader(ranks.spec.run_dir / "metrics.db")) as reader:
        for name, values in wanted.items():
            assert [point.value for point in reader.points(name)] == pytest.approx(values, rel=2e-3), name
    (winner,) = (folder.name for folder in (tmp_path / "sae").iterdir())
    found, expected = (weights_in(folder / winner) for folder in (ranks.spec.run_dir / "sae", tmp_path / "sae"))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-3, msg=name)


def test_labels_in_a_checkpoint_that_are_not_in_the_job_are_ignored(make_job: MakeJob, tmp_path: Path) -> None:
    foreign = Halved(1, {"../..": 3, "": 3, str(tmp_path): 3, "lr=1e-05": 25})
    assert Halving(Layout(sweep(make_job), 1), foreign).done == Halved(1, {"lr=1e-05": 25})


def test_an_export_leaves_out_dropped_saes_and_refuses_them_by_name(make_job: MakeJob) -> None:
    job, dropped = sweep(make_job), {"lr=1e-05": 25}
    assert labels_of(job, (), lambda label: True, dropped) == ["lr=0.02", "lr=0.01"]
    with pytest.raises(JobFileError, match=r"lr=1e-05 was dropped at step 25 \(train.halving\); the SAEs are lr=0.02"):
        labels_of(job, ["lr=1e-05"], lambda label: True, dropped)
