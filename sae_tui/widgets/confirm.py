"""A dialog asking for confirmation before a destructive action."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Region
from textual.strip import Strip
from textual.widgets import Button, Static

from sae_tui.widgets.dialog import Dialog

# A question with less space than this is considered unreadable.
LEGIBLE_COLUMNS, LEGIBLE_ROWS = 8, 2


class _Question(Static):
    """The question's text; `painted` is True once the text is visible on the terminal.

    Textual handles no key between rendering the lines and writing them. Textual also renders a question while the app
    batches updates, and behind another dialog, which may cover the question. In both cases, `painted` is False.
    """

    painted = False

    def render_lines(self, crop: Region) -> list[Strip]:
        is_legible = crop.width >= LEGIBLE_COLUMNS and crop.height >= min(self.size.height, LEGIBLE_ROWS)
        self.painted = is_legible and self.app.screen is self.screen and not self.app._batch_count
        return super().render_lines(crop)


class Confirm(Dialog[bool]):
    """Asks a question; Escape and the default button mean no.

    `also` is the label of an alternative to yes; `took_other` is True if the user chose that alternative.
    """

    BINDINGS = [
        Binding("escape,n", "answer(False)", "No", id="confirm.no", tooltip="Cancel without changes"),
        Binding("y", "answer(True)", "Yes", id="confirm.yes", tooltip="Go ahead"),
        Binding("f", "take_other", "Finish", id="confirm.also", tooltip="Choose the other option"),
        Binding("left,right", "app.focus_next", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
    ]
    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 64; max-width: 95%; height: auto; padding: 1 2; }
    Confirm > Vertical { border: round $warning; background: $surface; }
    Confirm VerticalScroll { height: auto; max-height: 70vh; margin-bottom: 1; }
    Confirm Static { height: auto; }
    Confirm Horizontal { height: auto; align-horizontal: right; }
    Confirm Button { margin-left: 2; min-width: 10; }
    """

    def __init__(self, question: str, *, yes: str = "Yes", no: str = "No", also: str = "") -> None:
        super().__init__()
        self.question = question
        self.labels = yes, no, also
        self.took_other = False

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self.labels[2]) if action == "take_other" else super().check_action(action, parameters)

    def compose(self) -> ComposeResult:
        yes, no, also = self.labels
        with Vertical():
            with VerticalScroll(can_focus=False):
                yield _Question(self.question, markup=False, id="question")
            with Horizontal():
                yield Button(f"{no} (n)", id="no", compact=True)
                if also:
                    yield Button(f"{also} (f)", id="also", variant="primary", compact=True)
                yield Button(f"{yes} (y)", id="yes", variant="warning", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_screen_suspend(self) -> None:
        for question in self.query(_Question):
            question.painted = False

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "also":
            self.action_take_other()
        else:
            self.action_answer(event.button.id == "yes")

    def action_scroll(self, by: int) -> None:
        """Scroll a question longer than the screen."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)

    def action_take_other(self) -> None:
        self.took_other = True
        self.action_answer(True)

    def action_answer(self, answer: bool) -> None:
        """Accept an answer, but ignore a yes typed before the question was readable."""
        if not answer or any(question.painted for question in self.query(_Question)):
            self.dismiss(answer)
