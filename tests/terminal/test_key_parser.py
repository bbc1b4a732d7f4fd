"""Tests that terminal input is parsed into the same key events even if it is split or delayed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import _parser, events
from textual._xterm_parser import XTermParser
from textual.message import Message

from sae_tui.terminal import key_parser
from sae_tui.terminal.key_parser import Packet, PacketParser, TerminalDecoder

START, END = "\x1b[200~", "\x1b[201~"


class Clock:
    """A clock that the test advances."""

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
    """Return the events for these chunks of input, with a pause after each chunk and a long pause at the end."""
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
    if isinstance(message, events.Key):
        return message.key
    return f"pasted {message.text!r}" if isinstance(message, events.Paste) else type(message).__name__


def sent_bytes(clock: Clock, *pieces: bytes, pause_s: float = 0.05) -> list[str]:
    """Return the events that the driver's decoder and parser produce for these chunks of bytes."""
    parser, decoder = PacketParser(), TerminalDecoder()
    messages: list[Message] = []
    for piece in pieces:
        text = decoder.decode(piece)
        messages += parser.feed(text) if text else []
        clock.now += pause_s
        messages += parser.tick()
    clock.now += 5
    messages += parser.tick()
    return [seen(message) for message in messages if not isinstance(message, Packet)]


@given(st.text(st.characters(exclude_categories=["C", "Z"])), st.data())
def test_a_paste_in_delayed_pieces_is_one_paste_and_keys_work_after_it(
    clock: Clock, text: str, data: st.DataObject
) -> None:
    rest = text + END
    cuts = data.draw(st.sets(st.integers(1, len(rest) - 1), max_size=6))
    assert sent(clock, PacketParser(), START, *in_pieces(rest, cuts), "?") == [f"pasted {text!r}", "question_mark"]


@given(st.sets(st.integers(1, len(START) - 1)))
def test_a_paste_marker_may_arrive_in_pieces(clock: Clock, cuts: set[int]) -> None:
    assert sent(clock, PacketParser(), *in_pieces(START, cuts), "x" + END, pause_s=0.02) == ["pasted 'x'"]


def test_a_paste_without_an_end_marker_times_out_and_keys_work_after_it(clock: Clock) -> None:
    assert sent(clock, PacketParser(), START + "half", "?", pause_s=4) == ["pasted 'half'", "question_mark"]


def test_pasted_text_cannot_control_the_terminal(clock: Clock) -> None:
    assert sent(clock, PacketParser(), f"{START}a\x1b]2;b\x07\x9bc\td\n{END}") == [r"pasted 'a]2;bc\td\n'"]


KEYS = ["a", "?", " ", "é", "\r", "\t", "\x03", "\x7f", "\x1bb", "\x1b[A", "\x1bOP", "\x1b[2~", "\x1b[20~", "\x1b[F"]


@given(st.lists(st.sampled_from(KEYS), min_size=1), st.booleans())
def test_keys_are_parsed_as_textual_parses_them(clock: Clock, keys: list[str], apart: bool) -> None:
    pieces = keys if apart else ["".join(keys)]
    assert sent(clock, PacketParser(), *pieces) == sent(clock, XTermParser(), *pieces)


def test_escape_alone_is_a_key_as_soon_as_nothing_can_follow(clock: Clock) -> None:
    assert sent(clock, PacketParser(), "\x1b", "x", pause_s=0.05) == ["escape", "x"]
    assert sent(clock, PacketParser(), "\x1b", "x", pause_s=0.15) == ["escape", "x"]
    assert sent(clock, PacketParser(), "\x1b\x1b", pause_s=0.15) == ["escape", "escape"]


@pytest.mark.parametrize(
    ("pieces", "pause_s"), [(("\x1b", "[A"), 0.02), (("\x1b[", "A"), 0.09), (("\x1bO", "A"), 0.09)]
)
def test_a_sequence_split_by_a_slow_connection_is_one_key(
    clock: Clock, pieces: tuple[str, ...], pause_s: float
) -> None:
    assert sent(clock, PacketParser(), *pieces, pause_s=pause_s) == ["up"]


@pytest.mark.parametrize(
    ("rest", "keys"), [("[A", ["up"]), (f"[200~qD{END}", ["pasted 'qD'"]), ("[<35;1;1M", ["MouseMove"])]
)
def test_a_late_remainder_of_a_sequence_is_never_read_as_keys(clock: Clock, rest: str, keys: list[str]) -> None:
    assert sent(clock, PacketParser(), "\x1b", rest, pause_s=0.05) == ["escape", *keys]


