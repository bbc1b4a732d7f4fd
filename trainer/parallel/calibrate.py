"""Measures, in about 0.3 s at the start of a run, the speed of every rank and of the bus between ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainer.contract.planning.hardware import CPU, Speeds, assumed_speeds
from trainer.parallel.group import Group
from trainer.parallel.process_group import World
from trainer.runtime.out_of_memory import hand_back, is_shortage
from trainer.runtime.precision import NARROW, autocast

T = TypeVar("T")

# The matmul sizes (tokens, d_in, latents), and the number of values to copy and to sum. With these sizes, the call
# overhead is negligible, but each operation still takes only milliseconds. Two CPU processes sum 2²¹ values, which fit
# into a cache, at 10 GB/s, but 2²³ values, the size of a step's gradients, at only 2 GB/s.
_PRODUCT = {"cpu": (512, 384, 2048), "cuda": (4096, 2048, 8192)}
_COPIED = {"cpu": 2**24, "cuda": 2**25}
_SUMMED = {"cpu": 2**23, "cuda": 2**24}
# If memory is short, try half of the latents or values, then a quarter, but not less: smaller data would fit in a cache
# and skew the measurement.
PARTS = (1, 2, 4)
# How long each measurement is repeated, in seconds. The fastest run counts, because other programs rarely slow down
# every run.
WINDOW_S = 0.06
N_TINY = 10


def measure(world: World, precision: str) -> list[Speeds]:
    """Measure every rank and return one `Speeds` per rank, the same list on all ranks.

    The bus speed is the minimum over all ranks. `precision` must not be "auto". A rank with too little memory for the
    full measurement is marked as not measured. Its speeds are then taken from a smaller measurement, or assumed.
    """
    speeds = _measure_all(world, precision)
    if world.device.type == "cuda":
        # Free the memory that the measurement has used, so that the run's peak memory does not include it.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return speeds


def _measure_all(world: World, precision: str) -> list[Speeds]:
    device = world.device
    assumed = assumed_speeds(device_name(device), precision, world.nodes)
    flops = within_memory(lambda parts: products_per_s(device, precision, parts), device)
    memory = within_memory(lambda parts: copied_per_s(device, parts), device)
    bus, link = _links_of(world)
    own = [
        flops.value or assumed.flops_per_s,
        memory.value or assumed.memory_bytes_per_s,
        *(bus or (assumed.bus_bytes_per_s, assumed.latency_s)),
        *(link or (assumed.node_bytes_per_s, assumed.node_latency_s)),
        flops.is_whole and memory.is_whole and bus is not None and link is not None,
    ]
    gathered = world.group.gather(torch.tensor(own, dtype=torch.float64, device=device)).cpu()
    (bus_s, link_s), (latency_s, far_s) = gathered[:, [2, 4]].amin(0).tolist(), gathered[:, [3, 5]].amax(0).tolist()
    return [
        Speeds(of_products, of_memory, bus_s, latency_s, bool(is_measured), world.nodes, link_s, far_s)
        for of_products, of_memory, *_, is_measured in gathered.tolist()
    ]


def _links_of(world: World) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Return the bandwidth and latency between the ranks of a node, and of a node's link to the other nodes.

    Each is None if a rank has too little memory. All ranks of a node use its link at the same time, as in training.
    """
    n, size = world.ranks_on_node, world.size
    if world.nodes == 1:
        return bus_of(world.group, world.device), (math.inf, 0.0)
    inner = world.part([range(first, first + n) for first in range(0, size, n)])
    bus = bus_of(inner, world.device)
    across = world.part([range(place, size, n) for place in range(n)])
    link = bus_of(across, world.device)
    for group in (inner, across):
        group.leave()
    return bus, link and (n * link[0], link[1])


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or `CPU` for any CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


class Within(NamedTuple, Generic[T]):
    """A measurement's result, or None if no size fits into memory; `is_whole` is true if the full size was measured."""

    value: T | None
    is_whole: bool


def within_memory(work: Callable[[int], T], device: torch.device) -> Within[T]:
    """Return the result of `work(parts)` for the smallest value in `PARTS` for which it fits into memory."""
    for parts in PARTS:
        try:
            return Within(work(parts), parts == 1)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
        hand_back(device)
    return Within(None, False)


