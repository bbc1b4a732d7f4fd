"""The help screen: a screen's keys by topic, taken from its bindings."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.binding import ActiveBinding, Binding
from textual.screen import Screen

from sae_tui.format import fit
from sae_tui.widgets.lines import Line
from sae_tui.widgets.reading import LinesScreen

_EVERYWHERE = "Everywhere"
# Maps the first part of a binding's id to the topic for a binding without a group.
_TITLES = {"picker": "GPUs", "launch": "Launch", "job": "Job", "logs": "Log", "log": "Log", "compare": "Compare",
           "settings": "Settings",
           "doctor": "Doctor", "filter": "Find", "app": _EVERYWHERE}  # fmt: skip
_ORDER = ("Jobs", "Queue", "Find", "GPUs")
_TWO_COLUMNS_FROM = 100
_APART = 3


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic and its keys, each as (keys, name, description)."""

    title: str
    keys: tuple[tuple[str, str, str], ...]


class HelpScreen(LinesScreen):
    """Shows the introduction of a screen, if it has one, and its keys; escape closes it."""

    BINDINGS = [
        Binding("escape,question_mark,f1,q", "dismiss", "Close", id="help.close", tooltip="Back to the previous screen")
    ]

    def __init__(self, about: Screen[object]) -> None:
        self.topics = topics(about)
        super().__init__("Help", lambda width: help_lines(about.HELP or "", self.topics, width))


def topics(screen: Screen[object]) -> list[Topic]:
    """Return the topics with all keys that have a tooltip: keys for the focused widget, the screen and the app."""
    own = {binding.id for binding in type(screen).BINDINGS if isinstance(binding, Binding)}
    by_title: dict[str, dict[str, list[ActiveBinding]]] = {}
    # A screen's own keys come before inherited ones.
    for active in sorted(screen.active_bindings.values(), key=lambda one: one.binding.id not in own):
        if active.binding.tooltip:
            by_title.setdefault(_title(active.binding), {}).setdefault(active.binding.action, []).append(active)

    def describe(actives: Sequence[ActiveBinding]) -> tuple[str, str, str]:
        shown = dict.fromkeys(screen.app.get_key_display(one.binding) for one in actives)
        return " ".join(shown), actives[0].binding.description, actives[0].binding.tooltip

    listed = [Topic(title, tuple(map(describe, actions.values()))) for title, actions in by_title.items()]
    return sorted(listed, key=lambda topic: _place(topic.title))


def help_lines(introduction: str, listed: Sequence[Topic], width: int) -> list[Line]:
    """Return the help text in `width` cells, with the topics in one column, or in two columns if there is space."""
    lines: list[Line] = [((text, "text"),) for text in textwrap.wrap(introduction, max(20, width))]
    lines += [()] if lines else []
    if width < _TWO_COLUMNS_FROM:
        return lines + _column(listed, width)
    each = (width - _APART) // 2
    left, right = _halves([_column([topic], each) for topic in listed])
    blank: Line = ((" " * each, "text"),)
    pairs = itertools.zip_longest(left, right, fillvalue=blank)
    return lines + [(*_pad(one, each), (" " * _APART, "text"), *other) for one, other in pairs]


def _title(binding: Binding) -> str:
    if binding.group is not None:
        return binding.group.description
    first, dot, _ = (binding.id or "app.").partition(".")
    return _TITLES.get(first, first.capitalize()) if dot else _EVERYWHERE


def _place(title: str) -> int:
    if title == _EVERYWHERE:
        return len(_ORDER) + 1
    return _ORDER.index(title) if title in _ORDER else len(_ORDER)


def _column(listed: Sequence[Topic], width: int) -> list[Line]:
    lines: list[Line] = []
    for topic in listed:
        lines += [
            ((topic.title, "title accent"),),
            *(line for key in topic.keys for line in _key_lines(key, width)),
            (),
        ]
    return lines


def _key_lines(key: tuple[str, str, str], width: int) -> list[Line]:
    """Return the keys, their name and the wrapped tooltip as lines."""
    shown, name, tooltip = key
    head = 20
    wrapped = textwrap.wrap(tooltip, max(16, width - head)) or [""]
    first: Line = ((f"{fit(shown, 8, right=True)} ", "title"), (f"{fit(name, 10)} ", "text"), (wrapped[0], "dim"))
    return [first, *((((" " * head) + text, "dim"),) for text in wrapped[1:])]


def _halves(blocks: Sequence[list[Line]]) -> tuple[list[Line], list[Line]]:
    """Split the blocks, in order, into two columns of about the same height."""
    total = sum(map(len, blocks))
    best = min(range(len(blocks) + 1), key=lambda cut: abs(2 * sum(map(len, blocks[:cut])) - total))
    left = [line for block in blocks[:best] for line in block]
    return left, [line for block in blocks[best:] for line in block]


def _pad(line: Line, width: int) -> Line:
    return (*line, (" " * max(0, width - sum(cell_len(text) for text, _ in line)), "text"))
