"""Reads GPUs, samples them regularly and stores their history. This package contains no UI code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer.contract.errors import UserError
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor, vendors_here

if TYPE_CHECKING:
    from sae_tui.gpu.base import GpuSource

AUTO = "auto"
_SEVERAL = "sae_tui.gpu.several:Several"
# Sources that do not read real GPUs. The values are import paths so that listing the names does not import the
# classes.
_STAND_INS = {"simulated": "sae_tui.gpu.simulated:Simulated", "none": "sae_tui.gpu.none:NoGpus"}


def source_names() -> tuple[str, ...]:
    """Return the values accepted by `--gpu-source`."""
    return (AUTO, *VENDORS, *_STAND_INS)


def load_source(name: str, **options: Any) -> GpuSource:
    """Return the source with this name, without opening it; `options` are passed to the source's constructor.

    Raise `UserError` if no source has this name.
    """
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
    """Resolve "auto" to the vendor whose driver is installed, or keep "auto" if several vendors' drivers are installed.

    If no driver is installed, return the first supported vendor, whose source then reports what is missing. Return any
    other name unchanged.
    """
    if name != AUTO:
        return name
    here = vendors_here()
    return AUTO if len(here) > 1 else next(iter(here or VENDORS))


def vendor_to_name(source_name: str) -> Vendor:
    """Return the vendor to name in messages about a source's GPUs; for simulated GPUs, return the first vendor."""
    return VENDORS.get(source_name) or next(iter(VENDORS.values()))
