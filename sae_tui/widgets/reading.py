"""A dialog showing text over the screen below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize

from sae_tui.widgets.dialog import Dialog
from sae_tui.widgets.lines import Line, LineView

Lines = Callable[[int], Sequence[Line]]


class Page(LineView, can_focus=True):
    """Lines generated for the available width; the cursor keys scroll them."""

    DEFAULT_CSS = "Page { height: auto; max-height: 100%; background: $surface; }"

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines_for = lines

    def on_resize(self, _: Resize) -> None:
        self.draw_again()

    def draw_again(self) -> None:
        """Rebuild the lines after their content has changed."""
        # Reserve a column for the scrollbar, which is shown if there are more lines than rows.
        self.show(self._lines_for(max(1, self.size.width - 1)))


class LinesScreen(Dialog[None]):
    """Shows the lines returned by `lines` for the width; Escape closes the dialog."""

    BINDINGS = [
        Binding("escape,enter,q", "dismiss", "Close", id="reading.close", tooltip="Back to the previous screen"),
    ]
    DEFAULT_CSS = """
    LinesScreen { align: center middle; }
    LinesScreen > Vertical { width: 96%; max-width: 160; height: auto; max-height: 96%; padding: 0 1; }
    LinesScreen > Vertical { border: round $primary; background: $surface; }
    """

    def __init__(self, title: str, lines: Lines) -> None:
        super().__init__()
        self._heading = title
        self._lines_for = lines

    def compose(self) -> ComposeResult:
        box = Vertical(Page(self._lines_for))
        box.border_title, box.border_subtitle = Content(self._heading), "esc Close"
        yield box

    def hide_values(self) -> None:
        """Hide text that must not appear in screenshots; most pages have nothing to hide."""

    def draw_again(self) -> None:
        """Rebuild the lines after their content has changed."""
        self.query_one(Page).draw_again()
