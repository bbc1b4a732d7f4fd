"""Tests for the frame around the content in a 256-colour terminal, such as one used over ssh."""

from __future__ import annotations

import re

import pytest
from support.box import ESC, Box
from support.combinations import slow_unless
from support.terminal import Terminal

from trainer.contract.store.states import JobState


def backgrounds(terminal: Terminal, y: int) -> list[str]:
    return [terminal.screen.buffer[y][x].bg for x in range(terminal.screen.columns)]


def row_of(terminal: Terminal, text: str) -> int:
    return next(y for y, line in enumerate(terminal.screen.display) if text in line)


def is_box(terminal: Terminal, y: int, page: str) -> bool:
    """Return whether the background of an input field differs from the backgrounds of its row and of the page."""
    line = backgrounds(terminal, y)
    return line[30] not in (page, line[0])


def differs_from_below(terminal: Terminal, y: int) -> bool:
    return backgrounds(terminal, y + 1)[40] != backgrounds(terminal, y)[40]


def footer(terminal: Terminal) -> str:
    return terminal.screen.display[-1].rstrip()


def test_bars_and_input_boxes_stand_out_from_the_page_in_256_colours(box: Box) -> None:
    # A stopped job still shows its progress bar; a finished job would show its duration instead.
    box.record_job("done", JobState.STOPPED, total_steps=100, step=100)
    terminal = box.app(80, 24, colours="")
    # A full bar has no visible track; a partial bar has a track in another colour.
    terminal.wait_for("━" * 10 + " 100%")
    terminal.wait_for(lambda screen: re.search("Power.*━─", screen) is not None)
    page, y = backgrounds(terminal, row_of(terminal, "NAME"))[0], row_of(terminal, "Power")
    bar = terminal.screen.display[y].index("━")
    rail = terminal.screen.display[y].index("─")
    assert terminal.screen.buffer[y][bar].fg != terminal.screen.buffer[y][rail].fg
    assert backgrounds(terminal, 0)[0] != page
    assert backgrounds(terminal, 23)[0] != page
    terminal.send("n")
    terminal.wait_for("expansion_factor")
    # A screen's output may arrive in two chunks.
    terminal.wait_for(lambda _: is_box(terminal, row_of(terminal, "expansion_factor"), page))
    terminal.send(ESC)
    terminal.wait_for(lambda screen: "JOB NAME" in screen and "expansion_factor" not in screen)
    terminal.read(0.3)
    terminal.send("R")
    terminal.wait_for("Name of job 1")
    terminal.wait_for(lambda _: differs_from_below(terminal, row_of(terminal, "Name of job 1")))


@pytest.mark.parametrize(
    ("term", "environment"),
    slow_unless(
        lambda term, environment: term != "dumb",
        [("xterm-256color", {"NO_COLOR": "1"}), ("dumb", {}), ("vt100", {})],
    ),
)
def test_no_colour_is_sent_if_the_user_or_the_terminal_does_not_want_any(
    box: Box, term: str, environment: dict[str, str]
) -> None:
    terminal = box.app(80, 24, colours="", term=term, **environment)
    terminal.press("V", "n")
    terminal.wait_for("expansion_factor")
    assert codes(terminal) & {"1", "2", "7"}
    assert {code for code in codes(terminal) if 30 <= int(code or 0) < 50 or int(code or 0) >= 90} == set()


def test_only_colours_from_the_256_colour_palette_are_sent_over_ssh(box: Box) -> None:
    terminal = box.app(80, 24, colours="")
    kinds = re.findall(rb"[34]8;([25]);", bytes(terminal.raw))
    assert {*kinds} == {b"5"}


def codes(terminal: Terminal) -> set[str]:
    """Return the attribute and colour codes that the app has sent."""
    return {code for sent in re.findall(rb"\x1b\[([0-9;]*)m", bytes(terminal.raw)) for code in sent.decode().split(";")}


def test_sixteen_gpus_show_their_indices_on_the_launch_screen(box: Box) -> None:
    terminal = box.app(120, 40, "--demo", "--demo-gpus", "16")
    terminal.send("n")
    assert "GPU …" not in terminal.wait_for("GPU 9 ")
    terminal.press("\x1b[B" * 15)
    terminal.wait_for("GPU 15 RTX 3090")


def test_the_footer_fits_every_width_and_ends_with_quit_and_help(box: Box) -> None:
    box.record_job("done", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("✓ finished")
    for width in (80, 60, 40):
        terminal.resize(width, 24)
        terminal.wait_for(lambda _: footer(terminal).endswith("q Quit  ? Help"))
        assert footer(terminal).startswith(" ⏎ Open  y Clone")
        assert len(footer(terminal)) <= width
    terminal.resize(80, 24)
    terminal.wait_for("c Compare")
    terminal.send("n")
    terminal.wait_for("expansion_factor")
    terminal.wait_for(lambda _: "^l Launch" in footer(terminal))
    assert footer(terminal).endswith("q Quit  ? Help")
    terminal.press("\t", "\t")
    terminal.wait_for(lambda _: "F1 Help" in footer(terminal))
    assert "? Help" not in footer(terminal)


def test_a_message_disappears_after_a_while_but_an_error_stays_until_a_key_press(box: Box) -> None:
    box.record_job("done", JobState.FINISHED)
    terminal = box.app(80, 24)
    terminal.wait_for("✓ finished")
    terminal.send("c")
    text = terminal.wait_for("! Mark two or more jobs with space")
    assert row_of(terminal, "! Mark two or more") == 22
    assert "✓ finished" in text
    assert "? Help" in footer(terminal)
    terminal.wait_for(lambda text: "! Mark two" not in text)
    terminal.send("R")
    terminal.wait_for("Name of job 1")
    terminal.press("\x15", "\r")
    terminal.wait_for("✗ ")
    terminal.read(4)  # a temporary message would have disappeared by then
    assert "✗ " in terminal.text
    terminal.send("V")
    terminal.wait_for(lambda text: "✗ " not in text)
    terminal.send("!")
    text = terminal.wait_for(lambda text: "Messages" in text and "✗ " in text)
    assert text.index("✗ ") < text.index("! Mark two or more jobs with space")
