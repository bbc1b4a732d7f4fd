"""Reads scalars from TensorBoard's event files, which are TFRecord files of `Event` messages."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

from sae_tui.jobs.program_metrics.sources import LARGEST_RECORD, FilePosition, FileValues, FileWindow
from sae_tui.jobs.program_metrics.wire import fields, signed
from trainer.contract.files import open_plain

# A record: the length (8 bytes), its checksum (4 bytes), the content, and the content's checksum (4 bytes).
_HEADER, _FOOTER = 12, 4
# Field numbers in `Event`, `Summary`, `Summary.Value` and `TensorProto`.
_STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE, _TENSOR = 2, 5, 1, 1, 2, 8
_DTYPE, _SHAPE, _CONTENT, _FLOATS, _DOUBLES = 1, 2, 4, 5, 6
# The format of a single value, by `DataType`.
_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
_POLYNOMIAL = 0x82F63B78


def read_events(path: Path, position: FilePosition) -> Iterator[FileValues]:
    """Yield the scalars in complete records after the position."""
    with open_plain(path) as stream:
        window = FileWindow(stream, position.place)
        while header := window.get(position.place, _HEADER):
            length, checksum = struct.unpack("<QI", header)
            if masked_crc(header[:8]) != checksum:
                # Without a valid length, the next record cannot be found.
                position.is_damaged = True
                return
            end = position.place + _HEADER + length + _FOOTER
            if end > window.size:
                return
            content = window.get(position.place + _HEADER, length) if length <= LARGEST_RECORD else b""
            if content is None:
                return
            position.place = end
            with contextlib.suppress(ValueError, struct.error):
                yield from _scalars(content)


def _scalars(event: bytes) -> Iterator[FileValues]:
    step, values = 0, dict[str, float]()
    for number, kind, content in fields(event):
        if (number, kind) == (_STEP, 0):
            step = signed(content)
        elif (number, kind) == (_SUMMARY, 2):
            for inner, inner_kind, value in fields(content):
                if (inner, inner_kind) == (_VALUE, 2):
                    values |= _value(value)
    if values:
        yield FileValues(step, values)


def _value(message: bytes) -> dict[str, float]:
    """Return the tag and the number in a `Summary.Value`, or {} if it is not a scalar."""
    tag, number = "", None
    for field, kind, content in fields(message):
        if (field, kind) == (_TAG, 2):
            tag = content.decode(errors="replace")
        elif (field, kind) == (_SIMPLE, 5):
            (number,) = struct.unpack("<f", content)
        elif (field, kind) == (_TENSOR, 2):
            number = _tensor(content)
    return {tag: number} if number is not None else {}


def _tensor(message: bytes) -> float | None:
    """Return the number in a tensor without dimensions, or None for any other tensor."""
    found = {(field, kind): content for field, kind, content in fields(message)}
    dtype = found.get((_DTYPE, 0), b"\0")[0]
    if found.get((_SHAPE, 2)) or dtype not in _FORMATS:
        return None
    texts = [found.get((_CONTENT, 2)), found.get((_FLOATS, 2)), found.get((_FLOATS, 5)), found.get((_DOUBLES, 2))]
    content = next(filter(None, [*texts, found.get((_DOUBLES, 1))]), b"")
    if len(content) != struct.calcsize(_FORMATS[dtype]):
        return None
    return float(struct.unpack(_FORMATS[dtype], content)[0])


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_CRC32C = _table()


def masked_crc(content: bytes) -> int:
    """Return TFRecord's checksum: CRC-32C, rotated, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
