"""The GPUs on other hosts: one heading per host with its state and totals, followed by one line per GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from textual.binding import Binding
from textual.events import Resize

from sae_tui.format import fit, gibibytes, percent, watts
from sae_tui.gpu.aggregate import aggregate
from sae_tui.hosts.protocol import FarProcess
from sae_tui.hosts.view import ConnectionStage, HostView
from sae_tui.panels.gpu_lines import gpu_lines
from sae_tui.panels.gpu_row import GpuRow, short_name
from sae_tui.widgets.lines import Line, LineView, Span
from sae_tui.widgets.reading import LinesScreen
from trainer.contract.wording import plural

_SIGNS: dict[ConnectionStage, tuple[str, str]] = {
    ConnectionStage.CONNECTING: ("◔", "accent"),
    ConnectionStage.CONNECTED: ("●", "good"),
    ConnectionStage.SILENT: ("◔", "warn"),
    ConnectionStage.CUT: ("✗", "warn"),
    ConnectionStage.FAILED: ("✗", "bad"),
}

_FEWEST = 3  # lines


@dataclass(frozen=True, slots=True)
class FarHost:
    """A remote host and the rows for its GPUs."""

    view: HostView
    rows: tuple[GpuRow, ...]


class FarGpus(LineView, can_focus=True):
    """Shows one line per host, plus the GPUs on as many hosts as fit.

    While the panel has the focus, the cursor is on one host, whose GPUs take precedence.
    """

    BINDINGS = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("enter", "choose", "Processes", id="hosts.processes", tooltip="GPU processes on this host"),
    ]

    _hosts: tuple[FarHost, ...] = ()
    _space = _at = 0

    def show_hosts(self, hosts: Sequence[FarHost], space: int) -> None:
        """Draw the hosts in at most `space` lines. Every host gets a line, even if there are more hosts than lines."""
        self._hosts, self._space = tuple(hosts), space
        self._draw()

    def lines_of(self, views: Sequence[HostView], space: int) -> int:
        """Return how many of `space` lines these hosts take: one line each, plus the GPUs on as many hosts as fit."""
        counts = [len(view.gpus) for view in views]
        return len(counts) + sum(_opened(counts, space, self._at).values())

    def action_move(self, by: int) -> None:
        if self._hosts:
            self._at = max(0, min(len(self._hosts) - 1, self._at + by))
            self._draw()
            self.scroll_to(y=self._at, animate=False)

    def action_choose(self) -> None:
        """Show the processes on the GPUs of the host under the cursor."""
        if self._at < len(self._hosts):
            view = self._hosts[self._at].view
            self.app.push_screen(LinesScreen(f"Processes on {view.name}", partial(process_lines, view)))

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.width
        if not width or not self._hosts:
            return
        every = [row for host in self._hosts for row in host.rows]
        opened = _opened([len(host.rows) for host in self._hosts], self._space, self._at)
        longest = max(cell_len(host.view.name) for host in self._hosts)
        lines: list[Line] = []
        for place, host in enumerate(self._hosts):
            mark = " cursor" if self.has_focus and place == self._at else ""
            lines.append(heading(host, width, min(longest, width // 3), mark, is_open=place in opened))
            lines += _some(host.rows, every, width, opened.get(place, 0))
        self.show(lines)


def _opened(counts: Sequence[int], space: int, first: int) -> dict[int, int]:
    """Return the number of GPU lines for each host whose GPUs fit, as a dict by host index.

    Host `first` takes precedence. Only host `first` may show just some of its GPUs; every other host shows all or none.
    """
    opened: dict[int, int] = {}
    left = space - len(counts)
    for place in sorted(range(len(counts)), key=lambda place: (place != first, place)):
        if counts[place] <= left or (left >= _FEWEST and not opened):
            opened[place] = min(left, counts[place])
            left -= opened[place]
    return opened


def _some(rows: Sequence[GpuRow], of: Sequence[GpuRow], width: int, space: int) -> list[Line]:
    """Return the GPUs in at most `space` lines; if some do not fit, the last line says how many are missing."""
    if len(rows) <= space or not space:
        return gpu_lines(rows[:space], of, width)
    more = (fit(f"   {len(rows) - space + 1} more", width), "dim")
    return [*gpu_lines(rows[: space - 1], of, width), (more,)]


def heading(host: FarHost, width: int, name_width: int, mark: str, *, is_open: bool) -> Line:
    """Return a host's line: its name, the connection state, and its totals or the problem."""
    sign, style = _SIGNS[host.view.stage]
    name: Span = (f" {fit(host.view.name, name_width)} ", f"title{mark}")
    words, words_style = state_words(host, is_open=is_open), "dim" if host.view.is_connected else style
    return (name, (f"{sign} ", style), (fit(words, max(0, width - name_width - 4)), words_style))


def state_words(host: FarHost, *, is_open: bool = True) -> str:
    """Describe the state of a host: its totals, or why it is not connected."""
    view = host.view
    if view.stage is ConnectionStage.CONNECTING:
        return "connecting…"
    if view.stage is ConnectionStage.SILENT:
        return f"silent since {time.strftime('%H:%M:%S', time.localtime(view.since))}"
    if view.stage is ConnectionStage.CUT:
        why = f"it {view.sentence}" if view.sentence else "connecting again"
        return f"cut since {time.strftime('%H:%M:%S', time.localtime(view.since))}; {why}"
    return view.sentence or view.problem or _totals(host, is_open=is_open)


def _totals(host: FarHost, *, is_open: bool) -> str:
    if not host.rows:
        return "connected"
    now = aggregate([row.sample for row in host.rows])
    total = now.total_memory_total_bytes
    memory = f"{(now.total_memory_used_bytes or 0) / 2**30:.0f} of {total / 2**30:.0f} GiB" if total else ""
    hot = f"{now.hottest.temperature_c}°C" if now.hottest and not is_open else ""
    used = "" if now.average_utilization is None else percent(now.average_utilization)
    parts = [plural(len(host.rows), "GPU"), used, memory, watts(now.total_power_w), hot]
    return " · ".join(filter(None, parts))


def process_lines(view: HostView, width: int) -> list[Line]:
    """Return lines with a host's GPUs, each followed by the processes that use the most of its memory."""
    lines: list[Line] = []
    for gpu in view.gpus:
        head = f"GPU {gpu.index} {short_name(gpu.name)}"
        lines.append(((fit(head, min(width, cell_len(head) + 2)), "title"), (gpu.holder, "dim")))
        lines += [((fit(f"  {_of_process(one)}", width), "text"),) for one in gpu.processes]
    return lines or [(("No GPU data from this host.", "dim"),)]


def _of_process(process: FarProcess) -> str:
    memory = "–" if process.memory_used_bytes is None else gibibytes(process.memory_used_bytes)
    name = process.name or "cannot be seen from there"
    return f"{process.pid:>9}  {fit(process.user or '–', 12)} {memory:>10}  {name}"
