"""Tests for GPUs that report only a few values, and for the app in terminals with limited capabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.box import ESC, Box
from support.driver import environment


@pytest.mark.slow
def test_a_full_gpu_whose_processes_are_hidden_is_neither_idle_nor_selected(box: Box, drivers: Path) -> None:
    hidden = environment(drivers, GPUS=3, PIDS="", FAULTS="1:idle") | {"CUDA_VISIBLE_DEVICES": "0,1"}
    terminal = box.app(120, 40, "--gpu-source", "nvml", shows="H200", **hidden)
    # Wait for both visible GPUs, because the screen is drawn from top to bottom and may be read before it is complete.
    text = terminal.wait_for(lambda text: "in use, owner hidden" in text and "idle" in text and text.count("H200") == 2)
    assert "2 of 3 GPUs, by CUDA_VISIBLE_DEVICES" in text
    assert text.count("H200") == 2
    assert text.count("idle") == 1
    terminal.press("n")
    text = terminal.wait_for("by an unseen process")
    terminal.wait_for("[x] GPU 1")
    assert "[ ] GPU 0" in text
    terminal.press("a", " ")
    terminal.wait_for("GPU 0 is busy: in use (")
    terminal.press("n", "r", ESC)
    terminal.wait_for("in use, owner hidden")


def test_a_locale_without_block_characters_is_rejected_in_one_line(box: Box) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    terminal = box.app(120, 24, "--demo", shows="LC_ALL=C.UTF-8", **plain)
    assert terminal.wait_for_exit() == 1
    assert "u2588" not in terminal.text
    assert "Traceback" not in terminal.text
