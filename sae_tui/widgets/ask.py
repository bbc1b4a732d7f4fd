"""Dialogs asking for one line of text, or for several lines."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Input, Label, TextArea

from sae_tui.widgets.dialog import Dialog


class Ask(Dialog[str | None]):
    """A dialog with one input field: Enter returns its text, Escape returns None."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Cancel", id="ask.cancel", tooltip="Cancel without changes")]
    DEFAULT_CSS = """
    Ask { align: center middle; }
    Ask > Vertical { width: 64; max-width: 95%; height: auto; padding: 1 2; }
    Ask > Vertical { border: round $primary; background: $surface; }
    Ask Label { width: 1fr; height: auto; }
    Ask Input { background: $panel; }
    """

    def __init__(self, question: str, placeholder: str, value: str = "") -> None:
        super().__init__()
        self.texts = question, placeholder, value

    def compose(self) -> ComposeResult:
        question, placeholder, value = self.texts
        with Vertical():
            yield Label(question, markup=False)
            yield Input(value, placeholder=placeholder, compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())


class AskText(Ask):
    """A dialog with a field for several lines: ctrl+s returns its text, Escape returns None."""

    BINDINGS = [
        Binding("ctrl+s", "save", "Save", id="ask.save", tooltip="Keep the text"),
    ]
    DEFAULT_CSS = """
    AskText TextArea { height: 8; background: $panel; border: none; padding: 0; }
    AskText #keys { color: $text-muted; }
    """

    def compose(self) -> ComposeResult:
        question, placeholder, value = self.texts
        with Vertical():
            yield Label(question, markup=False)
            yield TextArea(value, placeholder=placeholder, compact=True, tab_behavior="focus")
            yield Label("ctrl+s save · esc cancel", markup=False, id="keys")

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text.strip())
