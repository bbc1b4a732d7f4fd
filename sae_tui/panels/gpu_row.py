"""The data of one GPU, and the columns, text and bars shared by lines, card view and map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from rich.cells import cell_len

from sae_tui.format import UNKNOWN, bar, celsius, clock_time, gibibytes, percent, tall_sparkline, watts
from sae_tui.gpu.base import Condition, GpuSample, columns
from sae_tui.gpu.sensors import Sensor
from sae_tui.gpu.visible import ranges
from sae_tui.panels.load import load_style, share_of
from sae_tui.settings import Settings
from sae_tui.widgets.lines import Line, Span
from trainer.contract.planning.gpu_vendors import VENDORS

NO_CONDITION = Condition()
# Maps a sensor's unit to the function for formatting its values and to the column width.
_WORDS: Mapping[str, tuple[Callable[[float | None], str], int]] = {
    "°C": (celsius, 5),
    "W": (watts, 6),
    "%": (percent, 4),
    "bytes": (gibibytes, 9),
}
_WIDTH = 9  # the column width of a sensor with any other unit


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The data to draw for one GPU: its sample, its holder, and its history by field name.

    `settings` contains the thresholds for its colours.
    """

    sample: GpuSample
    holder: str
    holder_style: str
    column: Callable[[str, int], Sequence[float | None]]
    has_cursor: bool = False
    settings: Settings = field(default_factory=Settings)

    @property
    def fault(self) -> Span:
        """Why the GPU cannot be read, with the time of failure if known, and the style for this text."""
        sample = self.sample
        if sample.withheld:
            return f"– {sample.reason}", "dim"
        since = "" if sample.unread_since is None else f"since {clock_time(sample.unread_since)}: "
        return f"✗ {since}{sample.reason}", "bad"

    @property
    def mark(self) -> str:
        """The suffix of the name's style: " cursor" while the cursor is on the GPU, otherwise ""."""
        return " cursor" if self.has_cursor else ""

    def load(self, field: str) -> str:
        """Return the style for a field's value, depending on its load."""
        return load_style(self.sample, field, self.settings)


@dataclass(frozen=True, slots=True)
class Meter:
    """A quantity with a bar and a history: its field, its style, and its axis maximum."""

    name: str
    style: str
    top: Callable[[GpuSample], float | None]


@dataclass(frozen=True, slots=True, eq=False)
class GpuColumn:
    """A column of the GPU list, and the cell shown in every view.

    `width` is the width of the cell, without the `gap` after it. `below` returns the text in the second of two lines;
    if `below` is None, the next column's text extends over the cell. `limit` returns the maximum of the cell's value,
    or "". A narrow terminal drops the column with the highest `drop` first; a column with 0 is never dropped.
    """

    heading: str
    width: int
    cell: Callable[[GpuRow], Span]
    below: Callable[[GpuSample], str] | None = None
    limit: Callable[[GpuSample], str] | None = None
    meter: Meter | None = None
    right: bool = True
    gap: int = 1
    drop: int = 0


def fold_withheld(rows: Sequence[GpuRow]) -> list[GpuRow]:
    """Merge all GPUs reserved for other users into a single row at the end."""
    withheld = [row for row in rows if row.sample.withheld]
    if len(withheld) < 2:
        return list(rows)
    first = withheld[0]
    words = f"{ranges([row.sample.index for row in withheld])}: {first.sample.reason}"
    folded = replace(first, sample=replace(first.sample, name="others", reason=words))
    return [*(row for row in rows if not row.sample.withheld), folded]


def _speed(sample: GpuSample) -> str:
    """Return the performance state and the clock, indented, like `P2 1695 MHz`."""
    condition = sample.condition or NO_CONDITION
    state, clock = condition.performance_state, condition.sm_clock_mhz
    return " ".join(filter(None, ["  ", "" if state is None else f"P{state}", "" if clock is None else f"{clock} MHz"]))


def _fan(sample: GpuSample) -> str:
    speed = (sample.condition or NO_CONDITION).fan_percent
    return "" if speed is None else f"fan {speed}%"


def _free(sample: GpuSample) -> str:
    """Return the memory available to a job, like `2.1Gi free`."""
    size = sample.memory_free_bytes
    return "" if size is None else f"{size / 2**30:.{0 if size >= 100 << 30 else 1}f}Gi free"


def processes(sample: GpuSample) -> str:
    """Return the processes on a GPU, largest first, like `31415 mallory python 21.0 GiB`."""
    largest = sorted(sample.processes or (), key=lambda each: -(each.memory_used_bytes or 0))
    words = ((str(one.pid), one.user, one.name, gibibytes(one.memory_used_bytes)) for one in largest)
    return ", ".join(" ".join(filter(None, each)) for each in words)


