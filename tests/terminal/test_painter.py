"""Tests that the terminal shows the same cells after any sequence of partial updates as after a full redraw."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pyte
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.color import Color
from textual.geometry import Region, Size
from textual.strip import Strip

from sae_tui.terminal.painter import Painter, Printable

WIDTH, HEIGHT = 24, 4
styles = st.sampled_from(
    [
        Style.parse(text)
        for text in ("none", "red on black", "bold red on black", "green on black", "#5fafff on #101318", "underline")
    ]
)
texts = st.text(st.sampled_from([*list("ab 12▁▅█⣿日本"), "é"]), min_size=1, max_size=8)
lines = st.lists(st.tuples(texts, styles), min_size=1, max_size=5)
cuts = st.sets(st.integers(1, WIDTH - 1), max_size=3)


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[tuple[Strip, list[int]]], list[tuple[int, int, int]]]:
    """Generate random screen lines, the columns that split them into widgets, and the spans to repaint."""
    rows = []
    for _ in range(HEIGHT):
        segments = [Segment(text, style) for text, style in draw(lines)]
        rows.append((Strip(segments).adjust_cell_length(WIDTH, Style.null()), [0, *sorted(draw(cuts)), WIDTH]))
    spans = [(y, 0, WIDTH) for y in sorted(draw(st.sets(st.integers(0, HEIGHT - 1), min_size=1)))]
    return rows, spans


def chops_update(rows: list[tuple[Strip, list[int]]], spans: list[tuple[int, int, int]]) -> ChopsUpdate:
    chops = []
    for strip, edges in rows:
        parts = strip.divide(edges[1:])
        chops.append(dict(zip(edges[:-1], parts, strict=True)))
    return ChopsUpdate(chops, spans, [edges[1:] for _, edges in rows])


def console() -> Console:
    return Console(file=io.StringIO(), color_system="truecolor", force_terminal=True, width=WIDTH)


def cells(screen: pyte.Screen) -> list[list[tuple]]:
    return [[tuple(screen.buffer[y][x]) for x in range(WIDTH)] for y in range(HEIGHT)]


@settings(max_examples=200)
@given(st.lists(updates(), min_size=1, max_size=5))
def test_partial_updates_show_the_same_cells_as_a_full_repaint(frames) -> None:
    painter = Painter()
    lean, plain = pyte.Screen(WIDTH + 1, HEIGHT), pyte.Screen(WIDTH + 1, HEIGHT)
    lean_stream, plain_stream = pyte.Stream(lean), pyte.Stream(plain)
    for rows, spans in frames:
        update = chops_update(rows, spans)
        lean_stream.feed(painter.render(update, console()))
        plain_stream.feed(update.render_segments(console()).replace("\n", ""))
        assert cells(lean) == cells(plain)


def test_an_update_that_changes_nothing_sends_nothing() -> None:
    painter = Painter()
    row = (Strip([Segment("abc", Style.parse("red on black"))]).adjust_cell_length(WIDTH), [0, WIDTH])
    update = chops_update([row], [(0, 0, WIDTH)])
    assert "abc" in painter.render(update, console())
    assert painter.render(update, console()) == ""


def test_if_one_digit_changes_only_that_digit_is_sent() -> None:
    painter = Painter()
    style = Style.parse("red on black")
    for text in ("util 41%", "util 42%"):
        row = (Strip([Segment(text, style)]).adjust_cell_length(WIDTH), [0, WIDTH])
        sent = painter.render(chops_update([row], [(0, 0, WIDTH)]), console())
    assert sent == "\x1b[1;7H\x1b[0;31;40m2\x1b[0m"


def test_after_the_painter_forgets_the_screen_the_next_update_is_complete() -> None:
    painter = Painter()
    row = (Strip([Segment("abc", Style.parse("red on black"))]).adjust_cell_length(WIDTH), [0, WIDTH])
    update = chops_update([row], [(0, 0, WIDTH)])
    painter.render(update, console())
    painter.forget()
    assert "abc" in painter.render(update, console())


def test_after_the_painter_forgets_the_screen_a_dialog_is_repainted_completely() -> None:
    painter, dialog = Painter(), SimpleNamespace(is_modal=True, size=Size(WIDTH, HEIGHT))
    whole = LayoutUpdate([[Strip.blank(WIDTH)]] * HEIGHT, Region(0, 0, WIDTH, HEIGHT))
    assert painter.lighten(dialog, whole) is whole
    assert painter.lighten(dialog, whole) is not whole
    painter.forget()
    assert painter.lighten(dialog, whole) is whole


@settings(max_examples=100)
@given(st.lists(updates(), min_size=2, max_size=4))
def test_only_the_changed_cells_of_a_full_screen_are_sent(frames) -> None:
    painter = Painter()
    lean, plain = pyte.Screen(WIDTH + 1, HEIGHT), pyte.Screen(WIDTH + 1, HEIGHT)
    lean_stream, plain_stream = pyte.Stream(lean), pyte.Stream(plain)
    for rows, _ in frames:
        screen = LayoutUpdate([strip.divide(edges[1:]) for strip, edges in rows], Region(0, 0, WIDTH, HEIGHT))
        lean_stream.feed(painter.lean_whole(screen).render_segments(console()))
        plain_stream.feed(screen.render_segments(console()).replace("\n", ""))
        assert cells(lean) == cells(plain)
        assert painter.lean_whole(screen).render_segments(console()) == ""


@given(st.lists(st.text(max_size=8), max_size=3))
@example(["\x1b]52;c;x\x07", "\x9b31m\u202e", "\u3000日本 \ue000"])
def test_a_filtered_line_contains_no_control_characters_and_keeps_its_width(texts: list[str]) -> None:
    control = Control.home().segment
    *shown, last = Printable().apply([*map(Segment, texts), control], Color(0, 0, 0))
    assert last is control
    for before, after in zip(texts, shown, strict=True):
        assert after.text.isprintable()
        assert sum(map(cell_len, after.text)) == sum(map(cell_len, before))
