from __future__ import annotations

import queue
from pathlib import Path

from support.far_side import far_side

from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.log import FarLogReader


def test_log_lines_arrive_in_order_followed_by_the_reason_of_the_end(tmp_path: Path) -> None:
    program = 'say(HELLO); [say({"type": "log", "lines": [f"{n} {words[1:]}\\x1b[2J"]}) for n in range(3)]'
    argv = Hosts(["far"], far_side(tmp_path, program)).argv("far", "stream", "--log", "7")
    told: queue.Queue[list[str]] = queue.Queue()
    reader = FarLogReader("far", argv, told.put)
    reader.start()
    lines = [line for _ in range(4) for line in told.get(timeout=20)]
    reader.stop()
    assert lines == [*(f"{n} ['--log', '7']�[2J" for n in range(3)), "(far ended the log)"]


def test_an_unreadable_log_gives_the_reason(tmp_path: Path) -> None:
    argv = Hosts(["far"], far_side(tmp_path, "sys.exit(127)")).argv("far", "stream", "--log", "7")
    told: queue.Queue[list[str]] = queue.Queue()
    FarLogReader("far", argv, told.put).start()
    assert "has no sae-tui on its PATH" in told.get(timeout=20)[0]
