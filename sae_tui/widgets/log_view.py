"""A view of thousands of log lines that draws only visible lines, searches, filters, and follows the end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.segment import Segment
from textual.binding import Binding
from textual.geometry import Size
from textual.strip import Strip

from sae_tui.format import fit, visible
from sae_tui.widgets.lines import Line, LineView

MOST_LINES = 100_000
HINT = "← → long lines"
_STEP = 16


class LogView(LineView, can_focus=True):
    """The lines of a log, each prefixed with its source if `names` is set; `pattern` is the search pattern."""

    BINDINGS = [
        Binding("end", "follow", "Follow", id="log.end", tooltip="Go to the end and follow new lines"),
        Binding("left", "shift(-1)", show=False),
        Binding("right", "shift(1)", show=False),
    ]
    DEFAULT_CSS = "LogView { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.pattern: re.Pattern[str] | None = None
        self.names = False
        self.follows = True
        self._all: list[tuple[str, str]] = []
        self._shown: list[int] = []
        self._only = False
        self._left = 0
        self._at: int | None = None
        # The number of lines matching the search.
        self.n_found = 0
        # The text to show if there are no lines.
        self._nothing = ""
        # Each source's unfinished line; these lines take up the last rows.
        self._unfinished: dict[str, str] = {}

    @property
    def plain(self) -> str:
        return "\n".join(self._text(row) for row in range(len(self._shown))) or self._empty

    @property
    def has_long_lines(self) -> bool:
        """Whether a visible line extends beyond the right edge, or the view is scrolled sideways."""
        top = round(self.scroll_y)
        texts = (self._all[at][1] for at in self._shown[top : top + self.size.height])
        return self._left > 0 or any(cell_len(text) > self._space for text in texts)

    def clear(self) -> None:
        self._all.clear()
        self._unfinished.clear()
        self._nothing, self._left = "", 0
        self._arrange()
        self._count()

    def say_if_empty(self, text: str) -> None:
        """Set the text to show if there are no lines."""
        self._nothing = text
        self.refresh()

    @property
    def _empty(self) -> str:
        return "no line matches" if self._all else self._nothing

    @property
    def _space(self) -> int:
        return self.size.width - (11 if self.names else 1)

    def show_unfinished(self, lines: Mapping[str, str]) -> None:
        """Show each source's current line below the other lines, in place of its previous unfinished line."""
        if lines:
            self._take_unfinished()
            self._unfinished |= lines
            self._unfinished = {source: text for source, text in self._unfinished.items() if text}
            self._add([*self._unfinished.items()])

    def append(self, lines: Sequence[tuple[str, str]]) -> None:
        """Add (source, text) lines, and drop the oldest lines beyond the limit."""
        if lines:
            self._take_unfinished()
            self._add([*lines, *self._unfinished.items()])

    def _take_unfinished(self) -> None:
        """Remove the rows of the unfinished lines."""
        first = len(self._all) - len(self._unfinished)
        self.n_found -= self._matches_from(first)
        del self._all[first:]
        while self._shown and self._shown[-1] >= first:
            self._shown.pop()

    def _add(self, lines: Sequence[tuple[str, str]]) -> None:
        self._all += lines
        if len(self._all) > MOST_LINES:
            del self._all[: len(self._all) - MOST_LINES * 9 // 10]
            self._arrange()
            self._count()
            return
        first = len(self._all) - len(lines)
        self.n_found += self._matches_from(first)
        self._shown += [index for index in range(first, len(self._all)) if self._is_shown(index)]
        self._resize()

    def search(self, text: str) -> None:
        """Search for a string, ignoring case.

        Regular expressions are not supported, because some take minutes on one line.
        """
        self.pattern = re.compile(re.escape(text), re.IGNORECASE) if text else None
        self._at = None
        self._arrange()
        self._count()

    def _count(self) -> None:
        self.n_found = self._matches_from(0)

    def _matches_from(self, first: int) -> int:
        """Return the number of matching lines from index `first` on."""
        return sum(map(self._matches, range(first, len(self._all)))) if self.pattern else 0

    def show_only_matches(self, only: bool) -> None:
        self._only = only
        self._arrange()

    def jump(self, direction: int) -> bool:
        """Go to the next matching line (1) or the previous one (-1); return False if no line matches."""
        start = self._at if self._at is not None else round(self.scroll_y) - (direction > 0)
        rows = range(start + 1, len(self._shown)) if direction > 0 else range(start - 1, -1, -1)
        target = next((row for row in rows if self._matches(self._shown[row])), None)
        if target is None:
            return False
        self._at, self.follows = target, False
        self.scroll_to(y=max(0, target - self.size.height // 2), animate=False, immediate=True, force=True)
        self.refresh()
        return True

    def action_follow(self) -> None:
        self.follows = True
        self._resize()

    def action_shift(self, direction: int) -> None:
        """Scroll the lines sideways, because long lines are truncated instead of wrapped."""
        self._left = shift(self._left, direction, [text for _, text in self._all], self._space)
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.follows = new_value >= self.max_scroll_y or (self.follows and new_value > old_value)

    def render_line(self, y: int) -> Strip:
        row = y + round(self.scroll_y)
        base = self.rich_style
        if not self._shown and y == 0:
            segment = Segment(fit(f" {self._empty}", self.size.width), self._style("dim"))
            return Strip([segment]).adjust_cell_length(self.size.width, base)
        if row >= len(self._shown):
            return Strip.blank(self.size.width, base)
        segments = [Segment(visible(text), self._style(style)) for text, style in self._spans(row)]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def on_resize(self) -> None:
        self._resize()

    def _spans(self, row: int) -> Line:
        source, text = self._all[self._shown[row]]
        name = ((fit(source, 10) + " ", "dim"),) if self.names else ((" ", "dim"),)
        in_view, here = text[self._left :], " here" if row == self._at else ""
        spans, done = [], 0
        for match in self.pattern.finditer(in_view) if self.pattern else ():
            spans += [(in_view[done : match.start()], f"text{here}"), (match[0], f"warn swapped{here}")]
            done = match.end()
        return (*name, *spans, (in_view[done:], f"text{here}"))

    def _text(self, row: int) -> str:
        source, text = self._all[self._shown[row]]
        return f"{source}: {text}" if self.names else text

    def _is_shown(self, index: int) -> bool:
        return not self._only or self.pattern is None or self._matches(index)

    def _matches(self, index: int) -> bool:
        return self.pattern is not None and self.pattern.search(self._all[index][1]) is not None

    def _arrange(self) -> None:
        self._shown = [index for index in range(len(self._all)) if self._is_shown(index)]
        self._at = None
        self._resize()

    def _resize(self) -> None:
        self.virtual_size = Size(0, len(self._shown))
        if self.follows:
            self.scroll_end(animate=False, immediate=True, force=True)
        self.refresh()


def shift(left: int, direction: int, lines: Sequence[str], width: int) -> int:
    """Return how many columns are hidden on the left after one step, limited by the longest line."""
    longest = max(map(len, lines), default=0)
    return max(0, min(left + direction * _STEP, max(0, longest - width + _STEP)))
