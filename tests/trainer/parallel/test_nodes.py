"""Tests for ranks on two nodes, which are network namespaces: results, bytes between nodes, and measured links."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support import network_nodes
from support.network_nodes import Node, enter_node_of, two_nodes

from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.plan import Plan
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig

MakeJob = Callable[..., JobConfig]
MBIT = 1e6
# Each node sends this many bits/s: slow enough for two busy cores to reach it.
LINK = 200 * MBIT


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if reason := network_nodes.obstacle():
        pytest.skip(reason)
    with two_nodes(LINK) as both:
        yield both


@pytest.fixture
def train(start_ranks: Callable, tmp_path: Path) -> Callable[..., tuple[dict[str, torch.Tensor], Plan]]:
    """Return a function that trains on four ranks and returns the SAE's weights and the plan."""

    def train(job: JobConfig, name: str, nodes: tuple[Node, Node] | None = None, **options: object):
        if nodes:
            options |= {"prepare": functools.partial(enter_node_of, nodes, 2), "on_one_host": False, "by_files": True}
        ranks = start_ranks(job, 4, run_dir=tmp_path / name, **options)
        assert ranks.wait() == [EXIT_FINISHED] * 4, [one.stderr.read() for one in ranks.processes]
        plan = msgspec.json.decode((tmp_path / name / "attempt1" / "plan.json").read_bytes(), type=Plan)
        return load_file(tmp_path / name / "sae" / "sae_weights.safetensors"), plan

    return train


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "hybrid"])
def test_two_nodes_train_the_same_sae_as_one(make_job: MakeJob, train, nodes, mode: str) -> None:
    # All sums in a step are exact enough that the top k latents are the same; 20,000 values exceed a small tensor.
    job = make_job(parallel={"mode": mode, "shares": "even"}, sae={"d_sae": 2048, "k": 4}, train={"n_steps": 8})
    on_one, _ = train(job, "one")
    before = nodes[0].sent_bytes
    on_two, plan = train(job, "two", nodes)
    assert (plan.mode, plan.ranks) == (mode, 4)
    assert nodes[0].sent_bytes > before
    for name, tensor in on_one.items():
        torch.testing.assert_close(on_two[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_between_nodes_a_step_sends_what_the_model_counts_and_the_link_is_measured(
    make_job: MakeJob, train, nodes, tmp_path: Path
) -> None:
    from trainer.contract.planning.step_time import wire_of
    from trainer.contract.planning.workload import Workload
    from trainer.contract.settings.sources import DataShape

    sent = []
    for n_steps in (5, 25):
        job = make_job(
            parallel={"mode": "ddp", "shares": "even"}, sae={"d_sae": 8192, "k": 4}, train={"n_steps": n_steps}
        )
        before = nodes[0].sent_bytes
        weights, _ = train(job, f"run{n_steps}", nodes, box_file=tmp_path / "box.json")
        sent.append(nodes[0].sent_bytes - before)
    shape = DataShape(weights["W_dec"].shape[1], None, 10**6)
    expected = wire_of(Workload(job, 4, shape, CPU), nodes=2).node_bytes
    assert (sent[1] - sent[0]) / 20 == pytest.approx(expected, rel=0.15)
    link = read_box(tmp_path / "box.json").node_links[CPU]
    assert link.bytes_per_s == pytest.approx(LINK / 8, rel=0.35)
