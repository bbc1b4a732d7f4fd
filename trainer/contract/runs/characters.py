"""Bytes of tokens joined to characters, of which one may be spread over several tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate


def runs_of_tokens(tokens: Sequence[bytes]) -> list[range]:
    """Return the runs, as short as can be, into which tokens are cut where no character goes on in the next one."""
    starts, ends = _starts(b"".join(tokens)), list(accumulate(map(len, tokens)))
    runs, first = [], 0
    for number, end in enumerate(ends):
        if end in starts or number == len(ends) - 1:
            runs.append(range(first, number + 1))
            first = number + 1
    return runs


def _starts(text: bytes) -> Container[int]:
    """Return where characters begin, and where the text ends; a byte that is of none counts as one."""
    if text.isascii():
        return range(len(text) + 1)
    characters = text.decode("utf-8", "surrogateescape")
    return {0, *accumulate(len(char.encode("utf-8", "surrogateescape")) for char in characters)}


def whole_characters(text: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return where the characters begin and end that have bytes from `begin` to `end`."""
    while 0 < begin < len(text) and _continues(text[begin]):
        begin -= 1
    while end < len(text) and _continues(text[end]):
        end += 1
    return begin, end


def _continues(byte: int) -> bool:
    """Tell whether a byte is one of a character after its first."""
    return 0x80 <= byte < 0xC0


def without_cut_ends(tokens: Sequence[bytes], at: int) -> list[bytes]:
    """Return the tokens without what is left, before and after the one at `at`, of characters cut at the ends."""
    before, after = b"".join(tokens[:at]), b"".join(tokens[at + 1 :])
    first = next((n for n, byte in enumerate(before) if not _continues(byte)), len(before))
    last = sum(map(len, tokens)) - _unfinished(after)
    kept, begin = [], 0
    for token in tokens:
        kept.append(token[max(0, first - begin) : max(0, last - begin)])
        begin += len(token)
    return kept


def _unfinished(text: bytes) -> int:
    """Return how many bytes at the end begin a character that does not end there."""
    for n, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return n if n < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0
