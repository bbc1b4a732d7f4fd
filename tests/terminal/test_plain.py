"""Tests for the plain style: ASCII only, and no animation."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from support.box import ROOT
from support.combinations import slow_except
from support.scenes import SCENES, same_everywhere
from textual.color import Color
from textual.strip import Strip

from sae_tui.app import SaeApp
from sae_tui.format import bar, sparkline
from sae_tui.jobs.states import _SHOWN, HELD
from sae_tui.terminal.plain import Colourless, Plain, is_colourless, is_plain, to_ascii
from sae_tui.widgets.chart import GLYPHS
from trainer.contract.paths import DataDir


def rows(app: SaeApp) -> list[Strip]:
    return app.screen._compositor.render_strips()


@pytest.mark.parametrize("folder", ["panels", "screens", "widgets"])
def test_every_character_that_the_app_draws_has_an_ascii_replacement(folder: str) -> None:
    used = {char for file in (ROOT / "sae_tui" / folder).rglob("*.py") for char in file.read_text()}
    assert {char for char in used if not char.isascii()}
    assert [char for char in used if "?" in to_ascii(char, letters=False) and char != "?"] == []


FAST = {"dashboard, eight GPUs", "job, running", "launch", "features"}
BY_NAME = {scene.name: scene for scene in SCENES}


@pytest.mark.parametrize("name", slow_except(FAST, BY_NAME))
async def test_every_screen_is_ascii_and_keeps_its_layout(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_everywhere(monkeypatch)
    data = DataDir(tmp_path)
    data.create()
    plain = Plain(letters=False)
    scene = BY_NAME[name]
    app = scene.app(data, plain)
    async with app.run_test(size=(80, 24)) as pilot:
        await scene.show(pilot)
        drawn = rows(app)
        app._filters.remove(plain)
        full = rows(app)
    assert [row.text for row in drawn if not row.text.isascii()] == []
    assert [[cell_len(part.text) for part in row] for row in drawn] == [
        [cell_len(part.text) for part in row] for row in full
    ]
    assert any(not row.text.isascii() for row in full)
    # Every character that the app draws must have an ASCII replacement.
    marks = [(row.text.replace("L?mb", ""), was.text) for row, was in zip(drawn, full, strict=True)]
    assert [row for row, was in marks if row.count("?") != was.count("?")] == []


def test_bars_histories_and_states_are_distinguishable_in_ascii() -> None:
    assert to_ascii(bar(0.55, 10)) == "#####=----"
    assert to_ascii(sparkline([0, 12.5, 30, 50, 100, None, 75], 8, 100)) == " 0034# 6"
    signs = {shown.sign for shown in (*_SHOWN.values(), HELD)}
    assert len({to_ascii(sign) for sign in signs}) == len(signs)
    assert len({to_ascii(one) for one in GLYPHS[:8]}) == 8


def test_letters_in_names_are_not_replaced_if_the_terminal_can_show_them() -> None:
    assert to_ascii("Lämb 天气 ✓") == "Lämb 天气 +"
    assert to_ascii("Lämb 天气 ✓", letters=False) == "L?mb ???? +"


def test_terminals_without_block_characters_are_recognised_unless_a_setting_decides() -> None:
    terms = ("vt100", "VT220", "linux", "xterm-256color", "tmux-256color", "vte-256color")
    assert [is_plain("auto", term) for term in terms] == [True, True, True, False, False, False]
    assert is_plain("auto", "xterm", has_blocks=False)
    assert (is_plain("plain", "xterm"), is_plain("full", "vt100")) == (True, False)


async def test_without_colours_the_selection_is_reversed_and_no_colour_is_sent(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_everywhere(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    data = DataDir(tmp_path)
    data.create()
    app = SCENES[0].app(data)
    async with app.run_test(size=(80, 24)) as pilot:
        await SCENES[0].show(pilot)
        styles = [part.style for row in rows(app) for part in row if part.style]
    assert {(style.color, style.bgcolor) for style in styles} == {(None, None)}
    assert any(style.dim for style in styles)
    base = Color.parse("#121212")
    marked, plain = Segment("a", Style.parse("white on blue3")), Segment("b", Style.parse("bold white on #1c1c1c"))
    reversed_, kept = Colourless().apply([marked, plain], base)
    assert (reversed_.style.reverse, reversed_.style.bgcolor) == (True, None)
    assert (kept.style.reverse, kept.style.bold, kept.style.color) == (None, True, None)
    # In a terminal with 16 colours, the selection uses one of them.
    of_16, default = Segment("a", Style.parse("color(15) on color(4)")), Segment("b", Style.parse("default on default"))
    reversed_, kept = Colourless().apply([of_16, default], base)
    assert (reversed_.style.reverse, kept.style.reverse) == (True, None)


@pytest.mark.parametrize(
    ("environ", "without"),
    [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, True), ({"TERM": "vt100"}, True), ({"TERM": "vte-256color"}, False)],
)
def test_terminals_without_colours_are_recognised(environ: dict[str, str], without: bool) -> None:
    assert is_colourless(environ) is without
