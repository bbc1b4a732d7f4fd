"""The values that are read only while the page of a GPU is open: clocks, links and faults.

A supervisor that waits does not need this module, so it is imported only on demand.
"""

from __future__ import annotations

from dataclasses import dataclass

from sae_tui.gpu.base import Xid
from sae_tui.gpu.limits import drop_impossible


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG slice of a GPU."""

    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """One reading of a GPU's details; `None` means "sensor not supported".

    `slowed_by` lists the throttling reasons in words; empty if there are none. `energy_j` counts since the driver was
    loaded, memory errors count since the last reset, and `xid` is the newest error since the program began to listen.
    Percentages of the multiprocessors are means since the previous reading. `failed` lists the fields with
    impossible values, each with the reason.
    """

    timestamp: float
    memory_bandwidth_percent: int | None = None
    memory_reserved_bytes: int | None = None
    sm_clock_mhz: int | None = None
    most_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    most_memory_clock_mhz: int | None = None
    performance_state: int | None = None
    slowed_by: tuple[str, ...] | None = None
    slowdown_c: int | None = None
    fan_percent: int | None = None
    energy_j: float | None = None
    pcie_generation: int | None = None
    most_pcie_generation: int | None = None
    pcie_width: int | None = None
    most_pcie_width: int | None = None
    pcie_received_bytes_s: float | None = None
    pcie_sent_bytes_s: float | None = None
    nvlinks: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remapping_failed: bool | None = None
    remapping_pending: bool | None = None
    recovery: str | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    bus_id: str | None = None
    sm_percent: float | None = None
    occupancy_percent: float | None = None
    tensor_percent: float | None = None
    xid: Xid | None = None
    instances: tuple[Instance, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    failed: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if failed := drop_impossible(self):
            object.__setattr__(self, "failed", tuple(failed.items()))
