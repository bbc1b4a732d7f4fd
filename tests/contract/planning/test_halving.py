"""Tests which SAEs of a sweep compete, when they are compared, and for which jobs halving is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.workloads import workload

from trainer.contract.planning import memory
from trainer.contract.planning.halving import (
    LAST_SHARE,
    LEAST_BEGIN,
    contests,
    halving_problems,
    rungs,
    rungs_of,
    survivors,
    trained_share,
)
from trainer.contract.planning.hardware import Speeds
from trainer.contract.planning.step_time import run_seconds, step_time
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig

MakeJob = Callable[..., JobConfig]
RATES = [0.001, 0.003, 0.01, 0.03]


def halved(make_job: MakeJob, **sections: dict[str, Any]) -> Workload:
    train = {"halving": True, "lr": RATES, "n_steps": 1000} | sections.get("train", {})
    data = {"path": "acts"} | sections.get("data", {})
    return workload(make_job(**sections | {"train": train, "data": data}), d_in=64)


def labels_of(work: Workload) -> list[dict[str, list[str]]]:
    return contests(work.members)


def test_saes_compete_only_with_saes_of_the_same_k_and_width(make_job: MakeJob) -> None:
    found = labels_of(halved(make_job, sae={"k": [4, 8], "d_sae": 256}, train={"lr": [0.01, 0.02]}))
    assert [[*contest] for contest in found] == [["k=4,lr=0.01", "k=4,lr=0.02"], ["k=8,lr=0.01", "k=8,lr=0.02"]]
    assert labels_of(halved(make_job, sae={"d_sae": [128, 256]}, train={"lr": 0.01})) == []
    assert len(labels_of(halved(make_job, sae={"encoder_scale": [0.1, 0.5]}, train={"lr": 0.01}))) == 1


def test_saes_that_differ_only_in_the_seed_are_one_candidate(make_job: MakeJob) -> None:
    (contest,) = labels_of(halved(make_job, train={"lr": [0.01, 0.02], "seed": [0, 1]}))
    assert contest == {
        "lr=0.01": ["lr=0.01,seed=0", "lr=0.01,seed=1"],
        "lr=0.02": ["lr=0.02,seed=0", "lr=0.02,seed=1"],
    }


def test_in_a_sweep_over_architectures_only_those_without_a_penalty_compete(make_job: MakeJob) -> None:
    work = halved(make_job, sae={"architecture": ["topk", "batch_topk", "jumprelu"]}, train={"lr": [0.01, 0.02]})
    assert [[*contest] for contest in labels_of(work)] == [
        [f"architecture={name},lr=0.01", f"architecture={name},lr=0.02"] for name in ("topk", "batch_topk")
    ]
    (warning,) = halving_problems(work)
    assert (warning.path, warning.severity) == ("train.halving", "warning")
    assert warning.message == "drops no jumprelu SAEs, because their L0 depends on a penalty; these train to the end"
    # Two of the four SAEs that compete are dropped, and the two others train to the end.
    assert 2 / 3 < trained_share(work) < 0.9


def test_random_twins_do_not_compete(make_job: MakeJob) -> None:
    (contest,) = labels_of(halved(make_job, train={"lr": [0.01, 0.02], "random_twin": True}))
    assert [*contest] == ["freeze=off,lr=0.01", "freeze=off,lr=0.02"]


@given(n_candidates=st.integers(2, 64), more=st.floats(1, 1e5))
def test_comparisons_follow_each_other_and_leave_one_candidate(n_candidates: int, more: float) -> None:
    n_rungs = len(rungs(1000, n_candidates))
    steps = int(more * LEAST_BEGIN / LAST_SHARE * 2 ** (n_rungs - 1)) + 1
    found = rungs(steps, n_candidates)
    assert found[0].begin >= LEAST_BEGIN
    assert all(one.begin < one.end <= other.begin for one, other in itertools.pairwise(found))
    assert found[-1].end < steps / 3
    for _ in found:
        assert n_candidates > 1
        n_candidates = survivors(n_candidates)
    assert n_candidates == 1


@pytest.mark.parametrize(
    ("train", "sae"),
    [
        ({}, {}),
        ({"lr": [0.01, 0.02]}, {}),
        ({"lr": [0.01, 0.02, 0.03]}, {"k": [4, 8]}),
        ({"lr": [0.01, 0.02, 0.03], "seed": [0, 1]}, {}),
        ({"lr": [round(0.001 * (1 + n), 3) for n in range(16)]}, {}),
    ],
)
def test_the_share_of_steps_equals_that_of_a_step_by_step_count(
    make_job: MakeJob, train: dict[str, Any], sae: dict[str, Any]
) -> None:
    work = halved(make_job, train=train, sae=sae)
    left = [list(contest.values()) for contest in labels_of(work)]
    n_taken = 0
    for step in range(1000):
        for rung in rungs_of(work):
            if step == rung.end:
                left = [contest[: survivors(len(contest))] for contest in left]
        n_taken += sum(len(labels) for contest in left for labels in contest)
        if any(rung.begin <= step < rung.end for rung in rungs_of(work)):
            n_taken += sum(len(labels) for contest in left if len(contest) > 1 for labels in contest)
    assert trained_share(work) == pytest.approx(n_taken / (1000 * len(work.members)))


def test_four_saes_with_halving_take_less_than_half_of_the_time_and_more_memory(make_job: MakeJob) -> None:
    works = halved(make_job), halved(make_job, train={"halving": False})
    seconds = [run_seconds(work, step_time(work, Speeds(1e12, 1e11, 1e10, 1e-5))) for work in works]
    assert 0.3 < seconds[0] / seconds[1] < 0.5
    estimates = [memory.estimate(work) for work in works]
    assert estimates[0].optimizer == 2 * estimates[1].optimizer
    assert estimates[0].weights == 2 * estimates[1].weights


@pytest.mark.parametrize(
    ("sections", "path", "message"),
    [
        (
            {"train": {"lr": 0.01}},
            "train.halving",
            "no two of them; give a learning setting several values",
        ),
        ({"train": {"lr": 0.01, "seed": [0, 1]}}, "train.halving", "no two of them"),
        ({"sae": {"architecture": "jumprelu"}}, "train.halving", "the L0 of jumprelu depends on a penalty"),
        (
            {"train": {"n_steps": 199}},
            "train.halving",
            "needs at least 200 steps to compare 4 SAEs",
        ),
        ({"parallel": {"mode": "sweep"}}, "parallel.mode", '"sweep" gives each GPU its own SAEs'),
        ({"train": {"decay_fraction": [0.2, 0.6], "lr": 0.01}}, "train.halving", "no two of them"),
        ({"train": {"warmup_fraction": 0.2}}, "train.warmup_fraction", "in the warm-up; set it to at most 0.075"),
        ({"data": {"held_out_tokens": 0}}, "data.held_out_tokens", "leaves no held-out rows"),
    ],
)
def test_jobs_that_cannot_be_halved_are_refused(
    make_job: MakeJob, sections: dict[str, Any], path: str, message: str
) -> None:
    (problem,) = halving_problems(halved(make_job, **sections))
    assert (problem.path, problem.severity) == (path, "error")
    assert message in problem.message
    assert halving_problems(halved(make_job)) == []
    assert halving_problems(halved(make_job, train={"n_steps": 200})) == []
    assert halving_problems(halved(make_job, train={"warmup_fraction": 0.075})) == []
