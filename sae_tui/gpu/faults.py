"""Messages about faults that can occur on any vendor's GPUs. Vendor-specific messages are in separate modules."""

from __future__ import annotations

from sae_tui.gpu.base import SourceUnavailable

LOST = "the GPU has fallen off the bus; a reboot is needed"
NO_ANSWER_YET = "no response yet"


def silent(limit_s: float, tool: str) -> SourceUnavailable:
    """Return the error to raise if a driver did not respond in `limit_s` seconds; `tool` is the vendor's program."""
    return SourceUnavailable(
        f"the GPU driver did not respond within {limit_s:g} s", f"see whether {tool} does, or reboot", is_broken=True
    )
