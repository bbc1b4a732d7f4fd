"""Every GPU: one line each, or a card each, in as many columns as fit."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from textual.binding import Binding
from textual.events import Click, Resize
from textual.message import Message

from sae_tui.format import bar, celsius, fit, gibibytes, percent, tall_sparkline, watts, wrap
from sae_tui.gpu.base import Condition, GpuSample
from sae_tui.widgets.lines import Line, LineView, Span
from trainer.contract.planning.gpu_vendors import VENDORS

CARD_WIDTH = 38
LEAST_HISTORY = 12  # cells; a shorter history shows nothing useful
_ERROR_TOLD_S = 3600.0
HOT_C = 85
NO_CONDITION = Condition()
_LONG_WORD = 8  # by which the first of two lines may be shorter than the second


@dataclass(frozen=True, slots=True)
class GpuRow:
    """What is drawn of one GPU: its sample, who holds it, and its history by name."""

    sample: GpuSample
    holder: str
    holder_style: str
    column: Callable[[str, int], Sequence[float | None]]
    has_cursor: bool = False

    @property
    def mark(self) -> str:
        """What is added to the style of the name of a GPU that has the cursor."""
        return " cursor" if self.has_cursor else ""


class GpuPanel(LineView, can_focus=True):
    """Cards or lines; everything is one widget, so that a tick of 8 GPUs costs one repaint.

    Where not all fit, the last line says how many there are above and below. While it has the focus, one GPU has the
    cursor.
    """

    BINDINGS = [
        Binding("up,k", "move(0, -1)", "Up", show=False),
        Binding("down,j", "move(0, 1)", "Down", show=False),
        Binding("left,h", "move(-1, 0)", "Left", show=False),
        Binding("right,l", "move(1, 0)", "Right", show=False),
        Binding("enter", "choose", "Open", id="gpus.open", tooltip="The GPU over the whole window"),
    ]

    class Chosen(Message):
        """Enter or a second click on a GPU."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def on_mount(self) -> None:
        self._cursor = 0  # place in the rows
        self._rows: tuple[GpuRow, ...] = ()
        self._cards = False
        self._room = 0
        self._lines_each = 1
        self._first = 0

    def show_gpus(self, rows: Sequence[GpuRow], *, cards: bool, room: int, lines_each: int = 1) -> None:
        """Draw the GPUs in at most `room` lines, as many as there is room for from where it was scrolled to.

        Those that are not cards have one or two lines each.
        """
        self._rows, self._cards, self._room, self._lines_each = tuple(rows), cards, room, lines_each
        self._draw()

    def show_words(self, words: str, style: str) -> None:
        """Say why there are no GPUs, in as many lines as it takes."""
        self._rows = ()
        self.show([((fit(f" {line}", self.width), style),) for line in textwrap.wrap(words, max(20, self.width - 2))])

    def scroll_gpus(self, pages: int) -> None:
        """Scroll so many pages down, or up where negative."""
        if self._rows:
            grid = self._grid()
            self._first += pages * grid.count_fitting(self._room) * grid.columns
            self._draw()

    def action_move(self, across: int, down: int) -> None:
        """Move the cursor, and scroll it into view."""
        if not self._rows:
            return
        grid = self._grid()
        self._cursor = max(0, min(len(self._rows) - 1, self._cursor + across + down * grid.columns))
        band, shown = self._cursor // grid.columns, grid.count_fitting(self._room)
        top = min(max(self._first // grid.columns, band - shown + 1), band)
        self._first = top * grid.columns
        self._draw()

    def action_choose(self) -> None:
        if self._cursor < len(self._rows):
            self.post_message(self.Chosen(self._rows[self._cursor].sample.index))

    def on_click(self, event: Click) -> None:
        grid, at = self._grid(), event.get_content_offset(self)
        if at is None:
            return
        column = min(grid.columns - 1, at.x * grid.columns // max(1, self.width))
        place = self._first + at.y // grid.height * grid.columns + column
        if place < len(self._rows):
            again, self._cursor = place == self._cursor, place
            self._draw()
            if again:
                self.action_choose()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def on_mouse_scroll_down(self) -> None:
        self._scroll_by(1)

    def on_mouse_scroll_up(self) -> None:
        self._scroll_by(-1)

    def on_resize(self, _: Resize) -> None:
        if self._rows:
            self._draw()

    def _scroll_by(self, bands: int) -> None:
        if self._rows:
            self._first += bands * self._grid().columns
            self._draw()

    def _grid(self) -> _Grid:
        if self._cards:
            return _card_grid(len(self._rows), self.width, self._room)
        return _Grid(1, self._lines_each, len(self._rows))

    def _draw(self) -> None:
        width = self.width
        if not width:
            return
        grid = self._grid()
        shown = grid.count_fitting(self._room)
        top = max(0, min(self._first // grid.columns, grid.bands - shown))
        self._first = top * grid.columns
        at = self._cursor if self.has_focus else None
        marked = [replace(row, has_cursor=True) if place == at else row for place, row in enumerate(self._rows)]
        rows = marked[self._first : (top + shown) * grid.columns]
        lines = card_lines(rows, width, grid) if self._cards else gpu_lines(rows, self._rows, width, grid.height)
        if shown < grid.bands:
            lines.append(_more(self._first, len(self._rows) - self._first - len(rows), width))
        self.show(lines)


@dataclass(frozen=True, slots=True)
class _Grid:
    """GPUs side by side in `columns`, in bands of `height` lines below each other."""

    columns: int
    height: int
    bands: int

    def count_fitting(self, room: int) -> int:
        """Return how many bands fit into `room` lines, of which one is kept to say what does not fit."""
        fitting = room // self.height
        return self.bands if fitting >= self.bands else max(1, (room - 1) // self.height)


def _more(above: int, below: int, width: int) -> Line:
    parts = [f"▲ {above} more" if above else "", f"▼ {below} more" if below else ""]
    return ((fit(f"   {'  '.join(filter(None, parts))}  (keys [ and ])", width), "accent"),)


def gpu_lines(rows: Sequence[GpuRow], of: Sequence[GpuRow], width: int, each: int = 1) -> list[Line]:
    """Return `each` lines, one or two, for each GPU in columns that suit all `of` them, so that nothing moves while
    one scrolls."""
    longest = max((cell_len(row.holder) for row in of if row.sample.healthy), default=0)
    if each > 1:
        longest = longest // 2 + _LONG_WORD
    return [line for row in rows for line in gpu_line(row, width, longest, each)]


def gpu_line(row: GpuRow, width: int, longest: int = 0, each: int = 1) -> list[Line]:
    """Return a GPU in one line or two; bars and numbers go first where the terminal is narrow, the reason last.

    Of two lines the second has the lower half of the histories, the power limit, and what there was no room for: who
    has the card, or if that is said, the processes on it.
    """
    sample = row.sample
    head: Line = (
        (fit(f"{sample.index}", 2, right=True), f"title{row.mark}"),
        (" " + fit(short_name(sample.name), 13), f"label{row.mark}"),
    )
    if not sample.healthy:
        line = (*head, (fit(f"✗ {sample.reason}", max(0, width - 16)), "bad"))
        return [line, *[_blank(width)] * (each - 1)]
    bar_width, power_width, sparks, holder_width = _columns(width, longest)
    gap: Span = (" " if any(sparks) or not holder_width else "", "text")
    util = _history(row, "utilization", sparks[0], 100, each)
    memory = _history(row, "memory_used_bytes", sparks[1], sample.memory_total_bytes, each)
    first: Line = (
        *head,
        *_meter(percent(sample.utilization), 5, _share(sample.utilization, 100), bar_width, "spark"),
        (util[0], "spark"),
        gap,
        *_meter(memory_short(sample), 11, memory_share(sample), bar_width, "memory"),
        (memory[0], "memory"),
        gap,
        (fit(celsius(sample.temperature_c), 5, right=True) + " ", _heat(sample)),
        (fit(watts(sample.power_w), 6, right=True) + " " if power_width else "", "text"),
    )
    if each == 1:
        return [(*first, (fit(row.holder, holder_width), row.holder_style))]
    who, *more = wrap(row.holder, holder_width) or [""]
    blank = bar_width + bool(bar_width)
    condition = sample.condition or NO_CONDITION
    below, below_style = _below(row, " ".join(more))
    limit = "" if sample.power_limit_w is None else f"of {watts(sample.power_limit_w)}"
    return [
        (*first, (fit(who, holder_width), row.holder_style)),
        (
            (fit(f"   {speed(condition)}", 16), "dim"),
            (fit(fan(condition), 5 + blank, right=True) + " ", "dim"),
            (util[1], "spark"),
            (gap[0], "text"),
            (fit(free(sample), 11 + blank, right=True) + " ", "dim"),
            (memory[1], "memory"),
            (gap[0], "text"),
            (fit(limit, 5 + power_width, right=True) + " ", "dim"),
            (fit(below, holder_width), below_style),
        ),
    ]


def _below(row: GpuRow, rest: str) -> tuple[str, str]:
    """Return what stands below the holder: an error of the last hour, what slows the card, else the rest of the holder,
    else the processes."""
    condition = row.sample.condition
    if condition and condition.xid and time.time() - condition.xid.timestamp < _ERROR_TOLD_S:
        return condition.xid.words, "bad"
    slowed = condition.slowed_by if condition else ()
    if slowed:
        return f"slowed: {'; '.join(slowed)}", "warn"
    return (rest, row.holder_style) if rest else (processes(row.sample), "dim")


def speed(condition: Condition) -> str:
    """Return `P2 1695 MHz`."""
    state, clock = condition.performance_state, condition.sm_clock_mhz
    return " ".join(filter(None, ["" if state is None else f"P{state}", "" if clock is None else f"{clock} MHz"]))


def fan(condition: Condition) -> str:
    return "" if condition.fan_percent is None else f"fan {condition.fan_percent}%"


def free(sample: GpuSample) -> str:
    """Return `2.1Gi free`, which a job could have."""
    size = sample.memory_free_bytes
    return "" if size is None else f"{size / 2**30:.{0 if size >= 100 << 30 else 1}f}Gi free"


def processes(sample: GpuSample) -> str:
    """Return who computes on a card, those who hold most first: `31415 mallory python 21.0 GiB`."""
    largest = sorted(sample.processes or (), key=lambda each: -(each.memory_used_bytes or 0))
    words = ((str(one.pid), one.user, one.name, gibibytes(one.memory_used_bytes)) for one in largest)
    return ", ".join(" ".join(filter(None, each)) for each in words)


def _columns(width: int, longest: int) -> tuple[int, int, tuple[int, int], int]:
    """Return the widths of a bar, the power, the two histories and the holder, of which `longest` is wanted."""
    power = 7 if width >= 60 else 0
    if width < 70:
        return 0, power, (max(0, width - 43 - power), 0), 0
    least = 24 if width >= 100 else 13
    bars = 10 if width >= 100 and width - 72 - max(least, longest) >= LEAST_HISTORY else 6
    left = width - 43 - power - 2 * (bars + 1)
    if left - least < LEAST_HISTORY:
        return bars, power, (0, 0), left + 2
    holder = min(max(least, longest), left - LEAST_HISTORY)
    room = left - holder
    return bars, power, (room // 2, room - room // 2) if room >= 24 else (room, 0), holder


def _card_grid(count: int, width: int, room: int) -> _Grid:
    """Return the grid of the cards, each as tall as the room allows (2 to 5 lines)."""
    columns = max(1, min(count, width // CARD_WIDTH))
    bands = -(-count // columns)
    return _Grid(columns, max(2, min(5, room // max(1, bands))), bands)


def card_lines(rows: Sequence[GpuRow], width: int, grid: _Grid) -> list[Line]:
    """Return the cards side by side and below each other."""
    card_width = width // grid.columns
    lines: list[Line] = []
    for start in range(0, len(rows), grid.columns):
        cards = [card(row, card_width - 2, grid.height) for row in rows[start : start + grid.columns]]
        lines += [_beside([one[y] for one in cards], card_width) for y in range(grid.height)]
    return lines


def card(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return a GPU in 2 to 5 lines: heading, utilisation, memory, heat and power, and a blank line."""
    sample = row.sample
    if not sample.healthy:
        return _unhealthy(row, width, height)
    heading = _heading(row, width)
    heat = ((fit(celsius(sample.temperature_c), 6, right=True), _heat(sample)), (fit(f"  {power(sample)}", 16), "text"))
    util = _card_row(row, "util", percent(sample.utilization), "utilization", 100, width, "spark", "spark")
    memory = _card_row(
        row, "mem", memory_short(sample), "memory_used_bytes", sample.memory_total_bytes, width, "memory", "memory"
    )
    last = (*heat, (" " * max(0, width - 22), "text"))
    return {2: [heading, util], 3: [heading, util, memory], 4: [heading, util, memory, last]}.get(
        height, [heading, util, memory, last, _blank(width)]
    )


def _unhealthy(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return the heading, and the reason in as many of the other lines as it takes."""
    sample = row.sample
    texts = textwrap.wrap(sample.reason, max(10, width - 3), max_lines=height - 1, placeholder=" …")
    reason = [((fit(f" {' ' if place else '✗'} {text}", width), "bad"),) for place, text in enumerate(texts)]
    return [((fit(_name(sample), width), f"title{row.mark}"),), *reason, *[_blank(width)] * (height - 1 - len(reason))]


def _name(sample: GpuSample) -> str:
    return f" GPU {sample.index} {short_name(sample.name)} "


def _heading(row: GpuRow, width: int) -> Line:
    name = _name(row.sample)
    holder_width = max(0, width - len(name))
    return (
        (fit(name, width - holder_width), f"title{row.mark}"),
        (fit(row.holder, holder_width, right=True), row.holder_style),
    )


def _card_row(
    row: GpuRow, label: str, text: str, name: str, top: float | None, width: int, bar_style: str, spark_style: str
) -> Line:
    share = _share(getattr(row.sample, name), top)
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
        (bar(share, width), f"{style} rail"),
        (" " if width else "", "text"),
    )


def _spark(row: GpuRow, name: str, width: int, top: float | None, style: str) -> Span:
    return (_history(row, name, width, top, 1)[0], style)


def _history(row: GpuRow, name: str, width: int, top: float | None, height: int) -> list[str]:
    return tall_sparkline(row.column(name, width), width, height, top) if width else [""] * height


def _heat(sample: GpuSample) -> str:
    return "bad" if sample.temperature_c is not None and sample.temperature_c >= HOT_C else "text"


def _share(value: float | None, top: float | None) -> float | None:
    return value / top if value is not None and top else None


def memory_share(sample: GpuSample) -> float | None:
    return _share(sample.memory_used_bytes, sample.memory_total_bytes)


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
