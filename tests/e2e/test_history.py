"""Tests for GPU history recorded before the app started."""

from __future__ import annotations

import contextlib
import socket
import time

from support.box import Box

from sae_tui.gpu.history import ROLL_UP
from sae_tui.gpu.simulated import uuid_of
from trainer.contract.store.database import open_writer


def store(box: Box, index: int, uuid: str, utilization: int) -> None:
    """Store the last five minutes of a GPU's history."""
    box.data.create()
    begin, host = time.time() - 299, socket.gethostname()
    with contextlib.closing(open_writer(box.data.gpu_db, "gpu")) as db:
        for second in range(300):
            row = (host, index, begin + second, uuid, utilization, 8 << 30, 24 << 30, 40, 100.0, None)
            db.execute("INSERT INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)
        db.execute(ROLL_UP, (host, index, begin // 60 * 60, uuid))


def utilization(text: str) -> list[str]:
    """Return the utilisation row of each GPU in a view that shows two GPUs side by side."""
    lines = [line for line in text.splitlines() if line.count(" util ") == 2]
    return [line[start : start + 59] for line in lines for start in (0, 59)]


def test_another_gpus_history_at_the_same_index_is_not_drawn(box: Box) -> None:
    store(box, 0, "GPU-of-before-the-reboot", 90)
    store(box, 1, uuid_of(2), 60)  # this GPU's index has changed since then
    terminal = box.app(120, 40)
    terminal.press("V")
    terminal.wait_for(lambda text: "▅▅▅" in "".join(utilization(text)[2:3]))
    for gpu in utilization(terminal.text)[:2]:
        assert "▅" not in gpu
        assert "█" not in gpu
        assert "▁" in gpu