def products_per_s(device: torch.device, precision: str, parts: int = 1) -> float:
    """Return the FLOP/s of a matmul with the encoder's shape and 1/`parts` of the latents."""
    n_tokens, d_in, n_latents = _PRODUCT[device.type]
    n_latents //= parts
    generator = torch.Generator(device).manual_seed(0)
    # Use random operands: a GPU multiplying constants draws less power and clocks higher than in training. Convert the
    # operands beforehand, because training also converts operands once for several matmuls.
    x, weights = (
        torch.randn(shape, generator=generator, device=device).to(NARROW.get(precision, torch.float32))
        for shape in ((n_tokens, d_in), (d_in, n_latents))
    )
    with autocast(precision, device):
        seconds = fastest(lambda: x @ weights, device)
    return 2 * n_tokens * d_in * n_latents / seconds


def copied_per_s(device: torch.device, parts: int = 1) -> float:
    """Return the bytes/s, read plus written, of a copy that is larger than the cache."""
    source = torch.ones(_COPIED[device.type] // parts, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(lambda: target.copy_(source), device)


def bus_of(group: Group, device: torch.device) -> tuple[float, float] | None:
    """Return the per-rank bandwidth of a large all-reduce in bytes/s, and the latency of a tiny all-reduce in seconds.

    Return None on all ranks if any rank has too little memory.
    """
    if group.size == 1:
        return torch.inf, 0.0
    own = within_memory(lambda parts: _with_room(_SUMMED[device.type] // parts, device), device).value
    n_values = int(group.gather(torch.tensor([0 if own is None else len(own)], device=device)).min())
    if own is None or not n_values:
        return None
    large, tiny = own[:n_values], torch.zeros(1, device=device)
    # Warm up: the first exchange also connects the ranks.
    group.sum_(tiny, large)
    seconds = seconds_of(lambda: _sums(group, large, 2), device) / 2
    latency_s = seconds_of(lambda: _sums(group, tiny, N_TINY), device) / N_TINY
    n_bytes = 2 * (group.size - 1) / group.size * large.nbytes
    return n_bytes / max(seconds - latency_s, 1e-9), latency_s


def _with_room(n_values: int, device: torch.device) -> Tensor:
    """Return a tensor to sum, after checking that its transfer buffers also fit into memory.

    A rank that ran out of memory during the sum would leave the other ranks waiting.
    """
    large = torch.zeros(n_values, device=device)
    torch.empty(2 * n_values, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return large


def _sums(group: Group, tensor: Tensor, times: int) -> None:
    for _ in range(times):
        group.sum_(tensor)


def pairs_of(world: World) -> dict[str, float]:
    """Return a dict mapping each pair of ranks, such as `0-1`, to its bytes/s; the dict is the same on all ranks.

    While one pair is measured, the other ranks are idle.
    """
    speeds = {}
    for first in range(world.size):
        for second in range(first + 1, world.size):
            pair = world.part([[first, second]])
            own = _sums_per_s(pair, world.device) if pair.size > 1 else 0.0
            figures = world.group.gather(torch.tensor([own], dtype=torch.float64, device=world.device))
            speeds[f"{first}-{second}"] = float(figures.max())
    return speeds


def _sums_per_s(pair: Group, device: torch.device) -> float:
    """Return the bytes/s sent by each of two ranks in an all-reduce."""
    large = torch.zeros(_SUMMED[device.type], device=device)
    # Warm up: the first exchange also connects the two ranks.
    pair.sum_(large)
    return large.nbytes / seconds_of(lambda: pair.sum_(large), device)


def fastest(work: Callable[[], Any], device: torch.device) -> float:
    """Return the duration, in seconds, of the fastest run of `work` within `WINDOW_S`, after one warm-up run."""
    work()
    times: list[float] = []
    until = time.perf_counter() + WINDOW_S
    while not times or time.perf_counter() < until:
        times.append(seconds_of(work, device))
    return min(times)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long `work` takes, in seconds, including the device work it queues."""
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
