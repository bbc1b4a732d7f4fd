"""Tests for how the dashboard shows slow, hung and lost GPUs in a real terminal."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from support.box import Box
from support.driver import environment
from support.terminal import Terminal

BLOCKS = " ▁▂▃▄▅▆▇█"
NVML = ("--gpu-source", "nvml")
SILENT = "has not responded for"


def heights(terminal: Terminal, start: str, first_column: int) -> list[int]:
    """Return the bar heights in the row that starts with `start`, from `first_column` on; a gap has height 0."""
    line = next((line for line in terminal.screen.display if line.startswith(start)), "")
    return [BLOCKS.index(char) for char in line[first_column:] if char in BLOCKS]


def drawn(terminal: Terminal, gpu: int) -> int:
    """Return the number of columns in a GPU's utilisation history."""
    line = next((line for line in terminal.screen.display if line.startswith(f" {gpu} H200")), "")
    return sum(char in BLOCKS[1:] for char in line[29:44])


def test_a_slow_gpu_has_a_full_plot_and_silent_gpus_are_left_out_of_the_sums(box: Box, drivers: Path) -> None:
    faults = environment(drivers, GPUS=4, PIDS="", FAULTS="1:slow=400,2:hang@5,3:lost@5")
    terminal = box.app(99, 30, *NVML, shows="H200", **faults)
    terminal.wait_for(SILENT)
    text = terminal.wait_for("4 GPUs, 1 lost, 1 unreadable")
    assert "421.2 GiB" not in text
    assert "280.8 GiB · 2 of 4" in text
    terminal.wait_for(lambda _: drawn(terminal, 0) >= 12)
    terminal.wait_for(lambda _: drawn(terminal, 1) >= 8)

    terminal.resize(120, 40)
    terminal.wait_for("Utilisation")
    terminal.send("?")
    terminal.wait_for("A job runs independently")
    # The latest columns of a plot are visible to the right of the dialog.
    behind = [line[110:] for line in terminal.screen.display[2:11]]
    terminal.wait_for(lambda _: [line[110:] for line in terminal.screen.display[2:11]] != behind)


def test_a_restart_causes_no_dip_in_the_sums_even_though_one_gpu_responds_later(box: Box, drivers: Path) -> None:
    slow = environment(drivers, GPUS=2, PIDS="", FAULTS="1:slow=300")
    for columns in (4, 9):
        terminal = box.app(99, 30, *NVML, shows="H200", **slow)
        terminal.wait_for(lambda _, n=columns, t=terminal: sum(map(bool, heights(t, " VRAM", 42))) >= n)
        shown = heights(terminal, " VRAM", 42)
        terminal.send("q")
        assert terminal.wait_for_exit() == 0
    steps = [abs(one - other) for one, other in pairwise(shown) if one and other]
    assert max(steps) <= 1, shown


def test_keys_scroll_to_gpus_below_the_visible_area(box: Box) -> None:
    terminal = box.app(80, 24, "--demo", "--demo-gpus", "16", shows="▼ 7 more")
    terminal.send("]")
    terminal.wait_for(lambda text: "15 RTX 3090" in text and "▲ 7 more" in text and "16 GPUs · 0 running" in text)
    terminal.send("[")
    terminal.wait_for(lambda text: " 0 RTX 3090" in text and "▼ 7 more" in text)


def test_a_slow_driver_is_shown_as_being_queried(box: Box, drivers: Path) -> None:
    slow = environment(drivers, GPUS=2, PIDS="", INIT_MS=3000)
    terminal = box.app(80, 24, *NVML, shows="asking the driver…", **slow)
    text = terminal.wait_for(lambda text: text.count("asking the driver…") == 2)
    assert "0 GPUs" not in text
    terminal.wait_for(lambda text: "2 GPUs · 0 running" in text and "asking" not in text)
