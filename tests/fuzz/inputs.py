"""Generates byte strings for readers: mutated corpus files, arbitrary JSON, and arbitrary bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

TOKENS = (
    b"", b"0", b"-1", b"1", b"null", b"true", b'""', b"[]", b"{}", b"NaN", b"1e999", b"-1e999", b"1e300", b"5e-324",
    b"inf", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616",
    b"4294967296", b"99999999999999999999999", b"1.5", b"0x1f", b"1979-05-27", b"[1, 2]", b"[0.0, 0.0]", b'["a"]',
    b'{"a": 1}', b'"\\ud800"', b'"\\u0000"', b'"\\n"', b'"banana"', b'"cuda"', b'"auto"', b'"../../etc"', b"\xff",
    b"\xed\xa0\x80", b"\xc2\x9b2J", b"\0", b"\x1b]2;x\x07", b"\xe2\x80\xae", b"\r", b"\n", b",", b".", b"=", b"|",
    b'"', b"'", b"\\", b"#", b":", b"\xd9\xa3", b"\xc2\xb2", b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5_000,
    b'"data.path" = 1\n', b"data = 1\n", b"[data.x]\n", b"[[sae]]\n", b"a." * 5_000, b"-" * 3_000, b"x" * 100_000,
)  # fmt: skip
# A number, quoted string or word that a mutation may replace.
_WORD = re.compile(rb'"[^"\n]*"|[\w.+-]+')

Step = Callable[[bytes], bytes]
PLACE = st.integers(0, 2**16)
TOKEN = st.sampled_from(TOKENS)


def _at(content: bytes, place: int) -> int:
    return place % (len(content) + 1)


def _replace_word(place: int, token: bytes) -> Step:
    def step(content: bytes) -> bytes:
        words = [*_WORD.finditer(content[:200_000])]
        if not words:
            return token
        word = words[place % len(words)]
        return content[: word.start()] + token + content[word.end() :]

    return step


def _put(place: int, token: bytes) -> Step:
    return lambda content: content[: _at(content, place)] + token + content[_at(content, place) :]


def _cut(place: int, length: int) -> Step:
    return lambda content: content[: _at(content, place)] + content[_at(content, place) + length :]


def _truncate(place: int) -> Step:
    return lambda content: content[: _at(content, place)]


def _flip(place: int, bit: int) -> Step:
    def step(content: bytes) -> bytes:
        at = place % (len(content) or 1)
        return content[:at] + bytes(byte ^ 1 << bit for byte in content[at : at + 1]) + content[at + 1 :]

    return step


def _repeat(place: int, length: int, times: int) -> Step:
    def step(content: bytes) -> bytes:
        at = _at(content, place)
        return content[:at] + content[at : at + length] * times + content[at + length :]

    return step


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(_replace_word, PLACE, TOKEN),
    st.builds(_replace_word, PLACE, st.integers(-(2**70), 2**70).map(lambda number: b"%d" % number)),
    st.builds(_put, PLACE, st.one_of(TOKEN, st.binary(max_size=8))),
    st.builds(_cut, PLACE, st.integers(1, 200)),
    st.builds(_truncate, PLACE),
    st.builds(_flip, PLACE, st.integers(0, 7)),
    st.builds(_repeat, PLACE, st.integers(1, 40), st.integers(2, 300)),
)
_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
JSON = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
)


def mutated(first: bytes, second: bytes, splice: int | None, steps: list[Step]) -> bytes:
    """Mutate the content `first`. With `splice`, the tail of `second` first replaces everything after that position."""
    content = first if splice is None else first[: _at(first, splice)] + second[_at(second, splice) :]
    for step in steps:
        content = step(content)
    return content


def inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Return a strategy that generates inputs for the reader whose seeds are in this folder."""
    seeds = st.sampled_from([file.read_bytes() for file in sorted(folder.iterdir())])
    changed = st.builds(mutated, seeds, seeds, st.none() | PLACE, st.lists(STEPS, min_size=1, max_size=4))
    # Mutated files are listed three times because readers reject most other inputs immediately.
    return st.one_of(
        changed, changed, changed, JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=200)
    )
