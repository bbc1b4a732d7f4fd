"""Values read only while a GPU's page is open: clocks, links and faults.

The queue process does not need this module, so it is imported only on demand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sae_tui.gpu.base import Condition
from sae_tui.gpu.sensors import BYTES, COUNT, JOULES, MHZ, PERCENT, Limits, Sensor, drop_impossible

_GENERATION: Limits = (0, 15)
_LANES: Limits = (0, 64)
_RATE: Limits = (0.0, 1e13)


@dataclass(frozen=True, slots=True)
class Instance:
    """A GPU's MIG slice."""

    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """A GPU's details and condition at one point in time; `None` means "sensor not supported".

    `energy_j` is the energy used since the driver was loaded, and `ecc_corrected` is the number of memory errors
    corrected since the last reset. The multiprocessor percentages are means since the previous reading. `failed` lists
    the fields with impossible values, each with the reason.
    """

    timestamp: float
    condition: Condition = field(default_factory=Condition)
    sm_percent: Annotated[float | None, Sensor(limits=PERCENT, title="SM active", group="speed")] = None
    occupancy_percent: Annotated[float | None, Sensor(limits=PERCENT, title="SM occupancy", group="speed")] = None
    tensor_percent: Annotated[float | None, Sensor(limits=PERCENT, title="tensor cores", group="speed")] = None
    memory_bandwidth_percent: Annotated[int | None, Sensor(limits=PERCENT, title="memory bus", group="speed")] = None
    encoder_percent: Annotated[int | None, Sensor(limits=PERCENT, title="encoder", group="speed")] = None
    decoder_percent: Annotated[int | None, Sensor(limits=PERCENT, title="decoder", group="speed")] = None
    most_sm_clock_mhz: Annotated[int | None, Sensor(limits=MHZ)] = None
    memory_clock_mhz: Annotated[int | None, Sensor(limits=MHZ)] = None
    most_memory_clock_mhz: Annotated[int | None, Sensor(limits=MHZ)] = None
    energy_j: Annotated[float | None, Sensor(limits=JOULES)] = None
    pcie_generation: Annotated[int | None, Sensor(limits=_GENERATION)] = None
    most_pcie_generation: Annotated[int | None, Sensor(limits=_GENERATION)] = None
    pcie_width: Annotated[int | None, Sensor(limits=_LANES)] = None
    most_pcie_width: Annotated[int | None, Sensor(limits=_LANES)] = None
    pcie_received_bytes_s: Annotated[float | None, Sensor(limits=_RATE)] = None
    pcie_sent_bytes_s: Annotated[float | None, Sensor(limits=_RATE)] = None
    memory_reserved_bytes: Annotated[int | None, Sensor(limits=BYTES)] = None
    ecc_corrected: Annotated[int | None, Sensor(limits=COUNT)] = None
    remapped_rows: Annotated[int | None, Sensor(limits=(0, 1_000_000))] = None
    nvlinks: int | None = None
    persistence: bool | None = None
    bus_id: str | None = None
    instances: tuple[Instance, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    failed: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if failed := drop_impossible(self):
            object.__setattr__(self, "failed", tuple(failed.items()))
