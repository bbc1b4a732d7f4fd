"""Tests how characters that span several tokens are decoded, against Python's decoding of all tokens' bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.runs.features import runs_of_tokens, without_cut_ends


def cut(draw: Any, whole: bytes) -> list[bytes]:
    """Split the bytes at random positions. A position may occur twice, which produces an empty part."""
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[first:last] for first, last in zip([0, *places], [*places, len(whole)], strict=True)]


@given(st.data())
def test_token_runs_decode_separately_and_are_as_short_as_possible(data: Any) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"])))
    tokens = cut(data.draw, text.encode())
    runs = runs_of_tokens(tokens)
    assert [number for run in runs for number in run] == list(range(len(tokens)))
    told = [b"".join(tokens[run.start : run.stop]) for run in runs]
    assert "".join(one.decode() for one in told) == text
    for run in runs:
        for place in range(run.start + 1, run.stop):
            with pytest.raises(UnicodeDecodeError):
                b"".join(tokens[run.start : place]).decode()


@given(st.data())
def test_every_token_is_in_exactly_one_run_for_any_bytes(data: Any) -> None:
    tokens = cut(data.draw, data.draw(st.binary()))
    assert [number for run in runs_of_tokens(tokens) for number in run] == list(range(len(tokens)))
    at = data.draw(st.integers(0, len(tokens) - 1))
    assert without_cut_ends(tokens, at)[at] == tokens[at]


@given(st.data())
def test_characters_cut_at_the_ends_are_dropped(data: Any) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
    whole = text.encode()
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    # The latent fires on the middle token, whose characters are complete.
    tokens = [whole[first:], b"!", whole[:last]]
    kept = without_cut_ends(tokens, 1)
    assert kept == [tokens[0].decode("utf-8", "ignore").encode(), b"!", tokens[2].decode("utf-8", "ignore").encode()]


def test_a_byte_outside_any_character_is_its_own_run() -> None:
    assert runs_of_tokens([b"\xe5", b"the", b"\xa4", b"\xa9"]) == [range(1), range(1, 2), range(2, 3), range(3, 4)]
    assert runs_of_tokens([]) == []
