"""An input line above a table for filtering its rows by words, with the number of results on the right."""

from __future__ import annotations

from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Input, Label

from sae_tui.format import fit
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.table import KeyedTable


class Filter(Input):
    """The input field of the filter: Enter keeps the text and returns to the table, Escape clears it."""

    BINDINGS = [
        Binding("escape", "leave(False)", "Clear", id="filter.clear", tooltip="Show all rows again"),
        Binding("enter,down", "leave(True)", "Keep", key_display="⏎", id="filter.keep",
                tooltip="Back to the table; the filter is kept"),
    ]  # fmt: skip

    def action_leave(self, keep: bool) -> None:
        self.value = self.value if keep else ""
        # Move the focus immediately, because the next key is intended for the table.
        self.query_ancestor(Filtered).focus_rows()


class FilterSummary(LineView):
    """The text on the right of the filter line, such as the number of rows found and the order."""

    text = ""

    def say(self, text: str) -> None:
        self.text = text
        self.show([((fit(f"{text} ", self.width, right=True), "label"),)])

    def on_resize(self) -> None:
        self.say(self.text)


class Filtered(Vertical):
    """A table with a line above it, visible while there is a filter or message to show."""

    DEFAULT_CSS = """
    Filtered { height: 1fr; min-height: 1; }
    Filtered > Horizontal { height: 1; display: none; background: $panel; }
    Filtered.-in-use > Horizontal { display: block; }
    Filtered.-unfiltered Label, Filtered.-unfiltered Input { display: none; }
    Filtered Label { color: $text-accent; }
    Filtered Input { width: 1fr; background: $panel; }
    Filtered FilterSummary { width: 1fr; height: 1; background: $panel; }
    """
    PLACEHOLDER = ""

    def filter_line(self) -> Widget:
        """Return the line to put above the table."""
        return Horizontal(
            Label(" /"), Filter(placeholder=self.PLACEHOLDER, compact=True, id="filter"), FilterSummary(id="found")
        )

    @property
    def words(self) -> str:
        """The filter text."""
        return self.query_one(Filter).value

    @property
    def filtering(self) -> bool:
        """Whether there is a filter, or the user is typing one."""
        return bool(self.words) or self.query_one(Filter).has_focus

    def say(self, text: str) -> None:
        """Show a message on the right of the line. Hide the line if there is neither a message nor a filter."""
        self.set_class(self.filtering or bool(text), "-in-use")
        # Hide the input field if there is no filter, because an empty field would look like a filter.
        self.set_class(not self.filtering, "-unfiltered")
        self.query_one(FilterSummary).say(text)

    def action_filter(self) -> None:
        self.add_class("-in-use").remove_class("-unfiltered")
        self.query_one(Filter).focus()

    def action_clear_filter(self) -> None:
        self.query_one(Filter).value = ""

    def focus_rows(self) -> None:
        """Move the focus from the filter to the table."""
        self.query_one(KeyedTable).focus()
