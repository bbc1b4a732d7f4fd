"""Errors that an NVIDIA driver reports by number (Xid). Errors from before the start of listening are not reported."""

from __future__ import annotations

import contextlib
import time
from types import ModuleType
from typing import Any

from sae_tui.gpu.base import Xid

_CRITICAL = 8  # event type
_MOST_AT_ONCE = 100
# NVIDIA's "XID Errors" lists about 150; these are the ones that occur in training.
WORDS = {
    13: "a kernel used an illegal address or instruction",
    31: "a kernel accessed memory that it may not use",
    43: "a kernel hung or was reset; its program ends",
    45: "a program was ended during a computation",
    46: "the GPU stopped computing; reset the GPU",
    48: "the memory had errors that could not be corrected; reset the GPU",
    61: "the GPU's firmware failed",
    62: "the GPU's firmware halted",
    63: "a row of the memory was replaced",
    64: "a row of the memory could not be replaced",
    68: "the video engine failed",
    74: "NVLink failed",
    79: "the GPU has fallen off the bus",
    92: "many memory errors were corrected",
    94: "a memory error ended one program; the others continue",
    95: "a memory error was not contained; reset the GPU",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware failed",
    140: "memory errors could not be corrected",
}


# Xids that, according to NVIDIA's list, require a reset, a repair or a new GPU.
FATAL = frozenset({46, 48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140})


def in_words(number: int) -> str:
    """Return the error as text, like `Xid 79: the GPU has fallen off the bus`."""
    words = WORDS.get(number)
    return f"Xid {number}: {words}" if words else f"Xid {number}, see NVIDIA's list of Xid errors"


class XidListener:
    """Listens for the errors of one GPU."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._listens_to: Any = None
        self._last: Xid | None = None

    def poll(self, handle: Any) -> Xid | None:
        """Return the latest error since the first call, without waiting for one."""
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            if self._listens_to is not handle:
                self._listen(handle)
            # Each call returns one event; if there is none, NVML raises a timeout error, which ends the loop.
            for _ in range(_MOST_AT_ONCE if self._events is not None else 0):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                number = int(event.eventData)
                # A later non-fatal error must not hide a fatal one.
                if number in FATAL or not (self._last and self._last.is_fatal):
                    self._last = Xid(number, time.time(), in_words(number), number in FATAL)
        return self._last

    def _listen(self, handle: Any) -> None:
        """Register for the GPU's errors; after a failure, do not try again with the same handle."""
        self._listens_to, before, self._events = handle, self._events, None
        if before is not None:
            self._nvml.nvmlEventSetFree(before)
        events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(handle, _CRITICAL, events)
        self._events = events
