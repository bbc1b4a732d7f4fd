"""How fast the GPUs exchange, measured while nobody uses them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

import msgspec

from sae_tui.doctor.base import Box, Finding
from sae_tui.jobs.cards.availability import GpuChoice, choices
from sae_tui.jobs.cards.locks import GpuLocks, lock_folder
from sae_tui.jobs.cards.occupancy import Occupancy
from sae_tui.jobs.wording import listed, plural
from trainer.contract.errors import UserError
from trainer.contract.json_file import decoded
from trainer.contract.planning.hardware import Box as KnownSpeeds
from trainer.contract.planning.hardware import Speeds, read_box, write_box
from trainer.contract.runs import nccl

# Imports of torch on all ranks from a network disk take most of it.
LIMIT_S = 120.0
# What a PCIe 4.0 slot with all its lanes reaches through the host's memory.
LEAST_BYTES_PER_S = 12e9
BUSY = "probe again when nobody uses them"


class Probed(msgspec.Struct, frozen=True):
    """What `python -m trainer probe --json` prints: figures of each rank, of all together, and of pairs of ranks."""

    device: str
    ranks: int
    precision: str
    flops_per_s: list[float]
    memory_bytes_per_s: list[float]
    bus_bytes_per_s: float
    latency_s: float
    pairs: dict[str, float]

    @property
    def speeds(self) -> Speeds:
        """What all can rely on."""
        return Speeds(
            min(self.flops_per_s), min(self.memory_bytes_per_s), self.bus_bytes_per_s, self.latency_s, is_measured=True
        )


def check_bus(box: Box) -> Iterator[Finding]:
    """Only between GPUs that are all idle, and nobody's job starts on them meanwhile."""
    if not box.gpus.cuda:
        yield Finding("note", "bus", "there are no real GPUs to measure it between", "see it on a box with two of them")
        return
    usable = [choice for choice in choices(box.gpus.samples, Occupancy(box.data).holders()) if choice.uuid]
    busy = [f"GPU {choice.index} is {choice.reason}" for choice in usable if choice.state == "busy"]
    idle = [choice for choice in usable if choice.state == "available"]
    if busy:
        yield Finding("note", "bus", f"not measured, so as not to disturb others: {'; '.join(busy)}", BUSY)
    elif len(idle) < 2:
        sentence = f"not measured, for there is only {plural(len(idle), 'GPU')} that can be used"
        yield Finding("note", "bus", sentence if idle else "not measured, for no GPU can be used", "it takes two")
    else:
        yield from _measured(box, idle)


def _measured(box: Box, idle: Sequence[GpuChoice]) -> Iterator[Finding]:
    try:
        box.data.create()
    except UserError as error:
        yield Finding("note", "bus", f"not measured, for its result cannot be kept: {error}", "mend the data folder")
        return
    locks = GpuLocks(lock_folder(box.data, box.gpus.source_name), [choice.uuid for choice in idle])
    if not locks.take():
        reason = locks.why or "a job takes one of the GPUs just now"
        yield Finding("note", "bus", f"not measured, for {reason}", BUSY)
        return
    try:
        probed, failure = _probe(box, idle)
        staged = None if probed else _probe(box, idle, **nccl.STAGED)[0]
    finally:
        locks.release()
    if staged:
        yield _peers_fail(failure)
        probed = staged
    if probed is None:
        remedy = "see `python -m trainer probe`, and NCCL's own words with NCCL_DEBUG=INFO"
        yield Finding("error", "bus", f"it cannot be measured: {failure}", remedy)
        return
    known = msgspec.structs.replace(read_box(box.data.box_file), peers_fail=staged is not None)
    write_box(box.data.box_file, _known_with(known, probed))
    yield _judged(probed)
    yield from _slow_pairs(probed, [choice.index for choice in idle])


def _peers_fail(failure: str) -> Finding:
    """Where a GPU may read another one's memory, but what it reads gets lost on the way."""
    sentence = f"GPUs cannot exchange by reading each other's memory ({failure}), only by way of the host's"
    remedy = "turn off IOMMU and ACS in the BIOS, then run this again; until then jobs get NCCL_P2P_DISABLE=1"
    return Finding("warning", "bus", sentence, remedy)


def _probe(box: Box, idle: Sequence[GpuChoice], **environ: str) -> tuple[Probed | None, str]:
    """The figures, or None and why there are none. Rank n is on the n-th of these GPUs."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(choice.uuid for choice in idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command = [sys.executable, "-P", "-m", "trainer", "probe", "--gpus", f"auto:{len(idle)}", "--json"]
    answer, failure = box.output(command, LIMIT_S, **visible, **environ)
    if failure:
        return None, failure
    try:
        return decoded(answer.rpartition("\n")[2], Probed), ""
    except ValueError:
        return None, "its answer is no JSON"


def _known_with(known: KnownSpeeds, probed: Probed) -> KnownSpeeds:
    """Two ranks exchange as fast as the slowest pair, whichever of the GPUs they get."""
    if probed.ranks > 2 and probed.pairs:
        pair = msgspec.structs.replace(probed.speeds, bus_bytes_per_s=min(probed.pairs.values()))
        known = known.with_measured(probed.device, probed.precision, 2, pair)
    return known.with_measured(probed.device, probed.precision, probed.ranks, probed.speeds)


def _judged(probed: Probed) -> Finding:
    speed = f"{plural(probed.ranks, 'GPU')} exchange {probed.bus_bytes_per_s / 1e9:.1f} GB/s in an all-reduce"
    if probed.bus_bytes_per_s >= LEAST_BYTES_PER_S:
        return Finding("ok", "bus", f"{speed}, and wait {probed.latency_s * 1e6:.0f} µs for a small one")
    sentence = f"{speed}, with which ddp of a wide SAE is slower than one card"
    return Finding("warning", "bus", sentence, 'use parallel.mode "tensor", or "auto", which chooses by this figure')


def _slow_pairs(probed: Probed, indices: Sequence[int]) -> Iterator[Finding]:
    """Those below half of what is usual between two of these GPUs."""
    if len(probed.pairs) < 2:
        return
    usual = statistics.median(probed.pairs.values())
    slow = {pair: speed for pair, speed in probed.pairs.items() if speed < usual / 2}
    if slow:
        named = [
            f"GPUs {'-'.join(str(indices[int(rank)]) for rank in pair.split('-'))} ({speed / 1e9:.1f} GB/s)"
            for pair, speed in slow.items()
        ]
        sentence = f"{listed(named)} exchange less than half of the {usual / 1e9:.1f} GB/s that is usual here"
        yield Finding(
            "warning", "bus", sentence, "give a job other GPUs, and see their slots with `nvidia-smi topo -m`"
        )
