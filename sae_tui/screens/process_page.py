"""The page for one process: graphs of its recent resource use, and everything known about it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from textual.binding import Binding

from sae_tui.format import UNKNOWN, clock_time, duration, fit, gibibytes, percent, wrap
from sae_tui.gpu.process_history import ProcessReading, in_columns
from sae_tui.gpu.processes import ProcessDetails, Surroundings, surroundings
from sae_tui.panels.processes import PROCESSES
from sae_tui.widgets.area import area, columns_of, side_by_side, time_axis
from sae_tui.widgets.lines import Line
from sae_tui.widgets.old_keys import old_key
from sae_tui.widgets.reading import LinesScreen

_NAME = 13  # width of the name column, in cells
_MOST_OF_A_PARENT = 160  # in characters; enough to identify what started a process
_AIR: Line = ((" ", "text"),)
_SPAN_S = 120.0  # the time span of the graphs; longer if they have more columns than seconds
_BESIDE_FROM = 60  # columns; a narrower page shows the graphs one below the other
_LEAST_GRAPH = 16  # columns
_GAP = 2  # columns between two graphs
_KINDS = {"C": "compute", "G": "graphics", "C+G": "compute and graphics"}


def fact_lines(process: ProcessDetails, around: Surroundings, width: int) -> list[Line]:
    """Return the facts about a process, as lines of `width` cells."""
    known = ((name, value) for name, value in _facts(process, around) if value and value != UNKNOWN)
    return [line for name, value in known for line in _entry(name, value, width)]


def environment_lines(around: Surroundings, width: int, *, whole: bool = False) -> list[Line]:
    """Return a process's environment as lines of `width` cells; with `whole`, include possibly secret values."""
    lines: list[Line] = []
    for place, (name, value) in enumerate(around.shown(whole=whole)):
        lines += [*([] if place else [_AIR]), *_entry("" if place else "environment", f"{name}={value}", width)]
    return lines


def _facts(process: ProcessDetails, around: Surroundings) -> Iterator[tuple[str, str]]:
    runs = None if process.started is None else max(0.0, time.time() - process.started)
    yield "command", process.command or "cannot be seen from here"
    yield "user", process.user or ""
    yield "GPUs", ", ".join(map(str, process.gpus))
    yield "type", _KINDS.get(process.kind or "", "")
    yield "GPU memory", gibibytes(process.memory_used_bytes)
    yield "GPU use", _gpu_use(process)
    yield "CPU", percent(process.cpu_percent)
    yield "host memory", _host_memory(process)
    yield "run time", "" if process.started is None else f"{duration(runs)}, since {clock_time(process.started)}"
    yield "container", process.container
    yield "folder", around.folder
    yield "program", around.program
    for place, parent in enumerate(process.ancestors):
        words = " ".join(filter(None, [str(parent.pid), parent.user, parent.command]))[:_MOST_OF_A_PARENT]
        yield ("its parent" if place else "started by"), words


def _gpu_use(process: ProcessDetails) -> str:
    shares = {
        "SM": process.sm_percent,
        "memory bandwidth": process.bandwidth_percent,
        "encoder": process.encoder_percent,
        "decoder": process.decoder_percent,
    }
    return ", ".join(f"{name} {percent(share)}" for name, share in shares.items() if share is not None)


def _host_memory(process: ProcessDetails) -> str:
    share = process.host_memory_percent
    return gibibytes(process.host_memory_bytes) + ("" if share is None else f", {share:.1f}% of this machine's")


