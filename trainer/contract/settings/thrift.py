"""Structs of Thrift's compact protocol, in which Parquet describes its files, read without a library.

What lies outside of the bytes raises `IndexError`. See
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from typing import Any

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_DEEPEST = 32


def read_struct(content: bytes) -> dict[int, Any]:
    """Return the fields of the struct that the bytes begin with, by number; raise `IndexError` or `ValueError`."""
    return _Reader(content).struct(0)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) & 15 != _STOP:
            number = number + (head >> 4) if head >> 4 else self._signed()
            # The value of a truth is in its type.
            fields[number] = head & 15 == _TRUE if head & 15 in (_TRUE, _FALSE) else self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("too deep")
        if kind in _INTEGERS:
            return self._signed()
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._take(8)
        if kind == _BINARY:
            return self._take(self._unsigned())
        if kind in (_LIST, _SET):
            return self._list(depth + 1)
        if kind == _STRUCT:
            return self.struct(depth + 1)
        # Parquet has no maps.
        raise ValueError(f"no type {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        n = self._unsigned() if head >> 4 == 15 else head >> 4
        return [self._value(head & 15, depth) for _ in range(n)]

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("too long")
        return value | byte << shift

    def _byte(self) -> int:
        self._place += 1
        return self._content[self._place - 1]

    def _take(self, n: int) -> bytes:
        self._place += n
        if self._place > len(self._content):
            raise IndexError
        return self._content[self._place - n : self._place]
