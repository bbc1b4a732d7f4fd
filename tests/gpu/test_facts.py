"""Tests for the versions and links reported by the simulated machine and, with a fake driver, by pynvml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sae_tui.gpu.none import NoGpus
from sae_tui.gpu.simulated import Simulated

Run = Callable[..., Any]
FACTS = """
import json
from dataclasses import asdict
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
nvml.open()
print(json.dumps(asdict(nvml.facts())))
"""


def test_versions_capabilities_and_links_are_read(on_nvml: Run) -> None:
    facts = on_nvml(FACTS, GPUS=4)
    assert (facts["driver"], facts["cuda"]) == ("570.172.08", [12, 8])
    assert facts["capabilities"] == [[9, 0]] * 4
    assert facts["nvlinks"] == [18] * 4
    assert [(pair["first"], pair["second"]) for pair in facts["pairs"]] == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3),
    ]  # fmt: skip
    assert all((pair["path"], pair["nvlink"], pair["peer_to_peer"]) == ("SYS", True, True) for pair in facts["pairs"])


def test_a_gpu_without_nvlink_or_peer_access_reports_the_reason(on_nvml: Run) -> None:
    facts = on_nvml(FACTS, GPUS=2, FAULTS="*:no_nvlink,*:p2p=1,*:topo=30")
    (pair,) = facts["pairs"]
    assert facts["nvlinks"] == [0, 0]
    assert pair == {
        "first": 0, "second": 1, "path": "PHB", "nvlink": False, "peer_to_peer": False,
        "obstacle": "the chipset does not support it",
    }  # fmt: skip


def test_a_lost_gpu_does_not_hide_facts_about_the_others(on_nvml: Run) -> None:
    facts = on_nvml(FACTS, GPUS=3, FAULTS="1:lost")
    assert facts["capabilities"] == [[9, 0], None, [9, 0]]
    assert [(pair["first"], pair["second"]) for pair in facts["pairs"]] == [(0, 2)]


def test_values_not_reported_by_the_driver_are_none(on_nvml: Run) -> None:
    facts = on_nvml(FACTS, GPUS=2, FAULTS="*:fnf_p2p,*:fnf_topo,*:fnf_cc,*:fnf_nvlink")
    (pair,) = facts["pairs"]
    assert (pair["path"], pair["peer_to_peer"], pair["obstacle"]) == (None, None, "")
    assert facts["capabilities"] == [None, None]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_simulated_machine_has_one_nvlink_bridge_per_four_gpus(count: int) -> None:
    facts = Simulated(count).facts()
    assert len(facts.pairs) == count * (count - 1) // 2
    bridges = [(pair.first, pair.second) for pair in facts.pairs if pair.nvlink]
    assert bridges == [(first, first + 1) for first in range(0, count - 1, 4)]
    assert {pair.path for pair in facts.pairs} == ({"PHB", "SYS"} if count > 4 else {"PHB"} if count > 1 else set())


def test_without_gpus_there_are_no_facts() -> None:
    assert NoGpus().facts().pairs == ()
