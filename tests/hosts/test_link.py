from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from sae_tui.hosts.link import Allowance, Link


def link(program: str) -> Link:
    return Link([sys.executable, "-c", f"import sys, os, time\n{program}"])


def test_lines_arrive_unchanged_and_error_output_is_made_printable() -> None:
    one = link("print('a'); print(); print('b', end=''); sys.stderr.write('first\\r\\nlast \\x1b[2J\\n'); sys.exit(3)")
    assert list(one.lines()) == [b"a", b""]
    assert one.close() == 3
    assert one.complaints == ["first", "last �[2J"]


def test_an_endless_line_is_rejected_before_it_fills_the_memory() -> None:
    one = link("while True: os.write(1, b'x' * 65536)")
    with pytest.raises(ValueError, match="longer than 1 MiB"):
        list(one.lines())
    assert one.close() != 0


def test_stopping_ends_the_process_and_a_rate_limited_reader() -> None:
    one = link("while True: os.write(1, b'\\n' * 65536)")
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.extend(one.lines()))
    reader.start()
    threading.Timer(0.3, one.stop).start()
    reader.join(20)
    assert not reader.is_alive()
    assert one.close() != 0
    # The process writes millions of lines, but the reader is rate-limited.
    assert len(seen) < 1000


def test_closing_the_link_closes_the_processs_standard_input() -> None:
    one = link("print('ready', flush=True); sys.stdin.read(); sys.exit(5)")
    lines = one.lines()
    assert next(lines) == b"ready"
    assert one.close() == 5


def test_after_the_burst_a_reader_waits_according_to_the_rate_limit() -> None:
    allowance = Allowance(bytes_s=1e-6, burst=100)
    assert allowance.take(100) == 0
    assert allowance.take(0) == 0
    assert allowance.take(2) == pytest.approx(2e6, rel=1e-3)


def test_each_piece_of_a_long_line_shows_that_the_host_is_alive(tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    waits = f"while not os.path.exists({str(arrived)!r}): time.sleep(0.01)"
    program = f"import os, time; os.write(1, b'half')\n{waits}\nos.write(1, b' a line\\n')"

    def look() -> None:
        if one.heard != started:
            arrived.touch()

    one = Link([sys.executable, "-c", program], look)
    started = one.heard
    assert list(one.lines()) == [b"half a line"]
    one.close()
