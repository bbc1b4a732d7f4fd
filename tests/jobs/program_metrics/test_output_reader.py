"""Tests that a growing log is read completely and only once, at bounded cost."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sae_tui.jobs.launchers.capped_log import KEPT_BYTES, CappedLog
from sae_tui.jobs.program_metrics.output_reader import (
    LAST_BYTES,
    MOST_BYTES,
    MOST_UNREAD_BYTES,
    NEWEST_BYTES,
    LogPosition,
    OutputReader,
)


def append(log: Path, content: bytes) -> None:
    with log.open("ab") as stream:
        stream.write(content)


def texts(reader: OutputReader, *, is_last: bool = False) -> list[str]:
    return [text for _, text in reader.read(is_last=is_last)]


@given(st.lists(st.sampled_from([b"a=1", b"\n", b"\r", b"]", b" ", b"\xff"]), max_size=40), st.data())
def test_every_line_is_returned_once_however_it_is_written_and_read(pieces: list[bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, position, found = Path(folder) / "log", LogPosition(), list[tuple[int, str]]()
        log.touch()
        for piece in pieces:
            append(log, piece)
            if data.draw(st.booleans()):
                # A new reader continues from the position, as after a restart.
                found += OutputReader(log, position).read()
        found += OutputReader(log, position).read(is_last=True)
        whole = b"".join(pieces).decode(errors="replace")
        expected = [
            (number, state) for number, line in enumerate(whole.split("\n")) for state in line.split("\r") if state
        ]
        # A bar that ends with a bracket is returned as soon as it is written; the text after it is returned later.
        assert "".join(text for _, text in found) == "".join(text for _, text in expected)
        if b"]" not in pieces:
            assert found == expected


def test_an_unfinished_line_is_returned_once_it_is_complete_but_a_bar_immediately(tmp_path: Path) -> None:
    log, reader = tmp_path / "log", OutputReader(tmp_path / "log", LogPosition())
    append(log, b"loss=0.")
    assert texts(reader) == []
    append(log, b"25\n\r10% [1it/s]")
    assert texts(reader) == ["loss=0.25", "10% [1it/s]"]
    append(log, b"\r20% [1it/s]")
    assert texts(reader) == ["20% [1it/s]"]
    append(log, b"\nthe end")
    assert texts(reader, is_last=True) == ["the end"]


def test_a_log_whose_middle_is_removed_is_followed_without_gaps_or_repetitions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    capped, reader = CappedLog(log, 4 * KEPT_BYTES), OutputReader(log, LogPosition())
    found, n = list[str](), 0
    for _ in range(60):
        append(log, b"".join(b"value=%09d%s\n" % (n + i, b"." * 100) for i in range(1500)))
        n += 1500
        found += texts(reader)
        capped.check()
    assert capped.removed_bytes > 0
    values = [line.rstrip(".") for line in found if line.startswith("value")]
    assert values == [f"value={i:09d}" for i in range(n)]


def test_a_log_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    log, reader = tmp_path / "log", OutputReader(tmp_path / "log", LogPosition())
    append(log, b"old=1\nold=2\n")
    assert texts(reader) == ["old=1", "old=2"]
    log.write_bytes(b"new=1\n")
    assert texts(reader) == ["new=1"]


def test_excessive_output_is_skipped_except_for_its_newest_lines(tmp_path: Path) -> None:
    log, reader = tmp_path / "log", OutputReader(tmp_path / "log", LogPosition())
    append(log, b"x" * 99 + b"\n")
    assert len(texts(reader)) == 1
    append(log, (b"x" * 99 + b"\n") * (2 * MOST_UNREAD_BYTES // 100) + b"loss=0.5\n")
    found = texts(reader)
    assert found[-1] == "loss=0.5"
    assert sum(map(len, found)) <= NEWEST_BYTES
    assert reader.has_skipped
    append(log, b"loss=0.25\n")
    assert texts(reader) == ["loss=0.25"]


def test_the_rest_of_a_log_is_read_at_the_end_but_not_gigabytes_of_it(tmp_path: Path) -> None:
    log, reader = tmp_path / "log", OutputReader(tmp_path / "log", LogPosition())
    append(log, b"first=1\n" + b"x\n" * (MOST_BYTES // 4) + b"last=1\n")
    assert texts(reader, is_last=True)[:: MOST_BYTES // 4 + 1] == ["first=1", "last=1"]
    append(log, b"x\n" * LAST_BYTES + b"last=2\n")
    found = texts(reader, is_last=True)
    assert found[-1] == "last=2"
    assert len(found) <= LAST_BYTES // 2


def test_an_endless_line_is_dropped_and_the_next_line_is_found(tmp_path: Path) -> None:
    log, reader = tmp_path / "log", OutputReader(tmp_path / "log", LogPosition())
    for _ in range(20):
        append(log, b"x" * 100_000)
        texts(reader)
    append(log, b"\nloss=1\n")
    assert texts(reader)[-1] == "loss=1"


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert OutputReader(tmp_path / "none", LogPosition()).read(is_last=True) == []
