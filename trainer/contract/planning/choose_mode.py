"""Resolves `auto` once the ranks and devices are known: chooses a parallel mode and a micro-batch size that fits.

How a step is split never changes its result: each step always has the number of tokens requested in the job file.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from trainer.contract.planning import memory, step_time
from trainer.contract.planning.hardware import Speeds
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.wording import distinct_sizes, gibibytes, rate

# Number of tokens in the smallest micro-batch to try.
LEAST_BATCH = 64
# To be chosen, a mode must be faster than ddp by this factor, because predicted times are accurate only to within this
# factor. With two CPU processes on an idle machine, the time predicted for the faster mode was accurate to within 2 %,
# but after only 60 ms of measurement on a busy machine, the prediction was off by 6 %.
LEAST_GAIN = 1.1


class PlannedResources(msgspec.Struct, frozen=True):
    """The resources available to a planned job: the speeds of its ranks, and the memory that each rank may use.

    `free_bytes` is the free memory of the device with the least free memory, or less if the job may not use all of it.
    """

    speeds: Speeds
    free_bytes: int | None = None
    # The device whose memory is estimated, if it differs from the ranks' device: a GPU if CPU processes simulate GPUs.
    memory_of: str | None = None


class Settled(msgspec.Struct, frozen=True):
    """A workload with its mode and batch size resolved, its time and memory, and the reason for the choice.

    `held` is the same workload on the devices whose memory is estimated; these differ from the ranks' devices if GPUs
    are simulated.
    """

    work: Workload
    held: Workload
    time: step_time.StepTime
    memory: Memory
    fits: bool
    reason: str = ""

    @property
    def job(self) -> JobConfig:
        return self.work.job

    @property
    def needs_bytes(self) -> int:
        """The memory in bytes that the most demanding rank needs."""
        return self.memory.total


def settle(work: Workload, place: PlannedResources) -> Settled:
    """Choose the fastest mode that fits or, if none fits, the mode that needs the least memory.

    The plain mode is preferred if no other mode is clearly faster. The comparison uses step times with dead latents
    because most steps in a run may have dead latents.
    """
    ways = [_cut(work, mode, sharing, place) for mode, sharing in _ways(work)]
    best = min(ways, key=lambda way: (not way.fits, _seeming_s(way, ways[0]) if way.fits else way.needs_bytes))
    if work.job.parallel.mode != "auto" or work.ranks == 1:
        return best
    return msgspec.structs.replace(best, reason=_reason(best, ways, place))


def _seeming_s(way: Settled, plain: Settled) -> float:
    return way.time.with_dead_s * (1.0 if way is plain else LEAST_GAIN)


def _ways(work: Workload) -> Iterator[tuple[str, int]]:
    """Yield the candidate modes, plain mode first, each with the number of ranks that shard the latents."""
    if work.job.parallel.mode != "auto":
        yield work.mode, work.latent_ranks
        return
    yield work.mode, 1
    # In "sweep" mode, the devices of SAEs that are dropped would be idle. The layers of a cross-layer transcoder share
    # their errors, so all layers are trained on the same device.
    if 1 < work.ranks <= len(work.members) and not work.job.train.halving and work.job.n_layers == 1:
        yield "sweep", 1
    if work.is_elementwise:
        for sharing in range(2, work.ranks + 1):
            if work.ranks % sharing == 0 and sharing <= work.narrowest:
                yield ("tensor" if sharing == work.ranks else "hybrid"), sharing


def _cut(work: Workload, mode: str, sharing: int, place: PlannedResources) -> Settled:
    """Resolve a job in this mode with the largest micro-batches that fit, or the smallest ones if none fit."""
    whole, asked = work.tokens_per_step, work.job.parallel.latent_ranks
    shared = work.with_settings("parallel", mode=mode, latent_ranks=sharing if mode == "hybrid" else asked)
    settled = None
    for size in _sizes(work, mode, sharing):
        cut = shared.with_settings("train", batch_size=size)
        if cut.tokens_per_step != whole or work.job.train.batch_size == "auto":
            cut = cut.with_settings("train", global_batch_size=whole)
        held = cut if place.memory_of is None else cut.on_device(place.memory_of)
        needs = memory.estimate(held)
        fits = place.free_bytes is None or needs.total <= place.free_bytes
        settled = Settled(cut, held, step_time.step_time(cut, place.speeds), needs, fits)
        if fits:
            break
    assert settled is not None
    return settled


def _sizes(work: Workload, mode: str, sharing: int) -> Iterator[int]:
    """Yield the micro-batch sizes to try, in tokens, the largest first.

    If the job sets this mode, or if every rank gets different tokens, a requested size is the only one. Otherwise, the
    first size is a rank's tokens for an entire step or, if a size is requested, that size times the number of ranks
    with the same tokens. Successive halves follow, down to the requested size or, for "auto", to `LEAST_BATCH`.
    """
    asked, ranks = work.job.train.batch_size, work.ranks
    with_tokens = 1 if mode == "sweep" else ranks // sharing
    if asked != "auto" and (work.job.parallel.mode == mode or with_tokens == ranks):
        yield asked
        return
    least = min(LEAST_BATCH, work.micro_batch) if asked == "auto" else asked
    # A rank that processes the tokens of several ranks holds only some of the latents or SAEs, so its larger
    # micro-batch needs no more memory.
    size = -(-work.tokens_per_step // with_tokens) if asked == "auto" else asked * (ranks // with_tokens)
    while size > least:
        yield size
        size = -(-size // 2)
    yield least


def _reason(best: Settled, ways: list[Settled], place: PlannedResources) -> str:
    """Return the reason, such as `tensor on 4: 2.6× less time than ddp (which sends 1.2 GiB per step at 12.0 GB/s)`."""
    choice = f"{_name_of(best)} on {best.work.ranks}"
    if not best.fits:
        needs, may_take = distinct_sizes(best.needs_bytes, place.free_bytes or 0)
        return f"{choice}: needs the least memory, {needs}, but each rank may use only {may_take}"
    others = [way for way in ways if way is not best]
    if not any(way.fits for way in others):
        return f"{choice}: no other mode fits into the {gibibytes(place.free_bytes or 0)} that each rank may use"
    next_best = min((way for way in others if way.fits), key=lambda way: way.time.with_dead_s)
    times = next_best.time.with_dead_s / best.time.with_dead_s
    speed = _sent(next_best, place.speeds)
    assumed = "" if place.speeds.is_measured else ", speeds assumed"
    gain = f"{times:.1f}× less time than" if times >= LEAST_GAIN else "about as fast as"
    return f"{choice}: {gain} {_name_of(next_best)} (which sends {speed}{assumed})"


def _sent(way: Settled, speeds: Speeds) -> str:
    """Return how much a rank or, on several nodes, a node sends in a step, and at which speed."""
    wire = step_time.wire_of(way.work, speeds.nodes)
    if speeds.nodes > 1:
        return f"{gibibytes(wire.node_bytes)} per step from each node at {rate(speeds.node_bytes_per_s)}"
    return f"{gibibytes(wire.n_bytes)} per step at {rate(speeds.bus_bytes_per_s)}"


def _name_of(way: Settled) -> str:
    parallel = way.job.parallel
    return f"hybrid of {parallel.latent_ranks}" if parallel.mode == "hybrid" else parallel.mode
