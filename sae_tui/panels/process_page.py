"""The page of one process: how and where it was started, what it uses, and its environment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from sae_tui.format import UNKNOWN, clock_time, duration, fit, gibibytes, percent, wrap
from sae_tui.gpu.processes import ProcessDetails, Surroundings
from sae_tui.widgets.lines import Line

_NAME = 13  # cells of a fact's name
_MOST_OF_A_PARENT = 160  # characters; enough to identify what started a process
_AIR: Line = ((" ", "text"),)


def process_lines(process: ProcessDetails, around: Surroundings, width: int, *, whole: bool = False) -> Sequence[Line]:
    """Return the page of a process, wrapped to a width; with `whole`, include values that may be secret."""
    known = ((name, value) for name, value in _facts(process, around) if value and value != UNKNOWN)
    lines = [line for name, value in known for line in _entry(name, value, width)]
    for place, (name, value) in enumerate(around.shown(whole=whole)):
        lines += [*([] if place else [_AIR]), *_entry("" if place else "environment", f"{name}={value}", width)]
    return lines


def _facts(process: ProcessDetails, around: Surroundings) -> Iterator[tuple[str, str]]:
    runs = None if process.started is None else max(0.0, time.time() - process.started)
    yield "command", process.command or "cannot be seen from here"
    yield "user", process.user or ""
    yield "GPUs", ", ".join(map(str, process.gpus))
    yield "GPU memory", gibibytes(process.memory_used_bytes)
    yield "SM", percent(process.sm_percent)
    yield "CPU", percent(process.cpu_percent)
    yield "host memory", gibibytes(process.host_memory_bytes)
    yield "run time", "" if process.started is None else f"{duration(runs)}, since {clock_time(process.started)}"
    yield "container", process.container
    yield "folder", around.folder
    yield "program", around.program
    for place, parent in enumerate(process.ancestors):
        words = " ".join(filter(None, [str(parent.pid), parent.user, parent.command]))[:_MOST_OF_A_PARENT]
        yield ("its parent" if place else "started by"), words


def _entry(name: str, value: str, width: int) -> Iterator[Line]:
    space = max(8, width - _NAME - 2)
    for row, part in enumerate(wrap(value, space)):
        yield (f" {fit(name if row == 0 else '', _NAME)}", "label"), (fit(part, space), "text")
