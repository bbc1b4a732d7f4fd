from __future__ import annotations

from itertools import combinations, starmap

from support.cards import Cards

from sae_tui.doctor.links import check_nvlink, check_peers
from sae_tui.gpu.base import GpuFacts, GpuPair
from sae_tui.gpu.simulated import Simulated


def facts(count: int, **fields: object) -> GpuFacts:
    pairs = starmap(lambda first, second: GpuPair(first, second, **fields), combinations(range(count), 2))
    return GpuFacts(nvlinks=(18 * bool(fields.get("nvlink")),) * count, pairs=tuple(pairs))


def test_a_single_gpu_has_no_link_findings(sandbox) -> None:
    box = sandbox.box(Cards(1, facts(1)))
    assert [*check_nvlink(box), *check_peers(box)] == []


def test_nvlink_between_all_pairs_of_gpus_is_ok(sandbox) -> None:
    box = sandbox.box(Cards(8, facts(8, path="SYS", nvlink=True, peer_to_peer=True)))
    (nvlink,), (peers,) = check_nvlink(box), check_peers(box)
    assert (nvlink.level, peers.level) == ("ok", "ok")
    assert nvlink.sentence == "every GPU is connected to every other GPU by NVLink, with 18 links per GPU"


def test_pairs_linked_by_nvlink_are_named_with_the_longest_path_between_other_pairs(sandbox) -> None:
    (finding,) = check_nvlink(sandbox.box(Simulated(8)))
    assert finding.level == "note"
    assert "GPUs 0-1 and 4-5 are linked by NVLink" in finding.sentence
    assert "(SYS)" in finding.sentence
    assert finding.remedy.endswith("--gpus 0,1")


def test_missing_nvlink_is_a_note(sandbox) -> None:
    (finding,) = check_nvlink(sandbox.box(Cards(2, facts(2, path="PXB"))))
    assert finding.sentence.startswith(
        "the GPUs have no NVLink; they are connected through several PCIe switches (PXB)"
    )


def test_missing_peer_access_is_reported_with_its_reason(sandbox) -> None:
    apart = facts(2, path="PHB", peer_to_peer=False, obstacle="the chipset does not support it")
    (finding,) = check_peers(sandbox.box(Cards(2, apart)))
    assert finding.level == "note"
    assert finding.sentence.startswith("no GPU can read the memory of other GPUs (the chipset does not support it)")
    assert "topo -p2p" in finding.remedy


def test_some_of_many_pairs_without_peer_access_are_named_and_the_rest_counted(sandbox) -> None:
    (finding,) = check_peers(sandbox.box(Simulated(4)))
    assert "GPUs 0-2, 0-3, 1-2, 1-3 and 1 more pair" in finding.sentence


def test_unknown_links_are_not_guessed(sandbox) -> None:
    box = sandbox.box(Cards(2, facts(2)))
    assert list(check_peers(box)) == []
    (finding,) = check_nvlink(box)
    assert finding.sentence.endswith("by a path that the driver does not report")
