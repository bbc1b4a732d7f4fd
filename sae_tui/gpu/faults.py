"""Words for what can be wrong with cards of every vendor; a vendor's own are beside its source."""

from __future__ import annotations

from sae_tui.gpu.base import SourceUnavailable

LOST = "the GPU has fallen off the bus; a reboot is needed"
NO_ANSWER_YET = "no answer yet"


def silent(limit_s: float, tool: str) -> SourceUnavailable:
    """Return the error for a driver that did not answer within `limit_s` seconds; `tool` is its vendor's program."""
    return SourceUnavailable(
        f"the GPU driver did not answer within {limit_s:g} s", f"see whether {tool} does, or reboot", is_broken=True
    )
