"""Every GPU: one line each, or a card each, in as many columns as fit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Resize

from sae_tui.format import bar, celsius, fit, percent, sparkline, watts
from sae_tui.gpu.base import GpuSample
from sae_tui.widgets.lines import Line, LineView, Span

CARD_WIDTH = 38
HOT_C = 85


@dataclass(frozen=True, slots=True)
class GpuRow:
    """What is drawn of one GPU: its sample, who holds it, and its history by name."""

    sample: GpuSample
    holder: str
    holder_style: str
    column: Callable[[str, int], Sequence[float | None]]


class GpuPanel(LineView):
    """Cards or lines; everything is one widget, so that a tick of 8 GPUs costs one repaint."""

    def on_mount(self) -> None:
        self._rows: tuple[GpuRow, ...] = ()
        self._cards = False
        self._room = 0

    def show_gpus(self, rows: Sequence[GpuRow], *, cards: bool, room: int) -> None:
        """Draws the GPUs in at most `room` lines if the cards can be made small enough."""
        self._rows, self._cards, self._room = tuple(rows), cards, room
        self._draw()

    def show_nothing(self, reason: str) -> None:
        """Says why there are no GPUs, in as many lines as it takes."""
        self._rows = ()
        self.show([((fit(f" {line}", self.width), "warn"),) for line in textwrap.wrap(reason, max(20, self.width - 2))])

    def on_resize(self, _: Resize) -> None:
        if self._rows:
            self._draw()

    def _draw(self) -> None:
        width = self.width
        if not width:
            return
        if self._cards:
            self.show(card_grid(self._rows, width, self._room))
        else:
            self.show([gpu_line(row, width) for row in self._rows])


def gpu_line(row: GpuRow, width: int) -> Line:
    """One GPU in one line; bars and numbers go first where the terminal is narrow, the reason last."""
    sample = row.sample
    head: Line = ((fit(f"{sample.index}", 2, right=True), "title"), (" " + fit(short_name(sample.name), 13), "label"))
    if not sample.healthy:
        return (*head, (fit(f"✗ {sample.reason}", max(0, width - 16)), "bad"))
    wide = width >= 100
    bar_width = 0 if width < 70 else 10 if wide else 6
    holder_width = 24 if wide else 13 if width >= 70 else 0
    power_width = 7 if width >= 60 else 0
    fixed = 42 + 2 * (bar_width + 1 if bar_width else 0) + power_width + holder_width
    room = max(0, width - fixed)
    sparks = [room // 2, room - room // 2] if room >= 24 else [room, 0]
    return (
        *head,
        *_meter(percent(sample.utilization), 5, _share(sample.utilization, 100), bar_width, "bar"),
        _spark(row, "utilization", sparks[0], 100, "spark"),
        (" ", "text"),
        *_meter(memory_short(sample), 10, memory_share(sample), bar_width, "memory"),
        _spark(row, "memory_used_bytes", sparks[1], sample.memory_total_bytes, "memory"),
        (" ", "text"),
        (fit(celsius(sample.temperature_c), 5, right=True) + " ", _heat(sample)),
        (fit(watts(sample.power_w), 6, right=True) + " " if power_width else "", "text"),
        (fit(row.holder, holder_width), row.holder_style),
    )


def card_grid(rows: Sequence[GpuRow], width: int, room: int) -> list[Line]:
    """The cards side by side and below each other, as tall as the room allows (2 to 5 lines)."""
    if not rows:
        return []
    columns = max(1, min(len(rows), width // CARD_WIDTH))
    bands = [rows[start : start + columns] for start in range(0, len(rows), columns)]
    height = max(2, min(5, room // len(bands)))
    card_width = width // columns
    lines: list[Line] = []
    for band in bands:
        cards = [card(row, card_width - 2, height) for row in band]
        lines += [_beside([one[y] for one in cards], card_width) for y in range(height)]
    return lines


def card(row: GpuRow, width: int, height: int) -> list[Line]:
    """A GPU in 2 to 5 lines: heading, utilisation, memory, heat and power, and air."""
    sample = row.sample
    heading = _heading(row, width)
    if not sample.healthy:
        return [heading, *_reason(sample.reason, width, height - 1)]
    heat = ((fit(celsius(sample.temperature_c), 6, right=True), _heat(sample)), (fit(f"  {power(sample)}", 16), "text"))
    util = _card_row(row, "util", percent(sample.utilization), "utilization", 100, width, "bar", "spark")
    memory = _card_row(
        row, "mem", memory_short(sample), "memory_used_bytes", sample.memory_total_bytes, width, "memory", "memory"
    )
    last = (*heat, (" " * max(0, width - 22), "text"))
    return {2: [heading, util], 3: [heading, util, memory], 4: [heading, util, memory, last]}.get(
        height, [heading, util, memory, last, _blank(width)]
    )


def _reason(reason: str, width: int, height: int) -> list[Line]:
    """Why a card cannot be used, over all the lines there are, the last one cut where it takes more."""
    wrapped = textwrap.wrap(f"✗ {reason}", max(10, width - 2))
    shown = [*wrapped[: height - 1], " ".join(wrapped[height - 1 :])]
    lines: list[Line] = [((fit(f" {text}", width), "bad"),) for text in shown if text]
    return [*lines, *[_blank(width)] * (height - len(lines))]


def _heading(row: GpuRow, width: int) -> Line:
    name = f" GPU {row.sample.index} {short_name(row.sample.name)} "
    if not row.sample.healthy:
        # The reason is told in full below.
        return ((fit(name, width), "title"),)
    holder_width = max(0, width - len(name))
    return ((fit(name, width - holder_width), "title"), (fit(row.holder, holder_width, right=True), row.holder_style))


def _card_row(
    row: GpuRow, label: str, text: str, name: str, top: float | None, width: int, bar_style: str, spark_style: str
) -> Line:
    values = row.column(name, 1)
    share = _share(values[-1] if values else None, top)
    bar_width = 8 if width < 50 else 12
    spark_width = max(0, width - 6 - 10 - bar_width - 2)
    return (
        (fit(f" {label}", 6), "label"),
        *_meter(text, 10, share, bar_width, bar_style),
        (" ", "text"),
        _spark(row, name, spark_width, top, spark_style),
        (" ", "text"),
    )


def _beside(lines: Sequence[Line], width: int) -> Line:
    spans: list[Span] = []
    for line in lines:
        used = sum(cell_len(text) for text, _ in line)
        spans += [*line, (" " * (width - used), "text")]
    return tuple(spans)


def _blank(width: int) -> Line:
    return ((" " * width, "text"),)


def _meter(text: str, text_width: int, share: float | None, width: int, style: str) -> Line:
    return (
        (fit(text, text_width, right=True) + " ", "text"),
        (bar(share, width), f"{style} trough"),
        (" " if width else "", "text"),
    )


def _spark(row: GpuRow, name: str, width: int, top: float | None, style: str) -> Span:
    return (sparkline(row.column(name, width), width, top) if width else "", style)


def _heat(sample: GpuSample) -> str:
    return "bad" if sample.temperature_c is not None and sample.temperature_c >= HOT_C else "text"


def _share(value: float | None, top: float | None) -> float | None:
    return value / top if value is not None and top else None


def memory_share(sample: GpuSample) -> float | None:
    return _share(sample.memory_used_bytes, sample.memory_total_bytes)


def memory_short(sample: GpuSample) -> str:
    """`21.3/24.0G`: used and total in units of 2^30 bytes."""
    if sample.memory_used_bytes is None or sample.memory_total_bytes is None:
        return "–"
    used, total = sample.memory_used_bytes / 2**30, sample.memory_total_bytes / 2**30
    return f"{used:.1f}/{total:.1f}G" if total < 100 else f"{used:.0f}/{total:.0f}G"


def power(sample: GpuSample) -> str:
    if sample.power_limit_w is None:
        return watts(sample.power_w)
    return f"{watts(sample.power_w)} / {watts(sample.power_limit_w)}"


def short_name(name: str) -> str:
    """`RTX 3090` for "NVIDIA GeForce RTX 3090"."""
    for prefix in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.removeprefix(prefix)
    return name
