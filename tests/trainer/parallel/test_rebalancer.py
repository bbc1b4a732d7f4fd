from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import slow_except
from support.rank_faults import share_anew_soon

from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import SeriesReader
from trainer.parallel.rebalancer import PATIENCE, PATIENCE_S, Balancer, RebalanceDecision
from trainer.parallel.shares import Shares, even

MakeJob = Callable[..., JobConfig]


def totals(busy: list[float], **others: list[float]) -> dict[str, torch.Tensor]:
    columns = {name: [0.0] * len(busy) for name in ("data_ms", "core_share", "foreign_bytes")} | {"busy_ms": busy}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in (columns | others).items()}


def looks(
    balancer: Balancer, busy: list[float], times: int = PATIENCE, **others: list[float]
) -> list[RebalanceDecision]:
    return [balancer.look(totals(busy, **others), PATIENCE_S / PATIENCE) for _ in range(times)]


def told(verdicts: list[RebalanceDecision]) -> list[str]:
    return [event.message for verdict in verdicts for event in verdict.events]


def test_a_persistently_slow_rank_and_its_recovery_are_each_reported_once() -> None:
    balancer = Balancer(even(3, 1), rebalance=False)
    assert told(looks(balancer, [10, 10, 10])) == []
    assert told(looks(balancer, [10, 10, 15], PATIENCE - 1)) == []
    (message,) = told(looks(balancer, [10, 10, 15], 10))
    assert message.startswith("rank 2 takes 1.5× as long as the others")
    assert told(looks(balancer, [10, 10, 10], 3)) == ["rank 2 keeps up with the others again"]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"data_ms": [0, 9]}, "waits 9 ms of each step for data"),
        ({"foreign_bytes": [0, 3e9]}, "another process uses its GPU and occupies 2.8 GiB"),
        ({"core_share": [1.0, 0.5]}, "another process uses its CPU core, so it gets only 50% of the core"),
        ({}, "its device is slower or throttled"),
    ],
)
def test_the_likely_cause_of_a_slow_rank_is_reported(own: dict[str, Any], said: str) -> None:
    (message,) = told(looks(Balancer(even(2, 1), rebalance=False), [10, 13], **own))
    assert said in message


def test_a_rank_with_more_work_is_not_called_slow() -> None:
    balancer = Balancer(Shares((3.0, 1.0), (1.0,)), rebalance=False)
    (message,) = told(looks(balancer, [30, 10]))
    assert message.endswith("it has 75% of the work")


def test_token_shares_follow_the_measured_speed() -> None:
    *_, last = looks(Balancer(even(2, 1), rebalance=True), [10, 30])
    assert last.shares
    assert last.shares.tokens[0] / last.shares.tokens[1] == pytest.approx(3)


def test_latent_shares_follow_the_measured_speed_within_the_memory_limits() -> None:
    *_, last = looks(Balancer(even(1, 2), rebalance=True, capacity=[0.6, 1.0]), [10, 30])
    assert last.shares
    assert last.shares.latents == pytest.approx((0.6, 0.4))


@pytest.mark.parametrize("busy", [[10, 11], [10, 10]])
def test_shares_do_not_change_for_a_small_gain(busy: list[float]) -> None:
    assert all(verdict.shares is None for verdict in looks(Balancer(even(2, 1), rebalance=True), busy, 10))


def test_shares_that_no_longer_match_the_speeds_become_even_again() -> None:
    balancer = Balancer(Shares((3.0, 1.0), (1.0,)), rebalance=True)
    *_, last = looks(balancer, [30, 10])
    assert last.shares
    assert len(set(last.shares.tokens)) == 1
    balancer.adopt(last.shares)
    assert all(verdict.shares is None for verdict in looks(balancer, [20, 20], 10))


def test_fixed_shares_do_not_change() -> None:
    assert all(verdict.shares is None for verdict in looks(Balancer(even(2, 1), rebalance=False), [10, 90], 10))


@pytest.mark.parametrize("mode", slow_except(["ddp"], ["ddp", "tensor"]))
def test_rebalancing_uneven_work_does_not_change_what_the_sae_learns(
    mode: str, make_job: MakeJob, make_trainer: Callable, start_ranks: Callable, kept: Any
) -> None:
    # The configured shares make rank 0 slower than rank 1.
    train = {"batch_size": 1024, "global_batch_size": 1024, "n_steps": 32, "log_every": 4, "checkpoint_every": 10}
    # With seed 0, two latents have bit-identical pre-activations at the first step.
    # Whichever latent is selected takes a full Adam step, noticeably changing one of the few held-out rows.
    train["seed"] = 1
    sae = {"d_sae": 2048, "dead_after_tokens": 10**9}
    make_trainer(make_job(sae=sae, train=train), kept).run()
    ranks = start_ranks(
        make_job(sae=sae, train=train, parallel={"mode": mode, "shares": "12:1"}), 2, prepare=share_anew_soon
    )
    assert ranks.wait(240) == [EXIT_FINISHED] * 2
    with contextlib.closing(SeriesReader(ranks.spec.run_dir / "metrics.db")) as reader:
        told = [event.message for event in reader.events() if event.kind == "rebalanced"]
        assert told
        assert all(re.fullmatch(r".* now .*\(from step \d+\)", message) for message in told), told
        for name in ("loss", "fvu", "heldout_fvu"):
            values = [point.value for point in reader.points(name)]
            assert values == pytest.approx(kept.curve(name), rel=0.02), name
