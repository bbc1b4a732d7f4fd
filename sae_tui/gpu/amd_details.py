"""Reads an AMD GPU's details.

This takes four driver calls each time the processes are listed, and about a dozen while the GPU's page is open.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sae_tui.gpu.amd_answers import Asking, number
from sae_tui.gpu.base import THROTTLING, Condition
from trainer.contract.printable import printable

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails

_FAN_MOST = 255
# The Python module reports that a limit is throttling the GPU, but not which one.
LIMITED = "power, current or temperature limit reached"
# The throttling reason for each status field of MI300 and later chips.
VIOLATIONS = {
    "active_ppt_pwr": "power limit reached",
    "active_socket_thrm": THROTTLING[1],
    "active_vr_thrm": THROTTLING[1],
    "active_hbm_thrm": THROTTLING[1],
    "active_prochot_thrm": THROTTLING[2],
}
# PCI Express generations by lane speed in MT/s.
_GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}


class AmdDetails:
    """Reads the details of one GPU, on that GPU's thread."""

    def __init__(self, smi: ModuleType, handle: Any) -> None:
        self._smi: Any = smi
        self._handle = handle
        self._asking = Asking(smi)
        self._hottest = smi.AmdSmiTemperatureType.JUNCTION
        self._slowdown_c: int | None = None

    def temperature_c(self, asking: Asking) -> float | None:
        """Return the hot-spot temperature, which triggers throttling, or, if unsupported, the edge temperature."""
        smi = self._smi
        current = smi.AmdSmiTemperatureMetric.CURRENT
        answer = asking.get("temperature_c", "amdsmi_get_temp_metric", self._handle, self._hottest, current)
        if answer is None and "temperature_c" not in asking.failed and self._hottest != smi.AmdSmiTemperatureType.EDGE:
            self._hottest = smi.AmdSmiTemperatureType.EDGE
            return self.temperature_c(asking)
        # Unlike all other readings, temperatures may be below 0.
        return number({"temperature": answer}, "temperature", least=-273)

    def condition(self, *, whole: bool = True) -> Condition:
        """Return the GPU's memory errors and, if `whole`, also its clock, fan speed and throttling reasons.

        This takes up to four driver calls. The first call with `whole` also reads the slowdown temperature.
        """
        if not whole:
            return Condition(ecc_uncorrected=self._uncorrected())
        if self._slowdown_c is None:
            self._slowdown_c = self._limit_c()
        clock = self._clock("GFX")
        return Condition(
            sm_clock_mhz=_whole(number(clock, "clk", "cur_clk")),
            fan_percent=self._fan_percent(),
            slowed_by=self._slowed_by(),
            slowdown_c=self._slowdown_c,
            ecc_uncorrected=self._uncorrected(),
        )

    def _uncorrected(self) -> int | None:
        """Return the number of uncorrectable memory errors."""
        return _whole(number(self._asking.ask("amdsmi_get_gpu_total_ecc_count", self._handle), "uncorrectable_count"))

    def energy_j(self) -> float | None:
        """Return the energy in joules since the driver was loaded."""
        answer = self._asking.ask("amdsmi_get_energy_count", self._handle)
        counted, step = number(answer, "energy_accumulator", "power"), number(answer, "counter_resolution")
        return None if counted is None or step is None else counted * step / 1e6

    def read(self) -> GpuDetails:
        """Return the GPU's details; values from sensors that do not respond are None."""
        from sae_tui.gpu.details import GpuDetails

        ask, handle = self._asking.ask, self._handle
        activity = ask("amdsmi_get_gpu_activity", handle)
        graphics, memory = self._clock("GFX"), self._clock("MEM")
        pcie = ask("amdsmi_get_pcie_info", handle) or {}
        now, most = pcie.get("pcie_metric"), pcie.get("pcie_static")
        errors = ask("amdsmi_get_gpu_total_ecc_count", handle)
        driver = (ask("amdsmi_get_gpu_driver_info", handle) or {}).get("driver_version")
        condition = self.condition()
        if condition.slowed_by is None:
            condition = replace(condition, slowed_by=self._violations())
        return GpuDetails(
            timestamp=time.time(),
            condition=condition,
            memory_bandwidth_percent=_whole(number(activity, "umc_activity")),
            most_sm_clock_mhz=_whole(number(graphics, "max_clk")),
            memory_clock_mhz=_whole(number(memory, "clk", "cur_clk")),
            most_memory_clock_mhz=_whole(number(memory, "max_clk")),
            energy_j=self.energy_j(),
            pcie_generation=_generation(number(now, "pcie_speed")),
            most_pcie_generation=_generation(number(most, "max_pcie_speed")),
            pcie_width=_whole(number(now, "pcie_width")),
            most_pcie_width=_whole(number(most, "max_pcie_width")),
            ecc_corrected=_whole(number(errors, "correctable_count")),
            bus_id=ask("amdsmi_get_gpu_device_bdf", handle),
            driver=printable(driver) if driver and driver != "N/A" else None,
        )

    def _clock(self, kind: str) -> Any:
        return self._asking.ask("amdsmi_get_clock_info", self._handle, getattr(self._smi.AmdSmiClkType, kind))

    def _limit_c(self) -> int | None:
        critical = self._smi.AmdSmiTemperatureMetric.CRITICAL
        answer = self._asking.ask("amdsmi_get_temp_metric", self._handle, self._hottest, critical)
        return _whole(number({"limit": answer or None}, "limit"))

    def _fan_percent(self) -> int | None:
        speed = number({"speed": self._asking.ask("amdsmi_get_gpu_fan_speed", self._handle, 0)}, "speed")
        return None if speed is None else round(100 * min(speed, _FAN_MOST) / _FAN_MOST)

    def _slowed_by(self) -> tuple[str, ...] | None:
        """Return the throttling reasons for a chip before MI300, or None for later chips (see `_violations`)."""
        metrics = self._asking.ask("amdsmi_get_gpu_metrics_info", self._handle) or {}
        held_back = metrics.get("indep_throttle_status", "N/A")
        return None if isinstance(held_back, str) else (LIMITED,) if held_back else ()

    def _violations(self) -> tuple[str, ...] | None:
        """Return the throttling reasons for an MI300 or later chip; the driver takes 0.1 s to measure them."""
        answer = self._asking.ask("amdsmi_get_violation_status", self._handle) or {}
        if all(not isinstance(answer.get(name), bool) for name in VIOLATIONS):
            return None
        return tuple(dict.fromkeys(words for name, words in VIOLATIONS.items() if answer.get(name) is True))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _generation(speed: float | None) -> int | None:
    return None if speed is None else _GENERATIONS.get(int(speed))