def test_the_parser_says_how_long_a_sequence_may_remain_incomplete(clock: Clock) -> None:
    parser = PacketParser()
    waits = []
    for data in ("x", "\x1b", "[", "A", START + "pasted", END):
        list(parser.feed(data))
        waits.append(parser.left_s)
    assert waits == pytest.approx([None, 0.025, 0.1, None, 3.0, None])


@given(st.text("dq?\r \x10é", min_size=1), st.integers(1, 3), st.sampled_from(["", "a", "\x1b[A"]))
def test_escape_and_keys_that_arrive_together_are_all_kept(clock: Clock, rest: str, n: int, before: str) -> None:
    apart = [before, *"\x1b" * n, *rest]
    assert sent(clock, PacketParser(), before + "\x1b" * n + rest) == sent(clock, PacketParser(), *filter(None, apart))


def test_a_digit_after_escape_is_read_as_alt_plus_that_digit(clock: Clock) -> None:
    assert sent(clock, PacketParser(), "x\x1b1y\x1b\x1b2") == ["x", "alt+1", "y", "escape", "alt+2"]


# Complete and partial terminal sequences, which Hypothesis combines into random input.
BYTES = [
    b"\xff", b"\xe9", b"\xc3", b"\x9b", b"\0", b"\r", b"q", b"\x1b", b"\x1b[", b"\x1b[M", b"\x1b[M\x20\xff\xff",
    b"\x1b[<35;168;10M", b"\x1b[<0;99999999999999;-1M", b"\x1b[32;400;2M", b"\x1b[200~", b"\x1b[201~", b"\x1b]11;rgb:",
    b"\x07", b"\x1b\\\\", b"\x1bP>|tmux 3.4\x1b\\", b"\x1b[?1;2c", b"\x1b[48;0;0;0;0t", b"\x1b[48;40;160;0;0t",
    b"\x1b[48;9;99999999999;1;1t", b"\x1b[99999999;5u", b"\x1b[97:65;2u", b"\x1b[55357u", b"\x1b[;;u", b"\x1b[1;1R",
    b"\x1b[?2026;2$y", b"\x1bO", b"\x1b[[", b"\x1b[3$", b";" * 40, b"9" * 40, "é日".encode(), b"\x1b[1;5A",
]  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(BYTES), st.binary(max_size=8)), max_size=12), st.booleans())
def test_after_any_input_the_parser_still_reads_the_next_key(clock: Clock, parts: list[bytes], apart: bool) -> None:
    pieces = parts if apart else [b"".join(parts)]
    assert sent_bytes(clock, *pieces, *[b""] * 5, b"?", pause_s=0.8)[-1] == "question_mark"


@given(st.binary(min_size=3, max_size=3), st.sets(st.integers(1, 6)))
def test_an_old_mouse_report_is_never_read_as_keys(clock: Clock, place: bytes, cuts: set[int]) -> None:
    data = b"a\x1b[M" + place + b"b"
    pieces = [data[begin:end] for begin, end in itertools.pairwise([0, *sorted(cuts), len(data)])]
    assert sent_bytes(clock, *pieces, pause_s=0.02) == ["a", "b"]


UNKNOWN = [
    b"\x1b[?1;2c", b"\x1b]11;rgb:1e1e/1e1e/1e1e\x1b\\", b"\x1b]52;c;cXE=\x07", b"\x1bP>|XTerm(370)\x1b\\",
    b"\x1b[?62;1;2;4;6;9;15;22;28;29;42c", b"\x1b[99999999;5u", b"\x1b[97:65;2u", b"\x1b[55357u", b"\x1b[0n",
    b"\x1b[48;0;0;0;0t", b"\x1b[48;99999;99999;1;1t", b"\x1b[35;168;10M", b"\x1b[<0;70000;1M", b"\x1b[3\xff",
    b"\x1b[<35;1;1q", b"\x1b_Gi=1;OK\x1b\\",
]  # fmt: skip


@given(st.lists(st.sampled_from(UNKNOWN), min_size=1, max_size=4), st.integers(1, 40))
def test_unknown_sequences_are_dropped_completely(clock: Clock, sequences: list[bytes], size: int) -> None:
    data = b"".join(sequences)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    after = [name for name in sent_bytes(clock, *pieces, b"d", pause_s=0.01) if name != "replacement_character"]
    assert after == ["d"]


def test_invalid_utf_8_is_replaced_in_typed_and_pasted_text(clock: Clock) -> None:
    assert sent_bytes(clock, b"\x1b[200~caf\xe9\x1b[201~", b"\xe9", b"x") == [
        "pasted 'caf\ufffd'", "replacement_character", "x",
    ]  # fmt: skip


def test_a_multi_byte_character_may_arrive_in_pieces(clock: Clock) -> None:
    assert sent_bytes(clock, *(bytes([byte]) for byte in "日".encode())) == ["日"]
