"""Reads GPUs: sources, sampler, ring and history; independent of any screen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer.contract.errors import UserError

if TYPE_CHECKING:
    from sae_tui.gpu.base import GpuSource

# Strings, so that listing imports nothing; a new kind of GPU is a new file and a line here.
BACKENDS = {
    "nvml": "sae_tui.gpu.nvml:Nvml",
    "simulated": "sae_tui.gpu.simulated:Simulated",
    "none": "sae_tui.gpu.none:NoGpus",
}
AUTO = "nvml"


def load_source(name: str, **options: Any) -> GpuSource:
    """Return the source of this name, not yet opened; `options` go to its constructor. Raise `UserError` if unknown."""
    target = BACKENDS.get(AUTO if name == "auto" else name)
    if target is None:
        choices = " or ".join(f'"{each}"' for each in ("auto", *BACKENDS))
        raise UserError(f'the GPU source must be {choices}, not "{name}"')
    module, _, attribute = target.partition(":")
    source: GpuSource = getattr(importlib.import_module(module), attribute)(**options)
    return source
