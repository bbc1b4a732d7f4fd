"""Seeing GPUs: sources, sampler, ring and history; knows nothing of a screen."""

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
    """The source of this name, not yet opened; `options` go to its constructor."""
    target = BACKENDS.get(AUTO if name == "auto" else name)
    if target is None:
        known = " or ".join(f'"{each}"' for each in ("auto", *BACKENDS))
        raise UserError(f'the GPU source must be {known}, not "{name}"')
    module, _, attribute = target.partition(":")
    source: GpuSource = getattr(importlib.import_module(module), attribute)(**options)
    return source
