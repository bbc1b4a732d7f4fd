"""The memory a job needs on its device, by component, and the device's free memory."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

import msgspec
from rich.cells import cell_len
from textual.events import Resize
from textual.reactive import reactive

from sae_tui.format import gibibytes
from sae_tui.jobs.launch.memory_need import FreeMemory, Need
from sae_tui.widgets.lines import Line, LineView, Span, cut
from trainer.contract.planning.memory_bar import LETTERS, cells

# The first letter of each name appears in the bar, so that the names also serve as the legend. The short names are for
# narrow terminals.
NAMES = {
    "weights": ("Weights", "Weights"),
    "gradients": ("Gradients", "Grad"),
    "optimizer": ("Optimizer", "Opt"),
    "activations": ("Activations", "Acts"),
    "communication": ("Exchange", "Exch"),
    "slack": ("Reserve", "Resv"),
    "context": ("CUDA", "CUDA"),
}
ON_CPU = {"context": ("Code", "Code")}
COLOURS = {
    "weights": "spark",
    "gradients": "bar",
    "optimizer": "memory",
    "activations": "accent",
    "communication": "warn",
    "slack": "label",
    "context": "text",
}
# The full width of the bar represents at most this multiple of the job's memory, so that the components of a small job
# remain distinguishable on a large GPU.
MOST_ROOM = 3
WIDE = 116


class MemoryBar(LineView):
    """The bar, its heading and legend and, if known, the measured memory and changes that would make the job fit."""

    DEFAULT_CSS = "MemoryBar { height: auto; min-height: 2; max-height: 4; }"

    # The heading shown before the bar.
    heading: reactive[str] = reactive(" ")

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._need: Need | None = None
        self._capacity = FreeMemory()

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def watch_heading(self) -> None:
        self._draw()

    def show_need(self, need: Need | None, capacity: FreeMemory) -> None:
        """Draw the job's memory requirement and the free memory.

        If no job could be checked, draw only the heading.
        """
        self._need, self._capacity = need, capacity
        self._draw()

    def _draw(self) -> None:
        width = self.width
        if width:
            self.show([cut(line, width) for line in memory_lines(self.heading, self._need, self._capacity, width)])


def memory_lines(heading: str, need: Need | None, capacity: FreeMemory, width: int) -> list[Line]:
    """Return at least two lines, so that the form does not shift while the user types."""
    first: Line = ((heading, "title accent"),)
    if need is None:
        return [first, ((" ", "text"),)]
    verdict = _verdict(need, capacity)
    bar_width = max(0, width - sum(cell_len(text) for text, _ in (*first, verdict)) - 1)
    drawn = {name for name, n_cells in _widths(need, capacity, bar_width).items() if n_cells}
    lines = [(*first, *bar(need, capacity, bar_width), verdict), _legend(need, drawn, width)]
    notes = [*_measured(need), *_remedies(need, capacity)]
    joined = _line([" · ".join(text for text, _ in notes)], notes[-1][1]) if notes else ()
    if len(notes) > 1 and sum(cell_len(text) for text, _ in joined) > width:
        return lines + [_line([text], style) for text, style in notes]
    return [*lines, joined] if notes else lines


def bar(need: Need, capacity: FreeMemory, width: int) -> Line:
    """Return a bar to scale, with a letter in each component's segment and a mark at the end of the free memory."""
    drawn: list[Span] = []
    for name, n_cells in _widths(need, capacity, width).items():
        if n_cells:
            drawn += [(LETTERS[name], f"{COLOURS[name]} swapped"), *[("█", COLOURS[name])] * (n_cells - 1)]
    drawn += [(" ", "trough")] * (width - len(drawn))
    free, top = _scale(need, capacity)
    if free is not None and drawn:
        mark = "│" if free <= top else "→"
        drawn[min(width - 1, int(width * free / top))] = (mark, "bad" if need.lacks(capacity) else "title trough")
    runs = groupby(drawn, key=lambda span: span[1])
    return tuple(("".join(text for text, _ in run), style) for style, run in runs)


def _scale(need: Need, capacity: FreeMemory) -> tuple[float | None, float]:
    """Return the free memory per rank, or None if it is unknown, and the memory that the whole bar represents."""
    free = None if capacity.free_bytes is None else capacity.free_bytes / need.sharing
    return free, max(need.parts.total, min(free or 0, MOST_ROOM * need.parts.total))


def _widths(need: Need, capacity: FreeMemory, width: int) -> dict[str, int]:
    """Return how many cells each component takes up in a bar of this width."""
    return cells(need.parts, round(width * need.parts.total / _scale(need, capacity)[1]))


def _verdict(need: Need, capacity: FreeMemory) -> Span:
    """Return the memory requirement and whether it fits, like `✓ 4 × 82 MB of 12.3 GB free on this machine`."""
    total = gibibytes(need.rank_bytes)
    taken = f"{need.sharing} × {total}" if need.sharing > 1 else total
    if capacity.free_bytes is None:
        return f" {taken}", "text"
    mark, style = ("✗", "bad") if need.lacks(capacity) else ("✓", "good")
    return f" {mark} {taken} of {gibibytes(capacity.free_bytes)} free on {capacity.where}", style


def _legend(need: Need, drawn: Collection[str], width: int) -> Line:
    """Name the components in the bar with their sizes, and then the components too small for a cell."""
    names = NAMES if need.on_gpus else NAMES | ON_CPU
    sizes = {name: n_bytes for name, n_bytes in msgspec.structs.asdict(need.parts).items() if n_bytes}
    between = "  " if width >= WIDE else " "
    spans: list[Span] = []
    for name in filter(drawn.__contains__, sizes):
        word = names[name][width < WIDE]
        spans += [(between if spans else "", "text"), (word[0], f"{COLOURS[name]} swapped")]
        spans += [(f"{word[1:]} ", "label"), (short(sizes[name]), "text")]
    small = [name for name in sizes if name not in drawn]
    if small and width >= WIDE:
        each = between.join(f"{names[name][0]} {short(sizes[name])}" for name in small)
        spans.append((f"{between}not drawn: {each}", "label"))
    elif small:
        words = "+".join(names[name][1] for name in small)
        spans += [(f"{between}{words} ", "label"), (short(sum(sizes[name] for name in small)), "text")]
    space = width - sum(len(text) for text, _ in spans)
    return ((" " * max(0, min(4, space)), "text"), *spans)


def short(n_bytes: int) -> str:
    """Return a size like `82Mi`, `1.2Gi` or `12Gi`: at most five cells, so that all components fit on one line."""
    size = n_bytes / 2**30
    if size < 0.1:
        return f"{max(1, round(n_bytes / 2**20))}Mi"
    return f"{size:.0f}Gi" if size >= 9.95 else f"{size:.1f}Gi"


def _measured(need: Need) -> list[Span]:
    if need.measured is None:
        return []
    return [(str(need.measured), "warn" if need.rank_bytes > need.parts.total else "text")]


def _remedies(need: Need, capacity: FreeMemory) -> list[Span]:
    if not need.lacks(capacity):
        return []
    # Name settings without their section, as in the form.
    cures = [cure.partition(".")[2].replace('"', "") for cure in need.remedies]
    return [(f"fits with {', or '.join(cures)}" if cures else f"fits with {need.otherwise}", "warn")]


def _line(texts: list[str], style: str) -> Line:
    return (("    ", "text"), *((text, style) for text in texts))
