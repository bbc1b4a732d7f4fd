"""The page for one GPU: its histories and its details."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from textual.events import Resize

from sae_tui.format import UNKNOWN, celsius, clock_time, count, fit, gibibytes, percent, watts, wrap
from sae_tui.gpu.base import NO_COMPUTING, GpuSample
from sae_tui.gpu.details import GpuDetails, Instance
from sae_tui.gpu.sensors import UNITS, sensors_of
from sae_tui.gpu.window import Window
from sae_tui.panels.gpu_row import GpuRow, short_name, words_of
from sae_tui.panels.load import heat_style, load_style
from sae_tui.settings import Settings
from sae_tui.widgets.area import area, columns_of, time_axis
from sae_tui.widgets.lines import Line, LineView

_NAME = 13  # width of a detail name, in cells
_HEAT_AXIS_C = 100.0
_USUAL = Settings()
_LEAST_WIDTH = 12  # cells; a narrower history is not useful


class GpuHistory(LineView):
    """Shows utilisation, memory, power and temperature over time, and a cursor for selecting a time."""

    DEFAULT_CSS = "GpuHistory { height: 1fr; width: 1fr; }"

    @property
    def n_columns(self) -> int:
        """The number of columns in a history."""
        return columns_of(self.size.width)

    def show_gpu(self, sample: GpuSample, window: Window, cursor: int | None, words: str, settings: Settings) -> None:
        """Draw a GPU's history, optionally with a cursor on a column; `words` describes the time span or the column."""
        height, width = self.size.height, self.size.width
        quantities = _quantities(sample)
        rows, spare = divmod(height - len(quantities) - 1, len(quantities))
        if width < _LEAST_WIDTH or rows < 1:
            self.show([])
            return
        # The latest column is at the right edge.
        at = None if cursor is None else self.n_columns - len(window.jobs) + cursor
        lines: list[Line] = []
        for place, quantity in enumerate(quantities):
            values = window.columns[quantity.name]
            text = quantity.words(quantity.now if cursor is None else values[cursor])
            load = load_style(sample, quantity.name, settings) if cursor is None else ""
            heading: Line = (
                (f" {quantity.title} ", "label"),
                (fit(text, max(0, width - cell_len(quantity.title) - 2)), f"title {load}"),
            )
            top = quantity.top
            lines += area(
                heading,
                [None if value is None or not top else value / top for value in values],
                style=quantity.style,
                ceiling=top / 2**30 if top and quantity.name == "memory_used_bytes" else top,
                width=width,
                height=rows + (place < spare),
                cursor=at,
                others=window.columns["utilization"],
            )
        end = "now" if window.end >= time.time() else clock_time(window.end)
        self.show([*lines, time_axis(words, end, width, window.step_s * self.n_columns)])


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A plotted quantity: its field, title, current value, axis maximum, formatter, and style."""

    name: str
    title: str
    now: float | None
    top: float | None
    words: Callable[[float | None], str]
    style: str


def _quantities(sample: GpuSample) -> list[_Quantity]:
    used, total, limit = sample.memory_used_bytes, sample.memory_total_bytes, sample.power_limit_w
    return [
        _Quantity("utilization", "Utilisation", sample.utilization, 100, percent, "spark"),
        _Quantity(
            "memory_used_bytes", "Memory", used, total,
            lambda value: f"{gibibytes(value)} of {gibibytes(total)}", "memory",
        ),
        _Quantity("power_w", "Power", sample.power_w, limit, lambda value: f"{watts(value)} of {watts(limit)}", "bar"),
        _Quantity("temperature_c", "Temperature", sample.temperature_c, _HEAT_AXIS_C, celsius, "heat"),
    ]  # fmt: skip


class GpuDetailsView(LineView):
    """A GPU's details in groups, without the values that it does not report."""

    DEFAULT_CSS = "GpuDetailsView { height: 1fr; }"

    def on_mount(self) -> None:
        self._shown: tuple[GpuRow, GpuDetails | None] | None = None

    def show_gpu(self, row: GpuRow, details: GpuDetails | None) -> None:
        """Draw the GPU's holder and its details."""
        self._shown = row, details
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._shown and self.size.width:
            self.show(list(self._particulars(*self._shown)))

    def _particulars(self, row: GpuRow, details: GpuDetails | None) -> Iterator[Line]:
        width, sample = self.size.width, row.sample
        if not sample.healthy:
            words, style = row.fault
            yield from (((f" {text}", style),) for text in wrap(words, width - 2))
            return
        yield from _entry("holder", row.holder, row.holder_style, width)
        yield from _entry("memory free", gibibytes(sample.memory_free_bytes), "text", width)
        if details is None:
            yield from _entry("", "reading the GPU…", "dim", width)
            return
        for group in facts(sample, details, row.settings):
            yield ((" " * width, "text"),)
            for name, value, look in group:
                yield from _entry(name, value, look, width)


def facts(sample: GpuSample, details: GpuDetails, settings: Settings = _USUAL) -> list[list[tuple[str, str, str]]]:
    """Return the details in groups, each as (name, value, style); omit unknown values.

    `settings` contains the thresholds for the temperature's colours.
    """
    found = (
        _speed(sample, details),
        _heat(sample, details, settings),
        _links(details),
        _faults(details),
        _unread(sample, details),
        _modes(sample, details),
    )
    groups = ([entry for entry in group if entry[1] and UNKNOWN not in entry[1]] for group in found)
    return [group for group in groups if group]


