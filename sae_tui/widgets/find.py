"""A dialog for finding one of many items by parts of its name."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from sae_tui.widgets.dialog import Dialog


class Find(Dialog[str | None]):
    """Returns the key of the item chosen with Enter, or None for Escape; `things` are (key, description) pairs."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "Cancel", id="find.cancel", tooltip="Back to the previous screen"),
        Binding("down", "move(1)", "Down", show=False),
        Binding("up", "move(-1)", "Up", show=False),
    ]
    DEFAULT_CSS = """
    Find { align: center middle; }
    Find > Vertical { width: 90; max-width: 95%; height: auto; max-height: 90%; padding: 1 2; }
    Find > Vertical { border: round $primary; background: $surface; }
    Find Label { width: 1fr; height: auto; }
    Find OptionList { height: auto; max-height: 12; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, question: str, things: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.question = question
        self._things = things

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self.question, markup=False)
            yield Input(placeholder="type part of its name", compact=True)
            options = OptionList(markup=False, compact=True)
            options.can_focus = False
            yield options

    def on_mount(self) -> None:
        self._show("")

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        self._show(event.value)

    def _show(self, text: str) -> None:
        options, width = self.query_one(OptionList), max((len(key) for key, _ in self._things), default=0)
        options.clear_options()
        options.add_options(
            Option(f"{key:<{width}}  {description}", id=key) for key, description in matching(self._things, text)
        )
        options.highlighted = 0 if options.option_count else None

    @on(Input.Submitted)
    def _take(self) -> None:
        option = self.query_one(OptionList).highlighted_option
        if option is not None:
            self.dismiss(option.id)

    @on(OptionList.OptionSelected)
    def _take_clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


def matching(things: Sequence[tuple[str, str]], text: str) -> list[tuple[str, str]]:
    """Return the items containing all words: exact names first, then names that start with the first word."""
    words = text.lower().split()
    matches = [thing for thing in things if all(word in " ".join(thing).lower() for word in words)]

    def rank(thing: tuple[str, str]) -> tuple[bool, bool, bool]:
        key = thing[0].lower()
        name = key.rpartition(".")[2]
        first = words[0] if words else ""
        return name != first, not name.startswith(first), not all(word in key for word in words)

    return sorted(matches, key=rank)
