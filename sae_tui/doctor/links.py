"""Checks how the GPUs are connected to each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.gpu import vendor_to_name
from sae_tui.gpu.base import GpuPair
from trainer.contract.wording import join_words, plural

# Descriptions of the path abbreviations used by `nvidia-smi topo -m`, from the shortest path to the longest.
WAYS = {
    "internal": "on one board",
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "between host bridges of one CPU",
    "SYS": "between CPU sockets",
}
MOST_NAMED = 4


def check_nvlink(box: CheckedMachine) -> Iterator[Finding]:
    """Report the pairs linked by NVLink or XGMI, and the longest path between the other pairs."""
    facts, link = box.gpus.facts, vendor_to_name(box.gpus.source_name).link
    linked = [pair for pair in facts.pairs if pair.nvlink]
    others = [pair for pair in facts.pairs if not pair.nvlink]
    if not facts.pairs:
        return
    if not others:
        links = f", with {plural(max(facts.nvlinks), 'link')} per GPU" if any(facts.nvlinks) else ""
        yield Finding("ok", link, f"every GPU is connected to every other GPU by {link}{links}")
    elif linked:
        sentence = f"{_named(linked)} are linked by {link}; the others are connected {_longest(others)}"
        remedy = f"give a job linked GPUs, such as --gpus {linked[0].first},{linked[0].second}"
        yield Finding("note", link, sentence, remedy)
    else:
        remedy = 'use several GPUs only for jobs that are too slow on one, and compare parallel.mode "ddp" and "tensor"'
        yield Finding("note", link, f"the GPUs have no {link}; they are connected {_longest(others)}", remedy)


def check_peers(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether GPUs can read each other's memory; if they cannot, all data passes through host memory."""
    pairs = box.gpus.facts.pairs
    apart = [pair for pair in pairs if pair.peer_to_peer is False]
    if apart:
        why = join_words(list(dict.fromkeys(pair.obstacle for pair in apart)))
        which, where = ("no GPU can", "") if len(apart) == len(pairs) else ("not all GPUs can", f"{_named(apart)}: ")
        vendor = vendor_to_name(box.gpus.source_name)
        lacking = ", and GeForce GPUs do not support it" if vendor.torch_runtime == "cuda" else ""
        command = vendor.topology.replace("-m", "-p2p r")
        remedy = f"check `{command}`; virtual machines, IOMMU and ACS turn it off{lacking}"
        sentence = f"{which} read the memory of other GPUs ({where}{why}), so data passes through the host's memory"
        yield Finding("note", "peer-to-peer", sentence, remedy)
    elif pairs and all(pair.peer_to_peer for pair in pairs):
        yield Finding("ok", "peer-to-peer", "every GPU can read the memory of all other GPUs")


def _named(pairs: Sequence[GpuPair]) -> str:
    """Format pairs, like `GPUs 0-1, 2-3 and 4 more pairs`."""
    names = [f"{pair.first}-{pair.second}" for pair in pairs]
    more = len(names) - MOST_NAMED
    return "GPUs " + join_words([*names[:MOST_NAMED], *([plural(more, "more pair")] if more > 0 else [])])


def _longest(pairs: Iterable[GpuPair]) -> str:
    """Describe the longest path between the GPUs in these pairs."""
    ways = [way for way in WAYS if any(pair.path == way for pair in pairs)]
    return f"{WAYS[ways[-1]]} ({ways[-1]}) at most" if ways else "by a path that the driver does not report"
