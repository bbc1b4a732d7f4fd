"""The app's load on the machine, and the number of bytes it sends to the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sae_tui.format import count, duration, gibibytes
from sae_tui.widgets.lines import Line

_NAME = 22
_SLOW_S = 0.1  # the threshold for a slow GPU reading; a reading usually takes 1 ms


@dataclass(frozen=True, slots=True)
class OwnCost:
    """The app's cost since it started: CPU time, current memory, threads, bytes sent to the terminal.

    `elapsed_s` is the time since the start. `readings_s` maps each GPU index to the duration of that GPU's last
    reading.
    """

    elapsed_s: float
    cpu_s: float
    memory_bytes: int
    n_threads: int
    written_bytes: int
    readings_s: Mapping[int, float]


def own_cost(written_bytes: int, readings_s: Mapping[int, float]) -> OwnCost:
    """Measure this process's resource use."""
    import psutil

    process = psutil.Process()
    with process.oneshot():
        spent, elapsed = process.cpu_times(), time.time() - process.create_time()
        memory, n_threads = process.memory_info().rss, process.num_threads()
    return OwnCost(elapsed, spent.user + spent.system, memory, n_threads, written_bytes, readings_s)


def cost_lines(cost: OwnCost, _width: int) -> Sequence[Line]:
    """Return the lines for the page showing the app's resource use."""
    minutes = max(cost.elapsed_s, 1.0) / 60
    lines = [
        _line("run time", duration(cost.elapsed_s)),
        _line("CPU", f"{cost.cpu_s / minutes:.2f} s per minute, including startup"),
        _line("memory", gibibytes(cost.memory_bytes)),
        _line("threads", str(cost.n_threads)),
        _line("terminal output", f"{count(cost.written_bytes / (60 * minutes))} bytes per second"),
    ]
    for index, seconds in sorted(cost.readings_s.items()):
        is_slow = seconds >= _SLOW_S
        time_taken = f"{1000 * seconds:.1f} ms{' (slow)' if is_slow else ''}"
        lines.append(_line(f"reading GPU {index}", time_taken, "warn" if is_slow else "text"))
    return lines


def _line(name: str, value: str, style: str = "text") -> Line:
    return (f" {name:<{_NAME}}", "label"), (value, style)
