"""Tables of the FlatBuffers format, as Arrow describes its columns with, read without a library.

What lies outside of the bytes raises `struct.error`. See https://flatbuffers.dev/internals.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator


class Table:
    """A table; its fields go by number, and one that was left out has its default."""

    def __init__(self, content: bytes, place: int) -> None:
        self._content, self._place = content, place
        self._fields = place - self._read("<i", place)
        self._end = self._read("<H", self._fields)

    @classmethod
    def root(cls, content: bytes) -> Table:
        """Return the table that a text of bytes begins with."""
        (place,) = struct.unpack_from("<I", content)
        return cls(content, place)

    def number(self, field: int, form: str, default: int = 0) -> int:
        """Return a number, by its format of `struct` without the byte order."""
        place = self._find(field)
        return default if place is None else self._read(f"<{form}", place)

    def table(self, field: int) -> Table | None:
        place = self._find(field)
        return None if place is None else Table(self._content, self._follow(place))

    def text(self, field: int) -> str:
        place = self._find(field)
        if place is None:
            return ""
        begin, n = self._vector(place)
        return self._content[begin : begin + n].decode(errors="replace")

    def tables(self, field: int) -> Iterator[Table]:
        place = self._find(field)
        begin, n = (0, 0) if place is None else self._vector(place)
        for number in range(n):
            yield Table(self._content, self._follow(begin + 4 * number))

    def structs(self, field: int, form: str) -> list[tuple[int, ...]]:
        """Return a list of structs of numbers, each by the same format."""
        place = self._find(field)
        if place is None:
            return []
        begin, n = self._vector(place)
        end = begin + n * struct.calcsize(form)
        if end > len(self._content):
            raise struct.error
        return [*struct.iter_unpack(form, self._content[begin:end])]

    def _find(self, field: int) -> int | None:
        entry = 4 + 2 * field
        offset = self._read("<H", self._fields + entry) if entry < self._end else 0
        return self._place + offset if offset else None

    def _vector(self, place: int) -> tuple[int, int]:
        """Return where the first entry of a list is, and how many there are."""
        begin = self._follow(place)
        n = self._read("<I", begin)
        if n > len(self._content):
            raise struct.error
        return begin + 4, n

    def _follow(self, place: int) -> int:
        return place + self._read("<I", place)

    def _read(self, form: str, place: int) -> int:
        # A place below 0 would be counted from the end.
        if place < 0:
            raise struct.error
        return int(struct.unpack_from(form, self._content, place)[0])
