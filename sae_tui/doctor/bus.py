"""Measures how fast idle GPUs exchange data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.jobs.gpus.availability import GpuChoice, choices
from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder
from sae_tui.jobs.gpus.occupancy import Occupancy
from trainer.contract.errors import UserError
from trainer.contract.extras import missing_of_trainer
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import VENDORS, is_slice, mixture
from trainer.contract.planning.hardware import MeasuredHardware, Speeds, read_box, write_box
from trainer.contract.runs import nccl
from trainer.contract.wording import join_words, plural, rate

# All ranks import torch, which takes most of this time if torch is on a network disk.
LIMIT_S = 120.0
# The speed of a 16-lane PCIe 4.0 slot when data passes through host memory.
LEAST_BYTES_PER_S = 12e9
BUSY = "probe again when these GPUs are idle"


class Probed(msgspec.Struct, frozen=True):
    """The output of `sae-train probe --json`: speeds per rank, for all ranks combined, and per pair of ranks."""

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
        """The minimum of each speed over all ranks."""
        return Speeds(
            min(self.flops_per_s), min(self.memory_bytes_per_s), self.bus_bytes_per_s, self.latency_s, is_measured=True
        )


def check_bus(box: CheckedMachine) -> Iterator[Finding]:
    """Measure the bus if all GPUs are idle; locks prevent jobs from starting on them in the meantime.

    If packages are missing, return without a finding, because `check_torch` reports them.
    """
    if not box.python and missing_of_trainer():
        return
    if not box.gpus.cuda:
        yield Finding(
            "note",
            "bus",
            "not measured, since this machine has no real GPUs",
            "run it on a machine with at least two GPUs",
        )
        return
    listed = choices(box.gpus.samples, Occupancy(box.data).holders())
    # MIG slices cannot exchange data.
    usable = [choice for choice in listed if choice.uuid and not is_slice(choice.uuid)]
    busy = [f"GPU {choice.index} is {choice.reason}" for choice in usable if choice.state == "busy"]
    idle = [choice for choice in usable if choice.state == "available"]
    if busy:
        yield Finding("note", "bus", f"not measured, to avoid disturbing others: {'; '.join(busy)}", BUSY)
    elif len(idle) < 2:
        sentence = f"not measured, since only {plural(len(idle), 'GPU')} can be used"
        yield Finding(
            "note", "bus", sentence if idle else "not measured, since no GPU can be used", "two GPUs are needed"
        )
    elif mixed := mixture(choice.vendor for choice in idle):
        yield Finding("note", "bus", f"not measured, since these are {mixed}", "choose one with --gpu-source")
    else:
        yield from _measure(box, idle)


def _measure(box: CheckedMachine, idle: Sequence[GpuChoice]) -> Iterator[Finding]:
    """Lock the idle GPUs, measure and store their speeds, and report whether they are fast enough."""
    try:
        box.data.create()
    except UserError as error:
        yield Finding(
            "note", "bus", f"not measured, since the result cannot be stored: {error}", "repair the data folder"
        )
        return
    locks = GpuLocks(lock_folder(box.data, box.gpus.source_name), [choice.uuid for choice in idle])
    if not locks.take():
        reason = locks.why or "a job is starting on one of the GPUs"
        yield Finding("note", "bus", f"not measured, since {reason}", BUSY)
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
        remedy = "run `sae-train probe`, with NCCL_DEBUG=INFO for NCCL's messages"
        yield Finding("error", "bus", f"the measurement failed: {failure}", remedy)
        return
    speeds = msgspec.structs.replace(read_box(box.data.box_file), peers_fail=staged is not None)
    write_box(box.data.box_file, _add_measured(speeds, probed))
    yield _judge(probed)
    topology = VENDORS[idle[0].vendor or box.gpus.source_name].topology
    yield from _slow_pairs(probed, [choice.index for choice in idle], topology)


def _peers_fail(failure: str) -> Finding:
    """Report that peer-to-peer access is enabled but does not work."""
    sentence = f"GPUs cannot read each other's memory ({failure}), so they exchange data through the host's memory"
    remedy = "turn off IOMMU and ACS in the BIOS, then run this again; until then jobs run with NCCL_P2P_DISABLE=1"
    return Finding("warning", "bus", sentence, remedy)


def _probe(box: CheckedMachine, idle: Sequence[GpuChoice], **environ: str) -> tuple[Probed | None, str]:
    """Measure with rank n on the n-th of these GPUs; return the results, or None and the cause of failure."""
    visible = VENDORS[idle[0].vendor or box.gpus.source_name].pin(choice.uuid for choice in idle)
    words = ("probe", "--gpus", f"auto:{len(idle)}", "--json")
    answer, failure = box.trainer(*words, limit_s=LIMIT_S, **visible, **environ)
    if failure:
        return None, failure
    try:
        return decode_as(answer.rpartition("\n")[2], Probed), ""
    except ValueError:
        return None, "its output is not valid JSON"


def _add_measured(speeds: MeasuredHardware, probed: Probed) -> MeasuredHardware:
    """Merge the measured speeds into the known ones. The slowest pair of GPUs determines the speed for two ranks."""
    if probed.ranks > 2 and probed.pairs:
        pair = msgspec.structs.replace(probed.speeds, bus_bytes_per_s=min(probed.pairs.values()))
        speeds = speeds.with_measured(probed.device, probed.precision, 2, pair)
    return speeds.with_measured(probed.device, probed.precision, probed.ranks, probed.speeds)


def _judge(probed: Probed) -> Finding:
    """Report whether the exchange between all GPUs is fast enough."""
    speed = f"{plural(probed.ranks, 'GPU')} exchange {rate(probed.bus_bytes_per_s)} in an all-reduce"
    if probed.bus_bytes_per_s >= LEAST_BYTES_PER_S:
        return Finding("ok", "bus", f"{speed}; a small all-reduce takes {probed.latency_s * 1e6:.0f} µs")
    sentence = f"{speed}; at this speed, training a wide SAE with ddp is slower than on one GPU"
    return Finding("warning", "bus", sentence, 'use parallel.mode "tensor", or "auto", which uses this measurement')


def _slow_pairs(probed: Probed, indices: Sequence[int], topology: str) -> Iterator[Finding]:
    """Report the GPU pairs whose speed is below half the median."""
    if len(probed.pairs) < 2:
        return
    usual = statistics.median(probed.pairs.values())
    slow = {pair: speed for pair, speed in probed.pairs.items() if speed < usual / 2}
    if slow:
        named = [
            f"GPUs {'-'.join(str(indices[int(rank)]) for rank in pair.split('-'))} ({rate(speed)})"
            for pair, speed in slow.items()
        ]
        sentence = f"{join_words(named)} exchange data at less than half the median speed, {rate(usual)}"
        yield Finding(
            "warning", "bus", sentence, f"choose other GPUs for jobs, and check the slots of these with `{topology}`"
        )
