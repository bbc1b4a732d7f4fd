"""Values that older versions of AMD's Python module return. The reader must support all of them.

Only the structure of each value is taken from these versions, not the numbers. For missing values, version 6.0 returns
numbers with all bits set, and later versions return "N/A". Keys were renamed in 6.2 (clocks), 6.4 (energy) and 7.0
(power).
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class AmdSmiException(Exception): ...


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, code: int) -> None:
        self.err_code = code


class Temperature(IntEnum):
    EDGE = 0
    JUNCTION = 1


class Metric(IntEnum):
    CURRENT = 0
    CRITICAL = 6


class Clock(IntEnum):
    GFX = 0
    MEM = 4


ROCM_6_0 = {
    "amdsmi_get_power_info": {"current_socket_power": 0xFFFF, "average_socket_power": 203, "power_limit": 300},
    "amdsmi_get_clock_info": {"cur_clk": 1700, "max_clk": 1700, "min_clk": 500, "sleep_clk": 0xFFFFFFFF},
    "amdsmi_get_energy_count": {"power": 2_000_000_000, "counter_resolution": 15.259, "timestamp": 1},
    "amdsmi_get_gpu_activity": {"gfx_activity": 97, "umc_activity": 0xFFFF, "mm_activity": 0xFFFF},
    "amdsmi_get_gpu_process_list": ["a handle"],
    "amdsmi_get_gpu_process_info": {"name": "", "pid": 0xFFFF, "memory_usage": {"vram_mem": 5 << 20}},
}
ROCM_6_2 = {
    "amdsmi_get_power_info": {"current_socket_power": "N/A", "average_socket_power": 203, "power_limit": 300},
    "amdsmi_get_clock_info": {"clk": 1700, "min_clk": 500, "max_clk": 1700, "clk_locked": 0, "clk_deep_sleep": 0xFF},
    "amdsmi_get_energy_count": {"power": 2_000_000_000, "counter_resolution": 15.259, "timestamp": 1},
    "amdsmi_get_gpu_activity": {"gfx_activity": 97, "umc_activity": "N/A", "mm_activity": "N/A"},
}
ROCM_7_0 = {
    "amdsmi_get_power_info": {"socket_power": 203, "current_socket_power": 203, "average_socket_power": "N/A"},
    "amdsmi_get_clock_info": {"clk": 1700, "min_clk": 500, "max_clk": 1700, "clk_locked": False},
    "amdsmi_get_energy_count": {"energy_accumulator": 2_000_000_000, "counter_resolution": 15.259, "timestamp": 1},
    "amdsmi_get_gpu_activity": {"gfx_activity": 97, "umc_activity": "N/A", "mm_activity": "N/A"},
}
COMMON: dict[str, Any] = {
    "amdsmi_init": None,
    "amdsmi_shut_down": None,
    "amdsmi_get_processor_handles": ["a"],
    "amdsmi_get_gpu_asic_info": {"market_name": "0x740f", "asic_serial": "0x00A1B2C3D4E5F607"},
    "amdsmi_get_gpu_vram_usage": {"vram_total": 65520, "vram_used": 12},
    "amdsmi_get_power_cap_info": {"power_cap": 300_000_000},
    "amdsmi_get_temp_metric": 61,
    "amdsmi_get_gpu_process_list": [{"name": "N/A", "pid": 0xFFFF, "memory_usage": {"vram_mem": 5 << 20}}],
}


def module(**answers: Any) -> Any:
    """Return a stand-in for the module, with functions that return these values; all other functions are missing."""
    functions = {name: _answering(answer) for name, answer in {**COMMON, **answers}.items()}
    return SimpleNamespace(
        AmdSmiException=AmdSmiException, AmdSmiLibraryException=AmdSmiLibraryException,
        AmdSmiTemperatureType=Temperature, AmdSmiTemperatureMetric=Metric, AmdSmiClkType=Clock, **functions,
    )  # fmt: skip


def _answering(answer: Any) -> Any:
    def function(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return function
