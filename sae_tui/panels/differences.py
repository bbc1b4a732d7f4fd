"""Tables with one column per SAE: the settings that differ between the SAEs, and the results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rich.cells import cell_len
from textual.binding import Binding

from sae_tui.compare.run import ComparedSae
from sae_tui.compare.runs import Comparison
from sae_tui.compare.tables import ComparisonRow, differences, over_seeds, results
from sae_tui.format import wrap
from sae_tui.settings import Settings
from sae_tui.widgets.chart import glyph
from sae_tui.widgets.lines import Span
from sae_tui.widgets.table import Column, KeyedTable, Row

_LONGEST_TITLE, _LONGEST_VALUE = 26, 24
_WITH_ARROWS = 20  # width in cells of a title that shows how many columns are out of view


class SaeTable(KeyedTable):
    """A table with one row per compared setting or result. The left and right keys scroll columns that do not fit."""

    BINDINGS = [
        Binding("left", "shift(-1)", show=False),
        Binding("right", "shift(1)", "Other runs", key_display="← →", id="compare.right",
                tooltip="Scroll to the runs that do not fit"),
    ]  # fmt: skip
    heading = ""
    # Sentences below the rows.
    notes: Sequence[str] = ()

    def __init__(self, *, empty: str, id: str | None = None) -> None:  # noqa: A002
        super().__init__((), empty=empty, id=id)
        self._saes: Sequence[ComparedSae] = ()
        self._lines_shown: list[ComparisonRow] = []
        self._first = 0

    @abstractmethod
    def lines_of(self, saes: Sequence[ComparedSae]) -> list[ComparisonRow]:
        """Return the rows to show for these SAEs."""

    def show_comparison(self, comparison: Comparison) -> None:
        self._saes, self._lines_shown = comparison.saes, self.lines_of(comparison.saes)
        self._lay_out()

    def on_resize(self) -> None:
        self._lay_out()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys for scrolling only if some columns do not fit."""
        return action != "shift" or self._fitting(0) < len(self._saes)

    def action_shift(self, by: int) -> None:
        self._first = max(0, min(self._first + by, len(self._saes) - self._fitting(self._first)))
        self._lay_out()

    def _lay_out(self) -> None:
        """Choose the columns that fit, and build the rows with these columns."""
        fitting = self._fitting(self._first)
        shown = range(self._first, min(self._first + fitting, len(self._saes)))
        hidden = len(self._saes) - len(shown)
        title = f" {self.heading}  {_elsewhere(shown.start, hidden - shown.start)}".rstrip()
        self.columns = (
            Column(title, self._title_width),
            *(
                Column(f"{glyph(place)[0]} {self._saes[place].label}", self._width(place), right=True)
                for place in shown
            ),
            # Takes the remaining width, so that the notes can use the whole width.
            Column("", 1, grow=True, drop=1),
        )
        notes = [part for note in self.notes for part in wrap(note, max(10, self.size.width - 4))]
        nothing: list[Span] = [("", "text")] * (len(shown) + 1)
        below = [
            Row(f"note {place}", ((f" {note}", "dim"), *nothing), spill=(0,), is_heading=True)
            for place, note in enumerate(["", *notes] if notes else [])
        ]
        self.show_rows([*(_row(line, shown) for line in self._lines_shown), *below])
        self.refresh_bindings()

    @property
    def _title_width(self) -> int:
        longest = max((len(line.title) for line in self._lines_shown), default=0)
        least = max(13, min(_LONGEST_TITLE, longest + 1))
        all_columns = sum(self._width(place) + 1 for place in range(len(self._saes)))
        return least if least + 1 + all_columns <= self.size.width else max(least, _WITH_ARROWS)

    def _fitting(self, first: int) -> int:
        """Return how many columns fit, starting at column `first`."""
        space = self.size.width - self._title_width - 1
        for place in range(first, len(self._saes)):
            space -= self._width(place) + 1
            if space < 0:
                return max(1, place - first)
        return len(self._saes) - first

    def _width(self, place: int) -> int:
        texts = [f"  {self._saes[place].label}", *(line.words()[place] for line in self._lines_shown)]
        return max(7, min(_LONGEST_VALUE, max(cell_len(text) for text in texts)))


class DifferencesPanel(SaeTable):
    """Shows the settings that differ between the SAEs."""

    heading = "SETTING"

    def lines_of(self, saes: Sequence[ComparedSae]) -> list[ComparisonRow]:
        self.empty = "All settings are the same." if len(saes) > 1 else "Only one SAE: nothing to compare."
        return differences(saes)


class ResultsPanel(SaeTable):
    """Shows the results of each SAE."""

    heading = "RESULT"

    def __init__(self, settings: Settings, *, empty: str, id: str | None = None) -> None:  # noqa: A002
        super().__init__(empty=empty, id=id)
        self._settings = settings

    def show_comparison(self, comparison: Comparison) -> None:
        of_seeds = [seeds.words for seeds in over_seeds(comparison.saes)]
        self.notes = of_seeds + [line.why for line in self.lines_of(comparison.saes) if line.why]
        super().show_comparison(comparison)

    def lines_of(self, saes: Sequence[ComparedSae]) -> list[ComparisonRow]:
        return results(saes, self._settings)


def _elsewhere(before: int, after: int) -> str:
    """Return how many columns are out of view on each side, like `← 1 · 3 →`."""
    if before and after:
        return f"← {before} · {after} →"
    return f"{after} more →" if after else f"← {before} more" if before else ""


def _row(line: ComparisonRow, shown: range) -> Row:
    words = line.words()
    cells: list[Span] = [(words[place], "good" if place in line.best else "text") for place in shown]
    return Row(line.title, ((f" {line.title}", "label"), *cells, ("", "text")))
