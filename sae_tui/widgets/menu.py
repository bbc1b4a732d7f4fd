"""A menu of a few words, opened by enter or space; the arrow keys go past it, as they go past a text field."""

from __future__ import annotations

from typing import Any

from textual import on
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Select
from textual.widgets._select import SelectOverlay


class Menu(Select[Any], inherit_bindings=False):
    """Tells what was picked even where that is what it shows already."""

    BINDINGS = [Binding("enter,space", "show_overlay", "Show menu", show=False)]

    class Picked(Message):
        """A person has chosen a value from the open menu."""

        def __init__(self, menu: Menu, value: Any) -> None:
            super().__init__()
            self.menu = menu
            self.value = value

        @property
        def control(self) -> Menu:
            return self.menu

    @on(SelectOverlay.UpdateSelection)
    def _picked(self, event: SelectOverlay.UpdateSelection) -> None:
        self.post_message(self.Picked(self, self._options[event.option_index][1]))