def memory_share(sample: GpuSample) -> float | None:
    return share_of(sample.memory_used_bytes, sample.memory_total_bytes)


def memory_short(sample: GpuSample) -> str:
    """Return used and total memory in GiB, like `21.3/24.0Gi`."""
    if sample.memory_used_bytes is None or sample.memory_total_bytes is None:
        return "–"
    used, total = sample.memory_used_bytes / 2**30, sample.memory_total_bytes / 2**30
    return f"{used:.1f}/{total:.1f}Gi" if total < 100 else f"{used:.0f}/{total:.0f}Gi"


def short_name(name: str) -> str:
    """Return a short product name, like `RTX 3090` for "NVIDIA GeForce RTX 3090"."""
    for vendor in VENDORS.values():
        for brand in vendor.brands:
            name = name.removeprefix(brand)
    return name


def meter_bar(row: GpuRow, meter: Meter, width: int) -> Line:
    share = share_of(getattr(row.sample, meter.name), meter.top(row.sample))
    return (bar(share, width), f"{row.load(meter.name)} rail"), (" " if width else "", "text")


def history(row: GpuRow, meter: Meter, width: int, height: int) -> list[str]:
    """Return a history as rows; even its maximum leaves an eighth of a cell free below the row above."""
    if not width:
        return [""] * height
    eighths, top = 8 * height, meter.top(row.sample)
    above = top and top * eighths / (eighths - 1)
    # Only utilisation and power have values from the seconds before the app started, because NVIDIA drivers buffer
    # these values.
    return tall_sparkline(row.column(meter.name, width), width, height, above, row.column("utilization", width))


def words_of(sensor: Sensor) -> tuple[Callable[[float | None], str], int]:
    """Return the function for formatting a sensor's values, and the column width."""
    unit = sensor.unit.words if sensor.unit else ""
    return _WORDS.get(unit) or (lambda value: UNKNOWN if value is None else f"{value:.0f} {unit}".rstrip(), _WIDTH)


def blank(width: int) -> Line:
    return ((" " * width, "text"),)


def fill(spans: Line, width: int) -> Line:
    """Return a line of `width` cells starting with these spans."""
    return (*spans, (" " * (width - sum(cell_len(text) for text, _ in spans)), "text"))


def fitting(spans: Sequence[Span], width: int) -> Line:
    """Return as many of the first spans as fit into the width."""
    used = accumulate(cell_len(text) for text, _ in spans)
    return tuple(span for span, cells in zip(spans, used, strict=True) if cells <= width)


def _limit(sample: GpuSample) -> str:
    return "" if sample.power_limit_w is None else watts(sample.power_limit_w)


_COLOURED = ("temperature_c", "power_w")
# Maps a field to a function returning the limit for its value.
_LIMITS: Mapping[str, Callable[[GpuSample], str]] = {"power_w": _limit}


def _column(sensor: Sensor) -> GpuColumn:
    """Return the column for a sensor."""
    words, width = words_of(sensor)
    limit, is_coloured = _LIMITS.get(sensor.name), sensor.name in _COLOURED

    def cell(row: GpuRow) -> Span:
        return words(row.sample.value(sensor.name)), row.load(sensor.name) if is_coloured else "text"

    def below(sample: GpuSample) -> str:
        most = limit(sample) if limit else ""
        return most and f"of {most}"

    return GpuColumn(sensor.heading, width, cell, below if limit else None, limit, drop=sensor.drop)


INDEX = GpuColumn("GPU", 2, lambda row: (f"{row.sample.index}", f"title{row.mark}"), gap=0)
NAME = GpuColumn(
    "NAME", 14, lambda row: (f" {short_name(row.sample.name)}", f"label{row.mark}"), _speed, right=False, gap=0
)
UTILIZATION = GpuColumn(
    "UTIL",
    5,
    lambda row: (percent(row.sample.utilization), row.load("utilization")),
    _fan,
    meter=Meter("utilization", "spark", lambda _: 100),
)
MEMORY = GpuColumn(
    "MEM", 11, lambda row: (memory_short(row.sample), row.load("memory_used_bytes")), _free,
    meter=Meter("memory_used_bytes", "memory", lambda sample: sample.memory_total_bytes),
)  # fmt: skip
_SENSORS = {one.name: _column(one) for one in columns()}
TEMPERATURE, POWER = _SENSORS["temperature_c"], _SENSORS["power_w"]
OTHERS = tuple(one for one in _SENSORS.values() if one not in (TEMPERATURE, POWER))
HOLDER = GpuColumn("HOLDER", 10, lambda row: (row.holder, row.holder_style), right=False, gap=0, drop=2)
GPU_COLUMNS = (INDEX, NAME, UTILIZATION, MEMORY, TEMPERATURE, POWER, *OTHERS, HOLDER)
