"""A drop-down menu opened with Enter or Space. As in a text field, the arrow keys move the focus to another field."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Select, Static
from textual.widgets._select import SelectCurrent, SelectOverlay


class Words(SelectOverlay):
    """The open menu.

    The menu ignores the page keys if it has no visible area, as in a tiny window, because Textual 8.2 would fail.
    """

    def action_page_up(self) -> None:
        if self.scrollable_content_region.area:
            super().action_page_up()  # type: ignore[no-untyped-call]

    def action_page_down(self) -> None:
        if self.scrollable_content_region.area:
            super().action_page_down()  # type: ignore[no-untyped-call]


class MenuValue(SelectCurrent):
    """A menu's value, shown in the first frame drawn; Textual would show it only after some messages."""

    def __init__(self, placeholder: str, value: RenderableType | None) -> None:
        super().__init__(placeholder)
        self._first = value
        self.set_class(value is not None, "-has-value")

    def compose(self) -> ComposeResult:
        label, *arrows = super().compose()
        if self._first is not None and isinstance(label, Static):
            label.update(self._first)
        yield label
        yield from arrows


class Menu(Select[Any], inherit_bindings=False):
    """A `Select` that posts `Picked` even if the user picks the value that is already selected."""

    BINDINGS = [Binding("enter,space", "show_overlay", "Show menu", show=False)]

    def compose(self) -> ComposeResult:
        chosen = [words for words, value in self._options if value == self._value != self.NULL]
        yield MenuValue(self.prompt, chosen[0] if chosen else None)
        yield Words(type_to_search=self._type_to_search).data_bind(compact=Select.compact)

    def _on_mount(self, event: events.Mount) -> None:
        """Skip the values of a menu removed while it is being mounted, because it has no widgets to show them."""
        if self._pruning or self._closing:
            event.prevent_default()

    class Picked(Message):
        """The user picked a value from the open menu."""

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
