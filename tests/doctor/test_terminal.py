from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sae_tui.doctor.terminal import check_characters, check_colours, check_mouse, check_multiplexer, check_size


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "ok", "16.7 million"),
        ({"TERM": "tmux-256color"}, "ok", "256"),
        ({"TERM": "screen"}, "note", "16 (screen)"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "note", "NO_COLOR"),
        ({"TERM": "dumb"}, "error", "TERM=dumb"),
        ({}, "error", "TERM is not set"),
    ],
)
def test_the_number_of_colours_is_derived_from_the_environment(sandbox, environ, level, words) -> None:
    (finding,) = check_colours(sandbox.box(**environ))
    assert finding.level == level
    assert words in finding.sentence
    assert bool(finding.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({"LANG": "en_US.UTF-8"}, "ok"),
        ({"LANG": "C.utf8"}, "ok"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, "warning"),
        ({"LANG": "C"}, "warning"),
        ({}, "warning"),
    ],
)
def test_the_locale_variables_have_their_usual_precedence(sandbox, environ, level) -> None:
    (finding,) = check_characters(sandbox.box(**environ))
    assert finding.level == level


def test_the_locale_is_the_shells_and_not_the_one_coerced_by_python() -> None:
    script = "import os; from sae_tui.doctor.base import environment_at_start as e; print(e().get('LC_CTYPE'))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"LANG": "C"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "None", done.stderr


def test_a_small_window_is_a_warning_and_80_by_24_is_enough(sandbox) -> None:
    assert [next(iter(check_size(sandbox.box(size=size)))).level for size in ((79, 24), (80, 23), (80, 24))] == [
        "warning",
        "warning",
        "ok",
    ]


def test_tmux_and_screen_and_a_plain_terminal_are_distinguished(sandbox) -> None:
    boxes = sandbox.box(TMUX="/tmp/tmux-0/default,1,0"), sandbox.box(STY="1.pts"), sandbox.box()
    levels = [(finding.level, finding.sentence.split(":")[0]) for box in boxes for finding in check_multiplexer(box)]
    assert levels == [
        ("ok", "inside tmux"),
        ("note", "inside screen, which supports at most 256 colours"),
        ("note", "not inside tmux or screen"),
    ]


def test_a_console_has_no_mouse(sandbox) -> None:
    assert [check.level for term in ("linux", "xterm") for check in check_mouse(sandbox.box(TERM=term))] == [
        "note",
        "ok",
    ]


def test_without_a_terminal_there_is_only_one_note(sandbox) -> None:
    box = sandbox.box(size=None)
    checks = (check_colours, check_size, check_multiplexer, check_mouse)
    (finding,) = [finding for check in checks for finding in check(box)]
    assert (finding.level, finding.subject) == ("note", "window")
