"""Variables that PyTorch reads once, at the first use of a GPU; what the user sets takes precedence."""

from __future__ import annotations

# Products that give the same result every time need it. PyTorch before 2.10 notes at the first product whether it is
# set, and then refuses every product of a deterministic run; what a rank measures before it trains are products too.
_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def presets() -> dict[str, str]:
    """Return variables and values for ranks on GPUs."""
    return dict(_WORKSPACE)
