"""A text field of a few lines: Enter submits it, and up and down recall earlier texts."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from trainer.contract.printable import CONTROL


class TextField(TextArea):
    """A field that wraps long lines and keeps the line ends of pasted text; ctrl+j starts a new line.

    Above the first and below the last line, up and down go through `earlier`, the latest text last.
    """

    DEFAULT_CSS = """
    TextField, TextField:focus { border: none; padding: 0 1; background: $panel; scrollbar-size-vertical: 1; }
    TextField:ansi { text-style: underline; }
    """

    class Submitted(Message):
        """The user pressed Enter."""

        def __init__(self, field: TextField) -> None:
            super().__init__()
            self.field = field

        @property
        def control(self) -> TextField:
            return self.field

    def __init__(self, text: str = "", *, earlier: Sequence[str] = (), placeholder: str = "", id: str = "") -> None:  # noqa: A002
        super().__init__(
            text, id=id or None, soft_wrap=True, show_line_numbers=False, compact=True, highlight_cursor_line=False,
            placeholder=placeholder,
        )  # fmt: skip
        self._earlier = earlier
        # The position in `earlier`, counted from the end, and the text typed before the first recall.
        self._back, self._typed = 0, text

    def _on_key(self, event: events.Key) -> None:  # type: ignore[override]
        if event.key in ("enter", "ctrl+j"):
            event.stop()
            event.prevent_default()
            if event.key == "enter":
                self.post_message(self.Submitted(self))
            else:
                self.insert("\n")

    def _on_paste(self, event: events.Paste) -> None:  # type: ignore[override]
        """Insert the text without control characters other than tabs and line ends, and say so."""
        event.stop()
        event.prevent_default()
        lines = event.text.replace("\r\n", "\n").replace("\r", "\n")
        kept = "".join(char for char in lines if char in "\t\n" or not CONTROL.match(char))
        if len(kept) < len(lines):
            self.notify(f"{len(lines) - len(kept):,} control characters were left out.", severity="warning")
        self.insert(kept)

    def action_cursor_up(self, select: bool = False) -> None:
        is_first = self.navigator.is_first_wrapped_line(self.selection.end)
        if not select and is_first and self._back < len(self._earlier):
            self._recall(self._back + 1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self._back and self.navigator.is_last_wrapped_line(self.selection.end):
            self._recall(self._back - 1)
        else:
            super().action_cursor_down(select)

    def _recall(self, back: int) -> None:
        if not self._back:
            self._typed = self.text
        self._back = back
        self.text = self._earlier[-back] if back else self._typed
        self.move_cursor(self.document.end)

    def forget_place(self) -> None:
        """Start recalling at the latest text again, for example after it was submitted."""
        self._back = 0
