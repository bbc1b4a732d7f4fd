"""Tests that reading JSON never raises, even if the file contains random bytes or the path is not a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer.contract import json_file
from trainer.contract.json_file import load_json, read_json, write_json
from trainer.contract.process import ProcessRef

Become = Callable[[], AbstractContextManager[None]]


class Record(msgspec.Struct, frozen=True):
    """A record with a field of every type that our files use."""

    name: str = ""
    number: int = 0
    share: float | None = None
    gpus: tuple[int, ...] = ()
    words: dict[str, str | None] = {}
    path: Path | None = None
    process: ProcessRef | None = None
    size: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


def values() -> st.SearchStrategy[object]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def records() -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(Record.__struct_fields__), values())


def encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return b""


TRIED = settings(max_examples=80, database=None, suppress_health_check=list(HealthCheck))


@TRIED
@given(content=st.binary() | records().map(encoded) | values().map(encoded))
@example(b"[" * 200_000)
@example(b'{"words": {"a": ' * 50_000)
@example(b'{"number": ' + b"9" * 10_000 + b"}")
@example(b'{"share": 1e999}')
@example(b'{"name": "\\ud800"}')
@example(b'{"name": "\xed\xa0\x80"}')
@example(b'{"path": "a\\u0000b"}')
@example(b'\xef\xbb\xbf{"name": "a"}')
def test_reading_any_bytes_returns_a_record_or_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    record = read_json(file, Record)
    assert record is None or isinstance(record, Record)
    if record is None:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            load_json(file, Record)
    else:
        assert str(record.number)


@TRIED
@given(
    st.builds(
        Record,
        name=st.text(),
        number=st.integers(-(2**63), 2**63 - 1),
        share=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        words=st.dictionaries(st.text(), st.none() | st.text()),
    )
)
def test_a_written_record_is_read_back_unchanged(tmp_path: Path, record: Record) -> None:
    write_json(tmp_path / "file.json", record)
    assert read_json(tmp_path / "file.json", Record) == record


def test_reading_a_path_that_is_not_a_readable_file_returns_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    names = ("nothing", "folder", "pipe", "loop", "dangling", "file/below", "a\0b", "long" * 1000)
    assert [read_json(tmp_path / name, Record) for name in names] == [None] * len(names)
    assert read_json("/dev/zero", Record) is None


def test_reading_a_file_without_read_permission_returns_none(open_folder: Path, ordinary_user: Become) -> None:
    file = open_folder / "file.json"
    write_json(file, Record("a"))
    with ordinary_user():
        assert read_json(file, Record) is None
    assert read_json(file, Record) == Record("a")


def test_a_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with (tmp_path / "file.json").open("wb") as stream:
        # A sparse file takes up no disk space.
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"it is larger than {json_file.LARGEST >> 20} MiB"):
        load_json(tmp_path / "file.json", Record)


def test_a_byte_order_mark_before_json_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"name": "x"}')
    assert load_json(tmp_path / "a.json", Record) == json_file.decode_as('\ufeff{"name": "x"}', Record) == Record("x")


FIRST_USES = """
import enum, sys, threading
import msgspec
from trainer.contract.json_file import decode_as
from trainer.contract.store.rows import convert

sys.setswitchinterval(1e-7)
for number in range(200):
    word = enum.StrEnum("Word", ["a", "b"])
    inner = msgspec.defstruct("Inner", [("word", word), ("n", int, 0)])
    kind = msgspec.defstruct("Kind", [("inner", inner), ("more", list[inner], [])])
    begin = threading.Barrier(4)

    def use(n, kind=kind, begin=begin):
        begin.wait()
        if n % 2:
            convert({"inner": {"word": "a"}}, kind)
        else:
            decode_as(b'{"inner": {"word": "b"}}', kind)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_several_threads_can_use_a_type_for_the_first_time_simultaneously() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
