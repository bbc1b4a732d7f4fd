"""Finds UTF-8 characters in the bytes of tokens; a character may span several tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate


def runs_of_tokens(tokens: Sequence[bytes]) -> list[range]:
    """Return the index ranges of the shortest runs of tokens that do not split a character."""
    starts, ends = _starts(b"".join(tokens)), list(accumulate(map(len, tokens)))
    runs, first = [], 0
    for number, end in enumerate(ends):
        if end in starts or number == len(ends) - 1:
            runs.append(range(first, number + 1))
            first = number + 1
    return runs


def _starts(text: bytes) -> Container[int]:
    """Return the offset of each character and of the end of the text; an invalid byte counts as a character."""
    if text.isascii():
        return range(len(text) + 1)
    characters = text.decode("utf-8", "surrogateescape")
    return {0, *accumulate(len(char.encode("utf-8", "surrogateescape")) for char in characters)}


def whole_characters(text: bytes, begin: int, end: int) -> tuple[int, int]:
    """Extend the byte range from `begin` to `end` to character boundaries, and return the new begin and end."""
    while 0 < begin < len(text) and _continues(text[begin]):
        begin -= 1
    while end < len(text) and _continues(text[end]):
        end += 1
    return begin, end


def _continues(byte: int) -> bool:
    """Return whether a byte is a UTF-8 continuation byte."""
    return 0x80 <= byte < 0xC0


def without_cut_ends(tokens: Sequence[bytes], at: int) -> list[bytes]:
    """Return the tokens without incomplete characters at both ends of the text; do not change the token at `at`."""
    before, after = b"".join(tokens[:at]), b"".join(tokens[at + 1 :])
    first = next((n for n, byte in enumerate(before) if not _continues(byte)), len(before))
    last = sum(map(len, tokens)) - _unfinished(after)
    kept, begin = [], 0
    for token in tokens:
        kept.append(token[max(0, first - begin) : max(0, last - begin)])
        begin += len(token)
    return kept


def _unfinished(text: bytes) -> int:
    """Return the number of bytes in an incomplete character at the end of the text."""
    for n, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return n if n < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0
