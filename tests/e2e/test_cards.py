"""Display of GPUs that report few values, and display on limited terminals."""

from __future__ import annotations

from pathlib import Path

from support.box import ESC, Box
from support.driver import environment


def test_a_full_card_whose_user_cannot_be_seen_is_neither_idle_nor_ticked(box: Box, drivers: Path) -> None:
    hidden = environment(drivers, GPUS=3, PIDS="", FAULTS="1:idle") | {"CUDA_VISIBLE_DEVICES": "0,1"}
    terminal = box.app(120, 40, "--gpu-source", "nvml", shows="H200", **hidden)
    # The screen is drawn from the top and may have been read halfway.
    text = terminal.wait_for(
        lambda text: "in use, cannot be seen" in text and "idle" in text and text.count("H200") == 2
    )
    assert "2 of 3 GPUs, by CUDA_VISIBLE_DEVICES" in text
    assert text.count("H200") == 2
    assert text.count("idle") == 1
    terminal.press("n")
    text = terminal.wait_for("by whom cannot be seen")
    terminal.wait_for("[x] GPU 1")
    assert "[ ] GPU 0" in text
    terminal.press("a", " ")
    terminal.wait_for("GPU 0 is busy: in use (")
    terminal.press("n", "r", ESC)
    terminal.wait_for("in use, cannot be seen")


def test_a_locale_without_blocks_is_refused_in_one_sentence(box: Box) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    terminal = box.app(120, 24, "--demo", shows="LC_ALL=C.UTF-8", **plain)
    assert terminal.wait_for_exit() == 1
    assert "u2588" not in terminal.text
    assert "Traceback" not in terminal.text
