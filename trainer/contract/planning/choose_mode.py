"""Resolve `auto` once ranks and devices are known: the parallel mode, and micro-batches that fit.

How a step is split never changes its content: it has as many tokens as the job file asks for.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from trainer.contract.planning import memory, step_time
from trainer.contract.planning.hardware import Speeds
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, steps_alone
from trainer.contract.settings.sources import DataShape

# Tokens of the smallest micro-batch that is tried where nothing larger fits.
LEAST_BATCH = 64
# Another mode must be this many times faster than ddp to be chosen: the time model is no more exact than that.
LEAST_GAIN = 1.1


class Place(msgspec.Struct, frozen=True):
    """What a job is to run on: ranks on one kind of device, their speed, and the free bytes of the fullest device."""

    ranks: int
    speeds: Speeds
    device: str = "cuda"
    free_bytes: int | None = None
    # The device whose memory use is estimated ("cuda" for simulated cards, on which CPU processes run); else `device`.
    memory_of: str | None = None


class Settled(msgspec.Struct, frozen=True):
    """A job with `auto` resolved in mode and batch size, its expected step time and bytes per rank, and the reason."""

    job: JobConfig
    time: step_time.StepTime
    needs_bytes: int
    fits: bool
    reason: str = ""


def settle(job: JobConfig, shape: DataShape, place: Place) -> Settled:
    """Choose the fastest mode that fits, the plain one unless another is clearly faster; else the least memory."""
    ways = [way for mode, sharing in _ways(job, shape, place) for way in [_cut(job, mode, sharing, shape, place)]]
    best = min(ways, key=lambda way: (not way.fits, _seeming_s(way, ways[0]) if way.fits else way.needs_bytes))
    if job.parallel.mode != "auto" or place.ranks == 1:
        return best
    return msgspec.structs.replace(best, reason=_reason(best, ways, shape, place))


def _seeming_s(way: Settled, plain: Settled) -> float:
    return way.time.total_s * (1.0 if way is plain else LEAST_GAIN)


def _ways(job: JobConfig, shape: DataShape, place: Place) -> Iterator[tuple[str, int]]:
    """List the modes to consider, each with the number of ranks that share the latents in it; the plain one first."""
    ranks, mode = place.ranks, job.parallel.mode
    if mode != "auto":
        yield mode, job.latent_ranks(ranks)
        return
    yield ("ddp" if ranks > 1 else "single"), 1
    if 1 < ranks <= len(members(job)):
        yield "sweep", 1
    narrowest = min(member.sae.width(shape.d_in) for member in members(job).values())
    if steps_alone(job):
        for sharing in range(2, ranks + 1):
            if ranks % sharing == 0 and sharing <= narrowest:
                yield ("tensor" if sharing == ranks else "hybrid"), sharing


def _cut(job: JobConfig, mode: str, sharing: int, shape: DataShape, place: Place) -> Settled:
    """Settle the job in this mode with the largest micro-batches that fit, or the smallest where none does."""
    whole = job.effective_batch(place.ranks)
    shared = job.replace("parallel", mode=mode, latent_ranks=sharing if mode == "hybrid" else job.parallel.latent_ranks)
    settled = None
    for size in _sizes(job, mode, sharing, place.ranks):
        cut = shared.replace("train", batch_size=size)
        if cut.effective_batch(place.ranks) != whole or job.train.batch_size == "auto":
            cut = cut.replace("train", global_batch_size=whole)
        needs = memory.estimate(
            cut, shape.d_in, place.ranks, d_out=shape.d_out, device=place.memory_of or place.device
        ).total
        fits = place.free_bytes is None or needs <= place.free_bytes
        time = step_time.step_time(cut, shape.d_in, place.ranks, place.speeds, d_out=shape.d_out, device=place.device)
        settled = Settled(cut, time, needs, fits)
        if fits:
            break
    assert settled is not None
    return settled


def _sizes(job: JobConfig, mode: str, sharing: int, ranks: int) -> Iterator[int]:
    """List micro-batch sizes to try, in tokens: the one asked for, or for "auto" a rank's whole step, then halves."""
    asked, with_tokens = job.train.batch_size, 1 if mode == "sweep" else ranks // sharing
    if asked != "auto" and (job.parallel.mode == mode or with_tokens == ranks):
        yield asked
        return
    least = min(LEAST_BATCH, job.micro_batch(ranks)) if asked == "auto" else asked
    # A rank that sees several ranks' tokens holds only a part of the latents or of the SAEs, so a larger micro-batch
    # needs no more memory.
    size = -(-job.effective_batch(ranks) // with_tokens) if asked == "auto" else asked * (ranks // with_tokens)
    while size > least:
        yield size
        size = -(-size // 2)
    yield least


def _reason(best: Settled, ways: list[Settled], shape: DataShape, place: Place) -> str:
    """Explain the choice, like `tensor on 4: 2.6× less time than ddp (which sends 1.2 GB per step at 12 GB/s)`."""
    choice = f"{_name_of(best)} on {place.ranks}"
    if not best.fits:
        return f"{choice}: needs least memory, {memory.gigabytes(best.needs_bytes)}, but that is more than is free"
    others = [way for way in ways if way is not best]
    if not any(way.fits for way in others):
        return f"{choice}: no other mode fits into the {memory.gigabytes(place.free_bytes or 0)} that are free"
    next_best = min((way for way in others if way.fits), key=lambda way: way.time.total_s)
    times = next_best.time.total_s / best.time.total_s
    wire = step_time.wire_of(next_best.job, shape.d_in, place.ranks, d_out=shape.d_out, device=place.device)
    speed = f"{_gb(wire.n_bytes)} per step at {_gb(place.speeds.bus_bytes_per_s)}/s"
    assumed = "" if place.speeds.is_measured else ", speeds assumed"
    gain = f"{times:.1f}× less time than" if times >= LEAST_GAIN else "hardly slower than"
    return f"{choice}: {gain} {_name_of(next_best)} (which sends {speed}{assumed})"


def _name_of(way: Settled) -> str:
    parallel = way.job.parallel
    return f"hybrid of {parallel.latent_ranks}" if parallel.mode == "hybrid" else parallel.mode


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"
