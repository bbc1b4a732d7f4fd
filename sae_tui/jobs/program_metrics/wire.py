"""Reads the fields of a message in the Protocol Buffers wire format.

TensorBoard and W&B store their values in this format. The `protobuf` library would need their generated classes, which
only the large `tensorboard` and `wandb` packages contain.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator


def fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each field of a message as (number, wire type, content); raise `ValueError` if the message is malformed.

    The content of a varint is its eight bytes in little-endian order.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, kind, struct.pack("<Q", value)
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("unknown wire type")
        if size > end - at:
            raise ValueError("a field ends too early")
        yield number, kind, message[at : at + size]
        at += size


def signed(content: bytes) -> int:
    """Return an int64 that was stored as a varint."""
    return int.from_bytes(content, "little", signed=True)


def zigzag(content: bytes) -> int:
    """Return an sint64."""
    value = int.from_bytes(content, "little")
    return (value >> 1) ^ -(value & 1)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
    raise ValueError("a number ends too early or is too long")
