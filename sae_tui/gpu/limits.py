"""Limits of GPU readings. Drivers sometimes return nonsense: all bits set, or a negative number as unsigned.

Samples of all vendors are checked, since one impossible value would spoil the sums, stores and plots of all GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.contract.printable import printable

IMPOSSIBLE = "impossible value"
_BYTES = (0, 1 << 50)  # the largest machines have about 2^45 bytes
_PERCENT = (0, 200)  # fans exceed 100 % of their rated speed, and some drivers report 105 % utilisation
_MHZ = (0, 20_000)
_WATTS = (0.0, 10_000.0)
_COUNT = (0, 1 << 48)
_RATE = (0.0, 1e13)
# The lowest and highest possible value of each field, inclusive.
LIMITS: Mapping[str, tuple[float, float]] = {
    "utilization": _PERCENT,
    "memory_used_bytes": _BYTES,
    "memory_free_bytes": _BYTES,
    "memory_total_bytes": (1, 1 << 50),
    "memory_reserved_bytes": _BYTES,
    "memory_bandwidth_percent": _PERCENT,
    "temperature_c": (-60, 200),
    "slowdown_c": (30, 200),
    "power_w": _WATTS,
    "power_limit_w": (0.5, 10_000.0),
    "energy_j": (0.0, 1e13),  # 10 kW for 30 years
    "sm_clock_mhz": _MHZ,
    "memory_clock_mhz": _MHZ,
    "most_sm_clock_mhz": _MHZ,
    "most_memory_clock_mhz": _MHZ,
    "performance_state": (0, 15),
    "fan_percent": _PERCENT,
    "pcie_generation": (0, 15),
    "most_pcie_generation": (0, 15),
    "pcie_width": (0, 64),
    "most_pcie_width": (0, 64),
    "pcie_received_bytes_s": _RATE,
    "pcie_sent_bytes_s": _RATE,
    "ecc_corrected": _COUNT,
    "ecc_uncorrected": _COUNT,
    "remapped_rows": (0, 1_000_000),
    "encoder_percent": _PERCENT,
    "decoder_percent": _PERCENT,
    "sm_percent": _PERCENT,
    "occupancy_percent": _PERCENT,
    "tensor_percent": _PERCENT,
}


def is_possible(field: str, value: object) -> bool:
    """Return whether a field of a GPU can have this value; None (unknown) always can."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    lowest, highest = LIMITS[field]
    return lowest <= value <= highest  # False for NaN


def drop_impossible(reading: object) -> dict[str, str]:
    """Set impossible fields of a reading to None; return each with the reason."""
    names = [name for name in LIMITS if not is_possible(name, getattr(reading, name, None))]
    failed = {name: _words(getattr(reading, name)) for name in names}
    for name in names:
        # Readings are frozen; this is called only during their construction.
        object.__setattr__(reading, name, None)
    return failed


def _words(value: object) -> str:
    return f"{IMPOSSIBLE} ({f'{value:g}' if isinstance(value, float) else printable(str(value)[:40])})"
