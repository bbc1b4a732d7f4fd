"""Writes small event files, W&B files and Trackio databases, without the packages that usually write them."""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from sae_tui.jobs.program_metrics.event_files import masked_crc

BLOCK = 32768


def varint(value: int) -> bytes:
    content = b""
    while value > 0x7F:
        content, value = content + bytes([value & 0x7F | 0x80]), value >> 7
    return content + bytes([value])


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content % 2**64)
    return varint(number << 3 | 2) + varint(len(content)) + content


def event(step: int, values: Mapping[str, float], *, as_tensor: bool = False) -> bytes:
    """Return a TFRecord with scalars as PyTorch or, `as_tensor`, as TensorFlow stores them."""
    summary = b""
    for tag, number in values.items():
        if as_tensor:
            value = field(8, field(1, 1) + field(2, b"") + field(5, struct.pack("<f", number)))
        else:
            value = varint(2 << 3 | 5) + struct.pack("<f", number)
        summary += field(1, field(1, tag.encode()) + value)
    return record(varint(1 << 3 | 1) + struct.pack("<d", 1.7e9) + field(2, step) + field(5, summary))


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc(length)) + content + struct.pack("<I", masked_crc(content))


def wandb_file(steps: Iterable[tuple[int, Mapping[str, float]]], *, padding: int = 0) -> bytes:
    """Return a `.wandb` file; before each step, it contains another record with `padding` bytes."""
    content = bytearray(b":W&B\xe1\xbe\x00")
    for step, values in steps:
        if padding:
            _append(content, field(4, b"x" * padding))
        items = b"".join(
            field(1, field(2, name.encode()) + field(16, json.dumps(value).encode())) for name, value in values.items()
        )
        _append(content, field(1, step) + field(2, items + field(2, field(1, step))))
    return bytes(content)


def _append(content: bytearray, message: bytes) -> None:
    first, left = True, message
    while first or left:
        room = BLOCK - len(content) % BLOCK
        if room < 7:
            content += bytes(room)
            continue
        part, left = left[: room - 7], left[room - 7 :]
        kind = (1 if first else 4) if not left else (2 if first else 3)
        checksum = zlib.crc32(part, zlib.crc32(bytes([kind])))
        content += struct.pack("<IHB", checksum, len(part), kind) + part
        first = False


def add_trackio(path: Path, rows: Iterable[tuple[str, str, int, Mapping[str, float]]]) -> None:
    """Add rows (time, run, step, values) to a Trackio database."""
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE IF NOT EXISTS metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, timestamp TEXT,"
            " run_name TEXT, step INTEGER, metrics TEXT)"
        )
        for time, run, step, values in rows:
            row = (run, time, run, step, json.dumps(values))
            db.execute("INSERT INTO metrics(run_id, timestamp, run_name, step, metrics) VALUES(?, ?, ?, ?, ?)", row)
    db.close()
