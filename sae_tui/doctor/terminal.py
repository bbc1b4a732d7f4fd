"""Checks what the terminal can display. The checks for colours and characters follow Textual's rules."""

from __future__ import annotations

from collections.abc import Iterator

from sae_tui.doctor.base import CheckedMachine, Finding

LEAST_COLUMNS, LEAST_LINES = 80, 24
UNABLE = frozenset({"", "dumb", "unknown"})
WITHOUT_MOUSE = frozenset({"linux", "vt100", "vt102", "vt220", *UNABLE})
BETTER_TERM = "use a modern terminal and `export TERM=xterm-256color` (inside tmux: TERM=tmux-256color)"


def check_colours(box: CheckedMachine) -> Iterator[Finding]:
    """Report the number of colours, derived from COLORTERM and the suffix of TERM."""
    term = box.environ.get("TERM", "").strip().lower()
    if box.size is None:
        return
    if term in UNABLE:
        sentence = f"a terminal with TERM={term} cannot draw a screen" if term else "TERM is not set"
        yield Finding("error", "colours", f"{sentence}; the app cannot run here, but the commands can", BETTER_TERM)
    elif box.environ.get("NO_COLOR"):
        yield Finding("note", "colours", "NO_COLOR is set, so the app shows no colours", "`unset NO_COLOR`")
    elif box.environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        yield Finding("ok", "colours", f"16.7 million ({term})")
    elif term.endswith(("-256color", "-kitty")):
        yield Finding(
            "ok",
            "colours",
            f"256 ({term}); `export COLORTERM=truecolor` gives all colours if the terminal supports them",
        )
    else:
        yield Finding("note", "colours", f"16 ({term}); some shades of the theme look the same", BETTER_TERM)


def check_characters(box: CheckedMachine) -> Iterator[Finding]:
    """Check the locale: if it is not UTF-8, tmux and screen write `_` for lines and bars."""
    locales = [(name, box.environ[name]) for name in ("LC_ALL", "LC_CTYPE", "LANG") if box.environ.get(name)]
    name, value = locales[0] if locales else ("LANG", "")
    if "utf8" in value.lower().replace("-", ""):
        yield Finding("ok", "characters", f"{name}={value}")
        return
    shown = f"{name}={value} is not UTF-8" if value else "no locale is set"
    sentence = f"{shown}, so lines and bars may appear as _ or ?"
    yield Finding("warning", "characters", sentence, f"`export {name}=C.UTF-8`, and start tmux as `tmux -u`")


def check_size(box: CheckedMachine) -> Iterator[Finding]:
    """Check that the window is large enough for the app."""
    if box.size is None:
        sentence = "there is no terminal here; the app needs one, but the commands do not"
        yield Finding("note", "window", sentence, "use ssh -t, or -it for a container")
        return
    columns, lines = box.size
    if columns < LEAST_COLUMNS or lines < LEAST_LINES:
        sentence = f"{columns} columns and {lines} lines are too few; the app needs {LEAST_COLUMNS} × {LEAST_LINES}"
        yield Finding("warning", "window", sentence, "make the window larger or the font smaller")
    else:
        yield Finding("ok", "window", f"{columns} columns and {lines} lines")


def check_multiplexer(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether tmux or screen is in use; jobs do not need them, but they keep the app open after a disconnect."""
    if box.environ.get("TMUX"):
        yield Finding("ok", "tmux", "inside tmux: you can detach, and attach again from anywhere")
    elif box.environ.get("STY"):
        remedy = "use tmux, with `set -g default-terminal tmux-256color`"
        yield Finding("note", "tmux", "inside screen, which supports at most 256 colours", remedy)
    elif box.size is not None:
        sentence = "not inside tmux or screen: the app exits if the connection to this machine drops; its jobs continue"
        yield Finding("note", "tmux", sentence, "start the app in tmux to keep it open")


def check_mouse(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether the terminal sends mouse events to the app."""
    term = box.environ.get("TERM", "").lower()
    if box.size is None:
        return
    if term in WITHOUT_MOUSE:
        sentence = f"a terminal with TERM={term} sends no mouse events"
        yield Finding("note", "mouse", sentence, "use the keyboard: every action has a key, and ? lists them")
    else:
        yield Finding("ok", "mouse", f"supported by {term}; in most terminals, hold Shift to select text")
