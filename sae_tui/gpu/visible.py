"""Leaves out the cards that CUDA_VISIBLE_DEVICES hides. All are sampled and stored, but only the others are shown."""

from __future__ import annotations

from collections.abc import Iterable

from sae_tui.gpu.base import GpuSample, GpuSource
from trainer.contract.planning.visible import VARIABLE, visible_devices, visible_indices


def limit_of(source: GpuSource) -> str | None:
    """Return CUDA_VISIBLE_DEVICES where it applies to these cards; None where it is not set or they are simulated."""
    return visible_devices() if source.cuda else None


def visible(samples: Iterable[GpuSample], limit: str | None) -> tuple[GpuSample, ...]:
    """Return the samples of the cards that may be used, by index."""
    samples = tuple(samples)
    if limit is None:
        return samples
    indices = visible_indices(limit, [(sample.index, sample.uuid) for sample in samples])
    return tuple(sample for sample in samples if sample.index in indices)


def counted(n_visible: int, n_cards: int) -> str:
    """Return how many cards are shown, like `2 of 8 GPUs, by CUDA_VISIBLE_DEVICES`; "" if none is hidden."""
    return f"{n_visible} of {n_cards} GPUs, by {VARIABLE}" if n_visible < n_cards else ""


def all_hidden(limit: str | None, n_cards: int) -> str:
    """Return why no card can be used, and what to do, where all are hidden."""
    if limit is not None and limit.strip().startswith("MIG-"):
        return f"{VARIABLE}={limit} names MIG instances, which sae-tui cannot choose yet; name whole GPUs"
    return f'{VARIABLE}="{limit}" leaves 0 of {n_cards} GPUs; unset it, or name GPUs in it'