def _speed(sample: GpuSample, details: GpuDetails) -> list[tuple[str, str, str]]:
    condition = details.condition
    slowed = condition.slowed_by
    why = "" if slowed is None else "; ".join(slowed) or "nothing"
    return [
        ("SM clock", _of(condition.sm_clock_mhz, details.most_sm_clock_mhz, "MHz"), "text"),
        ("memory clock", _of(details.memory_clock_mhz, details.most_memory_clock_mhz, "MHz"), "text"),
        ("state", "" if condition.performance_state is None else f"P{condition.performance_state}", "text"),
        ("slowed by", why, "warn" if slowed else "dim"),
        *_declared("speed", sample, details),
    ]


def _heat(sample: GpuSample, details: GpuDetails, settings: Settings) -> list[tuple[str, str, str]]:
    kilowatt_hours = None if details.energy_j is None else details.energy_j / 3.6e6
    return [
        (
            "temperature",
            celsius(sample.temperature_c),
            heat_style(replace(sample, condition=details.condition), settings),
        ),
        ("throttles at", celsius(details.condition.slowdown_c), "text"),
        *_declared("heat", sample, details),
        ("energy", "" if kilowatt_hours is None else f"{kilowatt_hours:,.1f} kWh since the driver was loaded", "text"),
    ]


def _declared(group: str, sample: GpuSample, details: GpuDetails) -> list[tuple[str, str, str]]:
    """Return the sensors in a group that need only their declared title and unit to be formatted."""
    readings: tuple[Any, ...] = sample, details.condition, details
    return [
        (one.title, words_of(one)[0](getattr(reading, one.name)), "text")
        for reading in readings
        for one in sensors_of(type(reading)).values()
        if one.title and one.group == group
    ]


def _links(details: GpuDetails) -> list[tuple[str, str, str]]:
    generation = _of(details.pcie_generation, details.most_pcie_generation, "")
    width = _of(details.pcie_width, details.most_pcie_width, "lanes")
    received, sent = (_rate(one) for one in (details.pcie_received_bytes_s, details.pcie_sent_bytes_s))
    return [
        ("PCIe", f"generation {generation}, {width}" if generation and width else "", "text"),
        ("PCIe in", received, "text"),
        ("PCIe out", sent, "text"),
        ("NVLink", "" if not details.nvlinks else f"{details.nvlinks} links up", "text"),
    ]


def _faults(details: GpuDetails) -> list[tuple[str, str, str]]:
    condition = details.condition
    corrected, uncorrected, rows = details.ecc_corrected, condition.ecc_uncorrected, details.remapped_rows
    xid = condition.xid
    return [
        ("last error", "" if xid is None else f"{xid.words} ({clock_time(xid.timestamp)})", "bad"),
        ("ECC", "" if corrected is None else f"{count(corrected)} errors corrected", "text"),
        ("uncorrected", "" if uncorrected is None else count(uncorrected), "bad" if uncorrected else "text"),
        ("rows", "" if rows is None else f"{rows} remapped", "warn" if rows else "text"),
        ("", "a row could not be remapped; the GPU is failing" if condition.rows_failed else "", "bad"),
        ("", "row remapping is pending; reset the GPU" if condition.rows_pending else "", "bad"),
        ("needs", condition.recovery or "", "bad"),
    ]


def _unread(sample: GpuSample, details: GpuDetails) -> list[tuple[str, str, str]]:
    """Return each unreadable sensor once, including sensors reporting impossible values."""
    failed = {name: words for name, words in sample.failed.items() if name not in ("uuid", "processes")}
    lines = [f"{_sensor_words(name)}: {words}" for name, words in {**failed, **dict(details.failed)}.items()]
    return [("" if place else "not read", line, "warn") for place, line in enumerate(lines)]


def _sensor_words(field: str) -> str:
    """Return a sensor's field name as words, like `power limit` for `power_limit_w`."""
    words = field.split("_")
    return " ".join(words[:-1] if words[-1] in {*UNITS, "s"} and words[1:] else words)


def _modes(sample: GpuSample, details: GpuDetails) -> list[tuple[str, str, str]]:
    kept = {True: "on", False: "off: the first call after a pause takes seconds", None: ""}[details.persistence]
    mode = details.condition.compute_mode
    return [
        ("persistence", kept, "text"),
        ("compute mode", mode or "", "bad" if mode == NO_COMPUTING else "text"),
        ("memory", "shared with the host" if sample.is_memory_shared else "", "text"),
        ("reserved", "" if not details.memory_reserved_bytes else gibibytes(details.memory_reserved_bytes), "text"),
        *(("MIG", _instance(part), "text") for part in details.instances),
        ("bus", details.bus_id or "", "text"),
        ("driver", details.driver or "", "text"),
        ("CUDA", "" if details.cuda is None else "up to {}.{}".format(*details.cuda), "text"),
        ("UUID", sample.uuid, "dim"),
    ]


def _instance(part: Instance) -> str:
    """Return a MIG slice as text, like `H200 MIG 1g.18gb: 2.1 GiB of 16.0 GiB`."""
    name = short_name(part.name)
    return f"{name}: {gibibytes(part.memory_used_bytes)} of {gibibytes(part.memory_total_bytes)}"


def _of(now: int | None, most: int | None, unit: str) -> str:
    """Return a value with its maximum, like `1,695 of 2,100 MHz`."""
    if now is None:
        return ""
    return " ".join(filter(None, [f"{now:,}", "" if most is None else f"of {most:,}", unit]))


def _rate(bytes_s: float | None) -> str:
    return "" if bytes_s is None else f"{bytes_s / 1e6:,.0f} MB/s"


def _entry(name: str, value: str, style: str, width: int) -> Iterator[Line]:
    """Yield the lines for a detail; a long value continues on the next lines."""
    space = max(8, width - _NAME - 2)
    for row, part in enumerate(wrap(value, space)):
        yield (f" {fit(name if row == 0 else '', _NAME)}", "label"), (fit(part, space), style)
