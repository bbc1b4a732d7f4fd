"""Key events from what a terminal sends, in whatever pieces and with whatever pauses it arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import _parser, events
from textual._xterm_parser import XTermParser
from textual.message import Message

from sae_tui.terminal import key_parser
from sae_tui.terminal.key_parser import Packet, PacketParser

START, END = "\x1b[200~", "\x1b[201~"


class Clock:
    """A clock that moves when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True, scope="module")
def clock():
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(_parser, "get_time", clock)
        patch.setattr(key_parser.time, "monotonic", clock)
        yield clock


def sent(clock: Clock, parser: XTermParser, *pieces: str, pause_s: float = 0.5) -> list[str]:
    """Return the events that come of these pieces, with pauses in between and a long one after them."""
    messages: list[Message] = []
    for piece in pieces:
        messages += parser.feed(piece)
        clock.now += pause_s
        messages += parser.tick()
    clock.now += 1
    messages += parser.tick()
    return [seen(message) for message in messages if not isinstance(message, Packet)]


def in_pieces(text: str, cuts: set[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]


def seen(message: Message) -> str:
    return f"pasted {message.text!r}" if isinstance(message, events.Paste) else message.key


@given(st.text(st.characters(exclude_categories=["C", "Z"])), st.data())
def test_a_paste_in_pieces_with_pauses_is_one_paste_and_keys_work_after_it(
    clock: Clock, text: str, data: st.DataObject
) -> None:
    rest = text + END
    cuts = data.draw(st.sets(st.integers(1, len(rest) - 1), max_size=6))
    assert sent(clock, PacketParser(), START, *in_pieces(rest, cuts), "?") == [f"pasted {text!r}", "question_mark"]


@given(st.sets(st.integers(1, len(START) - 1)))
def test_a_marker_before_a_paste_may_come_in_pieces_that_follow_each_other(clock: Clock, cuts: set[int]) -> None:
    assert sent(clock, PacketParser(), *in_pieces(START, cuts), "x" + END, pause_s=0.05) == ["pasted 'x'"]


def test_a_paste_that_never_ends_is_taken_as_it_is_and_keys_work_after_it(clock: Clock) -> None:
    assert sent(clock, PacketParser(), START + "half", "?", pause_s=4) == ["pasted 'half'", "question_mark"]


def test_pasted_text_steers_no_terminal(clock: Clock) -> None:
    assert sent(clock, PacketParser(), f"{START}a\x1b]2;b\x07\x9bc\td\n{END}") == [r"pasted 'a]2;bc\td\n'"]


KEYS = ["a", "?", " ", "é", "\r", "\t", "\x03", "\x7f", "\x1bb", "\x1b[A", "\x1bOP", "\x1b[2~", "\x1b[20~", "\x1b[F"]


@given(st.lists(st.sampled_from(KEYS), min_size=1), st.booleans())
def test_keys_are_what_textual_makes_of_them(clock: Clock, keys: list[str], apart: bool) -> None:
    pieces = keys if apart else ["".join(keys)]
    assert sent(clock, PacketParser(), *pieces) == sent(clock, XTermParser(), *pieces)


def test_escape_alone_is_a_key_as_soon_as_nothing_can_follow(clock: Clock) -> None:
    assert sent(clock, PacketParser(), "\x1b", "x", pause_s=0.05) == ["escape", "x"]
    assert sent(clock, PacketParser(), "\x1b", "x", pause_s=0.15) == ["escape", "x"]
    assert sent(clock, PacketParser(), "\x1b\x1b", pause_s=0.15) == ["escape", "escape"]


@given(st.text("dq?\r \x10é", min_size=1), st.integers(1, 3), st.sampled_from(["", "a", "\x1b[A"]))
def test_escape_and_keys_that_come_together_are_all_taken(clock: Clock, rest: str, n: int, before: str) -> None:
    apart = [before, *"\x1b" * n, *rest]
    assert sent(clock, PacketParser(), before + "\x1b" * n + rest) == sent(clock, PacketParser(), *filter(None, apart))


def test_a_digit_after_escape_is_alt_with_that_digit(clock: Clock) -> None:
    assert sent(clock, PacketParser(), "x\x1b1y\x1b\x1b2") == ["x", "alt+1", "y", "escape", "alt+2"]
