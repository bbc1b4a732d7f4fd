"""Reads GPUs: sources, sampler, ring and history; independent of any screen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer.contract.errors import UserError
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor, vendors_here

if TYPE_CHECKING:
    from sae_tui.gpu.base import GpuSource

AUTO = "auto"
_SEVERAL = "sae_tui.gpu.several:Several"
# Sources without cards: strings, so that listing them imports nothing.
_STAND_INS = {"simulated": "sae_tui.gpu.simulated:Simulated", "none": "sae_tui.gpu.none:NoGpus"}


def source_names() -> tuple[str, ...]:
    """Return what `--gpu-source` takes."""
    return (AUTO, *VENDORS, *_STAND_INS)


def load_source(name: str, **options: Any) -> GpuSource:
    """Return the source of this name, not yet opened; `options` go to its constructor. Raise `UserError` if unknown."""
    name = resolve(name)
    if name == AUTO:
        return _load(_SEVERAL, [load_source(vendor) for vendor in vendors_here()])
    target = VENDORS[name].source if name in VENDORS else _STAND_INS.get(name)
    if target is None:
        choices = " or ".join(f'"{each}"' for each in source_names())
        raise UserError(f'the GPU source must be {choices}, not "{name}"')
    return _load(target, **options)


def _load(target: str, *sources: list[GpuSource], **options: Any) -> GpuSource:
    module, _, attribute = target.partition(":")
    source: GpuSource = getattr(importlib.import_module(module), attribute)(*sources, **options)
    return source


def resolve(name: str) -> str:
    """Return what "auto" stands for: the one vendor whose driver is here, "auto" itself where there are several.

    Without any driver it is the first vendor, whose source then says what is missing. Other names stay as they are.
    """
    if name != AUTO:
        return name
    here = vendors_here()
    return AUTO if len(here) > 1 else next(iter(here or VENDORS))


def vendor_to_name(source_name: str) -> Vendor:
    """Return the vendor to speak of where the cards of a source are meant; simulated ones are the first vendor's."""
    return VENDORS.get(source_name) or next(iter(VENDORS.values()))
