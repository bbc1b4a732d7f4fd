"""A checkbox whose state is recognisable without colours."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Checkbox


class Tick(Checkbox):
    """A frameless checkbox whose mark is absent unless it is selected; Textual's checkbox only dims its mark."""

    DEFAULT_CSS = """
    Tick, Tick:focus { width: 1fr; height: auto; border: none; padding: 0; background: $surface; }
    """

    @property
    def _button(self) -> Content:
        self.BUTTON_INNER = "X" if self.value else " "
        return super()._button
