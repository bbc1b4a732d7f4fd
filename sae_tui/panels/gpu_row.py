"""The data of one GPU, and the texts and bars shared by lines, card view and map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sae_tui.format import bar, clock_time, fit, gibibytes, tall_sparkline, watts
from sae_tui.gpu.base import Condition, GpuSample
from sae_tui.gpu.visible import ranges
from sae_tui.widgets.lines import Line, Span
from trainer.contract.planning.gpu_vendors import VENDORS

HOT_C = 85
NO_CONDITION = Condition()


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The data to draw for one GPU: its sample, its holder, and its history by field name."""

    sample: GpuSample
    holder: str
    holder_style: str
    column: Callable[[str, int], Sequence[float | None]]
    has_cursor: bool = False

    @property
    def fault(self) -> Span:
        """The reason why the GPU cannot be read, with the time of the failure if known, and the style."""
        sample = self.sample
        if sample.withheld:
            return f"– {sample.reason}", "dim"
        since = "" if sample.unread_since is None else f"since {clock_time(sample.unread_since)}: "
        return f"✗ {since}{sample.reason}", "bad"

    @property
    def mark(self) -> str:
        """The addition to the name's style while the GPU has the cursor."""
        return " cursor" if self.has_cursor else ""


def fold_withheld(rows: Sequence[GpuRow]) -> list[GpuRow]:
    """Return the rows; GPUs reserved for other users share one row at the end."""
    withheld = [row for row in rows if row.sample.withheld]
    if len(withheld) < 2:
        return list(rows)
    first = withheld[0]
    words = f"{ranges([row.sample.index for row in withheld])}: {first.sample.reason}"
    folded = replace(first, sample=replace(first.sample, name="others", reason=words))
    return [*(row for row in rows if not row.sample.withheld), folded]


def speed(condition: Condition) -> str:
    """Return `P2 1695 MHz`."""
    state, clock = condition.performance_state, condition.sm_clock_mhz
    return " ".join(filter(None, ["" if state is None else f"P{state}", "" if clock is None else f"{clock} MHz"]))


def fan(condition: Condition) -> str:
    return "" if condition.fan_percent is None else f"fan {condition.fan_percent}%"


def free(sample: GpuSample) -> str:
    """Return the memory that a job could use, like `2.1Gi free`."""
    size = sample.memory_free_bytes
    return "" if size is None else f"{size / 2**30:.{0 if size >= 100 << 30 else 1}f}Gi free"


def processes(sample: GpuSample) -> str:
    """Return the processes on a GPU, the largest first: `31415 mallory python 21.0 GiB`."""
    largest = sorted(sample.processes or (), key=lambda each: -(each.memory_used_bytes or 0))
    words = ((str(one.pid), one.user, one.name, gibibytes(one.memory_used_bytes)) for one in largest)
    return ", ".join(" ".join(filter(None, each)) for each in words)


def memory_share(sample: GpuSample) -> float | None:
    return share_of(sample.memory_used_bytes, sample.memory_total_bytes)


def memory_short(sample: GpuSample) -> str:
    """Return `21.3/24.0Gi`: used and total in GiB."""
    if sample.memory_used_bytes is None or sample.memory_total_bytes is None:
        return "–"
    used, total = sample.memory_used_bytes / 2**30, sample.memory_total_bytes / 2**30
    return f"{used:.1f}/{total:.1f}Gi" if total < 100 else f"{used:.0f}/{total:.0f}Gi"


def power(sample: GpuSample) -> str:
    if sample.power_limit_w is None:
        return watts(sample.power_w)
    return f"{watts(sample.power_w)} / {watts(sample.power_limit_w)}"


def short_name(name: str) -> str:
    """Return `RTX 3090` for "NVIDIA GeForce RTX 3090"."""
    for vendor in VENDORS.values():
        for brand in vendor.brands:
            name = name.removeprefix(brand)
    return name


def meter(text: str, text_width: int, share: float | None, width: int, style: str) -> Line:
    return (
        (fit(text, text_width, right=True) + " ", "text"),
        (bar(share, width), f"{style} rail"),
        (" " if width else "", "text"),
    )


def history(row: GpuRow, name: str, width: int, top: float | None, height: int) -> list[str]:
    """Return the rows of a history; its highest block leaves an eighth of a cell free below the row above."""
    if not width:
        return [""] * height
    eighths = 8 * height
    above = top and top * eighths / (eighths - 1)
    # NVIDIA drivers buffer utilisation and power of the seconds before the app started, but no other quantity.
    return tall_sparkline(row.column(name, width), width, height, above, row.column("utilization", width))


def heat(sample: GpuSample) -> str:
    return "bad" if sample.temperature_c is not None and sample.temperature_c >= HOT_C else "text"


def share_of(value: float | None, top: float | None) -> float | None:
    return value / top if value is not None and top else None


def blank(width: int) -> Line:
    return ((" " * width, "text"),)
