"""Tests that smaller micro-batches are tried if memory really runs out, with a limited address space for each rank."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.rank_faults import log_in_little_memory

from trainer.contract.planning import first_look
from trainer.contract.planning.first_look import Costs
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.metrics_store import SeriesReader
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, PeerLost, local_shard
from trainer.parallel.threads import Meeting, Threads
from trainer.training.batch_size_trial import dry_run
from trainer.training.learner import Learner
from trainer.training.loop import halved_sentence

STEP = 8192
# The pre-activations for all tokens take 256 MiB. A pass first allocates twice that size, and its threads take 128 MiB.
TIGHT_MIB = 900
# Modes and architectures whose passes include an exchange between ranks.
EXCHANGING = [("tensor", "topk"), ("ddp", "batch_topk")]


def shared_job(mode: str, architecture: str, batch_size: object) -> JobConfig:
    """Create a job with even shares, because measured shares would differ between runs."""
    table = {
        "data": {"source": "synthetic", "d_in": 32, "held_out_tokens": 1000},
        "sae": {"d_sae": 8192, "k": 8, "architecture": architecture},
        "train": {"n_steps": 2, "log_every": 1, "batch_size": batch_size, "global_batch_size": STEP},
        "parallel": {"mode": mode, "shares": "even"},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    return job


def curve(run_dir: Path, name: str) -> list[float | None]:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return [point.value for point in reader.points(name)]


def tokens(run_dir: Path) -> int:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        heartbeat = reader.heartbeat()
    assert heartbeat
    return heartbeat.tokens


def trials(log: Path) -> list[str]:
    return re.findall(r"([\d,]+) tokens at a time do not fit: trying ([\d,]+)", log.read_text())


def test_micro_batches_are_halved_until_they_fit_and_the_step_keeps_its_size(
    start_ranks: Callable, tmp_path: Path
) -> None:
    fvu = {}
    # Rank 0 is the only rank, so a memory limit for rank 1 has no effect.
    for name, starved in {"roomy": 1, "tight": 0}.items():
        (folder := tmp_path / name).mkdir()
        prepare = functools.partial(log_in_little_memory, TIGHT_MIB, starved, folder)
        job = shared_job("single", "topk", "auto")
        assert start_ranks(job, 1, run_dir=folder / "run", prepare=prepare).wait() == [EXIT_FINISHED], name
        assert tokens(folder / "run") == 2 * STEP
        fvu[name] = curve(folder / "run", "heldout_fvu")[-1]
    assert trials(tmp_path / "roomy" / "0.log") == []
    assert trials(tmp_path / "tight" / "0.log")[0] == ("8,192", "4,096")
    with contextlib.closing(SeriesReader(tmp_path / "tight" / "run" / "metrics.db")) as reader:
        (message,) = [event.message for event in reader.events() if event.kind == "halved"]
    assert message.startswith("8,192 tokens do not fit in memory at once, so micro-batches have ")
    assert message.endswith("; the SAE is not affected")
    assert abs(fvu["tight"] - fvu["roomy"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "architecture"), EXCHANGING)
def test_both_ranks_halve_their_micro_batches_if_one_rank_runs_out_of_memory(
    mode: str, architecture: str, start_ranks: Callable, tmp_path: Path
) -> None:
    job = shared_job(mode, architecture, "auto")
    # Each rank has only half of a single rank's pre-activations.
    prepare = functools.partial(log_in_little_memory, TIGHT_MIB // 2, 1, tmp_path)
    ranks = start_ranks(job, 2, run_dir=tmp_path / "tight", prepare=prepare)
    assert ranks.wait() == [EXIT_FINISHED] * 2, ranks.processes[1].stderr.read()
    of_ranks = [trials(tmp_path / f"{rank}.log") for rank in range(2)]
    assert of_ranks[0] == of_ranks[1] != []
    settled = shared_job(mode, architecture, int(of_ranks[0][-1][1].replace(",", "")))
    assert start_ranks(settled, 2, run_dir=tmp_path / "settled").wait() == [EXIT_FINISHED] * 2
    assert curve(tmp_path / "tight", "loss") == curve(tmp_path / "settled", "loss")
    assert len(curve(tmp_path / "tight", "loss")) == 2


def test_halving_is_reported_as_changing_an_sae_that_selects_latents_per_micro_batch() -> None:
    message = halved_sentence(shared_job("single", "batch_topk", "auto"), 8192, 4096)
    assert message.endswith(
        "; with batch_topk, latents are selected within each micro-batch, "
        "so a run with 8,192 would train a different SAE"
    )


def learner_of(job: JobConfig, **groups: Group) -> tuple[Learner, torch.Tensor]:
    """Return random data, and a learner initialised from it without exchanges between ranks."""
    learner = Learner(job, 16, None, Parallel(torch.device("cpu"), **groups))
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    with dry_run(learner.sae):
        learner.initialise(x, x)
    return learner, x


def absent_peer() -> Group:
    return Threads(Meeting(2, timeout_s=0.1), 2, 0)


def groups_of(mode: str) -> dict[str, Group]:
    peer = absent_peer()
    return {"world": peer, {"ddp": "data", "tensor": "latents"}[mode]: peer}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mode", ["ddp", "tensor"])
def test_a_dry_run_does_not_wait_for_other_ranks_and_leaves_the_state_unchanged(
    mode: str, architecture: str, make_job: Callable[..., JobConfig]
) -> None:
    learner, x = learner_of(make_job(sae={"architecture": architecture}), **groups_of(mode))
    before = {name: tensor.clone() for name, tensor in learner.state.tensors()}
    with dry_run(learner.sae):
        learner.accumulate(x, x, 2 * len(x))
    assert any(parameter.grad is not None for parameter in learner.sae.parameters())
    learner.forget_pass()
    after = dict(learner.state.tensors())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not learner.sae.step_sums.any()


@pytest.mark.parametrize(("mode", "architecture"), [("tensor", "topk"), ("ddp", "batch_topk")])
def test_after_a_dry_run_passes_exchange_data_with_all_ranks_again(
    mode: str, architecture: str, make_job: Callable[..., JobConfig]
) -> None:
    learner, x = learner_of(make_job(sae={"architecture": architecture}), **groups_of(mode))
    with pytest.raises(MemoryError), dry_run(learner.sae):
        raise MemoryError
    with pytest.raises(PeerLost):
        learner.accumulate(x, x, 2 * len(x))


@pytest.mark.parametrize("mode", ["single", "ddp", "tensor"])
def test_a_dry_run_includes_auxk_before_any_latent_is_dead(mode: str, make_job: Callable[..., JobConfig]) -> None:
    learner, x = learner_of(make_job(sae={"architecture": "topk"}), **({} if mode == "single" else groups_of(mode)))
    target = local_shard(x, learner.latents.group)
    with dry_run(learner.sae):
        assert learner.forward(x, target).losses["auxk"] > 0
    if mode != "tensor":
        assert learner.forward(x, target).losses["auxk"] == 0


@pytest.mark.parametrize("costs", [Costs(0.2, 10), None])
def test_a_dry_run_has_the_largest_number_of_active_entries_a_rank_can_hold(
    costs: Costs | None, make_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "costs", lambda: costs)
    job = make_job(sae={"architecture": "topk"})
    learner, x = learner_of(job, **groups_of("tensor"))
    alone, _ = learner_of(job)
    shares = []
    for one in (learner, alone):
        with dry_run(one.sae):
            shares.append(int((one.forward(x, local_shard(x, one.latents.group)).acts.values > 0).sum()))
    assert shares[0] > 0.9 * shares[1]