def _entry(name: str, value: str, width: int) -> Iterator[Line]:
    space = max(8, width - _NAME - 2)
    for row, part in enumerate(wrap(value, space)):
        yield (f" {fit(name if row == 0 else '', _NAME)}", "label"), (fit(part, space), "text")


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph's field, title, style and formatter. `top` returns the end of its axis for the highest value drawn.

    The end of the axis is labelled with its own value, divided by `unit`.
    """

    field: str
    title: str
    style: str
    words: Callable[[float | None], str]
    top: Callable[[float], float]
    unit: int = 1


_GRAPHS = (
    _Graph("sm_percent", "SM", "spark", percent, lambda _: 100),
    _Graph("memory_used_bytes", "GPU memory", "memory", gibibytes, lambda most: _round_up(most, 1 << 30), 1 << 30),
    _Graph("cpu_percent", "CPU", "bar", percent, lambda most: 100 * max(1, math.ceil(most / 100))),
    _Graph(
        "host_memory_bytes", "Host memory", "heat", gibibytes, lambda most: _round_up(most, 1 << 30), 1 << 30
    ),
)  # fmt: skip


def _round_up(value: float, unit: int) -> float:
    """Return the next larger number of units whose half is also a round number: 2, 4, 6, 8, 10, 20, 40 and so on."""
    power = 10.0 ** math.floor(math.log10(max(value / unit, 1)))
    return next(factor * power for factor in (2, 4, 6, 8, 10) if factor * power * unit >= value) * unit


def graph_lines(readings: Sequence[ProcessReading], width: int, height: int, now: float) -> list[Line]:
    """Return a graph of `height` rows for each quantity with a known value, two of them side by side if they fit."""
    known = [one for one in _GRAPHS if any(getattr(reading, one.field) is not None for reading in readings)]
    n_beside = 2 if width >= _BESIDE_FROM else 1
    space = (width - _GAP * (n_beside - 1)) // n_beside
    n_columns = columns_of(space)
    if not known or n_columns < _LEAST_GRAPH:
        return []
    span_s = max(_SPAN_S, n_columns)
    graphs = [_graph(one, readings, space, height, span_s, now) for one in known]
    lines: list[Line] = []
    for left, right in zip(graphs[::2], [*graphs[1::2], None], strict=False):
        below = side_by_side(left, right, _GAP) if right and n_beside == 2 else [*left, *(right or [])]
        lines += below
    axis = time_axis(f"last {duration(span_s)}", "now", space, span_s)
    return [*lines, side_by_side([axis], [axis], _GAP)[0] if n_beside == 2 and len(graphs) > 1 else axis, _AIR]


def _graph(
    graph: _Graph, readings: Sequence[ProcessReading], width: int, height: int, span_s: float, now: float
) -> list[Line]:
    values = in_columns(readings, graph.field, columns_of(width), span_s, now)
    top = graph.top(max((value for value in values if value is not None), default=0))
    latest = graph.words(getattr(readings[-1], graph.field))
    heading: Line = ((f" {graph.title} ", "label"), (fit(latest, max(0, width - len(graph.title) - 2)), "title"))
    shares = [None if value is None else value / top for value in values]
    return area(heading, shares, style=graph.style, ceiling=top / graph.unit, width=width, height=height)


class ProcessPage(LinesScreen):
    """The full page for a process, redrawn with every sample; if `may_show`, a key reveals possibly secret values.

    `latest` returns the process as last listed, or None if it is no longer listed, and `readings` returns its recent
    readings.
    """

    BINDINGS = [
        Binding("a", "show_values", "All values", id="process.values", group=PROCESSES,
                tooltip="Show all variables, or hide the values that may be secret"),
        old_key("v", "show_values"),
    ]  # fmt: skip

    def __init__(
        self,
        process: ProcessDetails,
        latest: Callable[[], ProcessDetails | None],
        readings: Callable[[], Sequence[ProcessReading]],
        *,
        may_show: bool,
    ) -> None:
        super().__init__(f"Process {process.pid}", self._lines)
        self._process, self._around, self._may_show = process, surroundings(process), may_show
        self._latest, self._readings = latest, readings
        self._seen: Sequence[ProcessReading] = ()
        # The environment does not change, so its lines are built only once.
        self._environment = functools.cache(lambda width, whole: environment_lines(self._around, width, whole=whole))
        self.shows_all = False

    def _lines(self, width: int) -> Sequence[Line]:
        listed = self._latest()
        self._process, self._seen = listed or self._process, self._readings() or self._seen
        rows = max(2, min(8, self.size.height // 8))
        gone: list[Line] = [] if listed else [((" It has exited or no longer uses a GPU.", "warn"),), _AIR]
        return [
            *gone,
            *graph_lines(self._seen, width, rows, time.monotonic()),
            *fact_lines(self._process, self._around, width),
            *self._environment(width, self.shows_all),
        ]

    def show_gpus(self) -> None:
        """Draw the process as last listed."""
        if self.is_mounted:
            self.draw_again()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self._may_show if action == "show_values" else super().check_action(action, parameters)

    def action_show_values(self) -> None:
        self.shows_all = not self.shows_all
        self.draw_again()

    def hide_values(self) -> None:
        """Hide possibly secret values."""
        if self.shows_all:
            self.action_show_values()
