"""Checks what the terminal can show; colours and characters are judged by the same rules as in Textual."""

from __future__ import annotations

from collections.abc import Iterator

from sae_tui.doctor.base import CheckedMachine, Finding

LEAST_COLUMNS, LEAST_LINES = 80, 24
UNABLE = frozenset({"", "dumb", "unknown"})
WITHOUT_MOUSE = frozenset({"linux", "vt100", "vt102", "vt220", *UNABLE})
BETTER_TERM = "use a terminal of today and `export TERM=xterm-256color`, inside tmux TERM=tmux-256color"


def check_colours(box: CheckedMachine) -> Iterator[Finding]:
    """Report the number of colours, from COLORTERM and the suffix of TERM."""
    term = box.environ.get("TERM", "").strip().lower()
    if box.size is None:
        return
    if term in UNABLE:
        sentence = f"TERM={term} is no terminal that can draw a screen" if term else "TERM is not set"
        yield Finding("error", "colours", f"{sentence}; the app cannot run here, the commands can", BETTER_TERM)
    elif box.environ.get("NO_COLOR"):
        yield Finding("note", "colours", "NO_COLOR is set, so that the app is without colours", "`unset NO_COLOR`")
    elif box.environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        yield Finding("ok", "colours", f"16.7 million ({term})")
    elif term.endswith(("-256color", "-kitty")):
        yield Finding("ok", "colours", f"256 ({term}); `export COLORTERM=truecolor` gives all, where it has them")
    else:
        yield Finding("note", "colours", f"16 ({term}), with which shades of the theme look alike", BETTER_TERM)


def check_characters(box: CheckedMachine) -> Iterator[Finding]:
    """Check the locale: if it is not UTF-8, tmux and screen write `_` for lines and bars."""
    locales = [(name, box.environ[name]) for name in ("LC_ALL", "LC_CTYPE", "LANG") if box.environ.get(name)]
    name, value = locales[0] if locales else ("LANG", "")
    if "utf8" in value.lower().replace("-", ""):
        yield Finding("ok", "characters", f"{name}={value}")
        return
    shown = f"{name}={value} is not UTF-8" if value else "no locale is set"
    sentence = f"{shown}, so that lines and bars may come out as _ or ?"
    yield Finding("warning", "characters", sentence, f"`export {name}=C.UTF-8`, and start tmux as `tmux -u`")


def check_size(box: CheckedMachine) -> Iterator[Finding]:
    """Check that the window is large enough for the app."""
    if box.size is None:
        sentence = "there is no terminal here, which the app needs and the commands do not"
        yield Finding("note", "window", sentence, "with ssh give -t, in a container -it")
        return
    columns, lines = box.size
    if columns < LEAST_COLUMNS or lines < LEAST_LINES:
        sentence = f"{columns} columns and {lines} lines are less than the {LEAST_COLUMNS} × {LEAST_LINES} of the app"
        yield Finding("warning", "window", sentence, "make the window larger or its letters smaller")
    else:
        yield Finding("ok", "window", f"{columns} columns and {lines} lines")


def check_multiplexer(box: CheckedMachine) -> Iterator[Finding]:
    """Report tmux or screen; jobs do not need it, but it keeps the app open after a disconnect."""
    if box.environ.get("TMUX"):
        yield Finding("ok", "tmux", "inside tmux: detach, and attach again from anywhere")
    elif box.environ.get("STY"):
        remedy = "use tmux, with `set -g default-terminal tmux-256color`"
        yield Finding("note", "tmux", "inside screen, which passes 256 colours at most", remedy)
    elif box.size is not None:
        sentence = "not inside tmux or screen: the app ends with the line to this machine, its jobs go on"
        yield Finding("note", "tmux", sentence, "start it in tmux to find it again as you left it")


def check_mouse(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether the terminal sends mouse events to the app."""
    term = box.environ.get("TERM", "").lower()
    if box.size is None:
        return
    if term in WITHOUT_MOUSE:
        sentence = f"TERM={term} reports no mouse"
        yield Finding("note", "mouse", sentence, "use the keys, of which every action has one; ? shows them")
    else:
        yield Finding("ok", "mouse", f"reported, as by {term}; Shift selects text as usual in most terminals")
