"""Reads the history of W&B runs from their `.wandb` files, in which W&B stores a run before uploading it.

Such a file consists of blocks, as in a LevelDB log, which contain `Record` messages.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from sae_tui.jobs.program_metrics.lines import numbers_in
from sae_tui.jobs.program_metrics.sources import LARGEST_RECORD, FilePosition, FileValues, FileWindow
from sae_tui.jobs.program_metrics.wire import fields, signed, zigzag
from trainer.contract.files import open_plain

_IDENT, _BLOCK, _HEADER = b":W&B", 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Field numbers in `Record`, `HistoryRecord`, `HistoryItem` and `HistoryStep`.
_HISTORY, _ITEM, _STEP, _NUM = 2, 1, 2, 1
_KEY, _NESTED_KEY, _INTEGER, _NUMBER, _JSON = 1, 2, 5, 6, 16


def read_wandb(path: Path, position: FilePosition) -> Iterator[FileValues]:
    """Yield the history in complete records after the position."""
    with open_plain(path) as stream:
        window = FileWindow(stream, position.place)
        if position.place == 0:
            if (ident := window.get(0, _HEADER)) is None:
                return
            position.is_damaged = not ident.startswith(_IDENT)
            position.place = _HEADER
        if not position.is_damaged:
            for record in _records(window, position):
                with contextlib.suppress(ValueError, struct.error, RecursionError):
                    yield from _history(record)


def _records(window: FileWindow, position: FilePosition) -> Iterator[bytes]:
    """Yield complete records; after damage, continue with the next block if there is one."""
    at, parts, size = position.place, list[bytes](), 0
    while True:
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        header = window.get(at, _HEADER)
        if header is None:
            return
        checksum, length, kind = struct.unpack("<IHB", header)
        content = window.get(at + _HEADER, length)
        if length + _HEADER > left or content is None or zlib.crc32(content, zlib.crc32(header[6:])) != checksum:
            if at + left >= window.size:
                return  # It is still being written.
            at = position.place = at + left
            parts, size = [], 0
            continue
        at += _HEADER + length
        if kind in (_FULL, _FIRST):
            parts, size = [], 0
        size += length
        # A larger record cannot be a history record; its parts are counted, but not kept.
        parts = [*parts, content] if size <= LARGEST_RECORD else []
        if kind in (_FULL, _LAST) or size > LARGEST_RECORD:
            position.place = at
            if parts:
                yield b"".join(parts)
            parts = []


def _history(record: bytes) -> Iterator[FileValues]:
    for number, kind, content in fields(record):
        if (number, kind) == (_HISTORY, 2):
            step, values = 0, dict[str, float]()
            for field, field_kind, inner in fields(content):
                if (field, field_kind) == (_ITEM, 2):
                    values |= _item(inner)
                elif (field, field_kind) == (_STEP, 2):
                    step = next((signed(num) for one, _, num in fields(inner) if one == _NUM), 0)
            step = int(values.get("_step", step))
            if kept := {name: value for name, value in values.items() if not name.startswith("_")}:
                yield FileValues(step, kept)


def _item(message: bytes) -> dict[str, float]:
    """Return the numbers in a `HistoryItem`, by name."""
    keys, value = list[str](), None
    for field, kind, content in fields(message):
        if field in (_KEY, _NESTED_KEY) and kind == 2:
            keys.append(content.decode(errors="replace"))
        elif (field, kind) == (_JSON, 2):
            value = json.loads(content)
        elif (field, kind) == (_NUMBER, 1):
            (value,) = struct.unpack("<d", content)
        elif (field, kind) == (_INTEGER, 0):
            value = zigzag(content)
    return dict(numbers_in({"/".join(keys): value}))
