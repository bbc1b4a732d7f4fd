"""A view of styled lines that repaints only the spans that changed.

Bytes to the terminal are the floor of a monitor over SSH: a whole row costs ten times the two
digits in it that changed. One such view draws what would else take dozens of widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from sae_tui.format import fit, visible

Span = tuple[str, str]  # text, name of its style
Line = tuple[Span, ...]

STYLES = (
    "text",
    "dim",
    "label",
    "good",
    "warn",
    "bad",
    "accent",
    "spark",
    "bar",
    "memory",
    "title",
    "cursor",
    "here",
    "trough",
    "swapped",
)


class LazyLines(Sequence[Line]):
    """Lines that are made as they are looked at: of a thousand rows only those on the screen cost anything."""

    def __init__(self, count: int, make: Callable[[int], Line]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Line]: ...
    def __getitem__(self, index: int | slice) -> Line | Sequence[Line]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(index)


class LineView(ScrollView, can_focus=False):
    """Draws lines of (text, style name) spans; `show` compares with what stands there."""

    COMPONENT_CLASSES = {f"line--{name}" for name in STYLES}
    DEFAULT_CSS = """
    LineView {
        height: auto; background: $background; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0;
        & > .line--text { color: $foreground; }
        & > .line--dim { color: $text-muted; }
        & > .line--label { color: $text-muted; }
        & > .line--good { color: $text-success; }
        & > .line--warn { color: $text-warning; text-style: bold; }
        & > .line--bad { color: $text-error; text-style: bold; }
        & > .line--accent { color: $text-accent; }
        & > .line--spark { color: $primary; }
        & > .line--bar { color: $success; }
        & > .line--memory { color: $secondary; }
        & > .line--title { color: $foreground; text-style: bold; }
        & > .line--cursor { background: $primary 35%; }
        & > .line--here { text-style: underline; }
        & > .line--trough { background: $panel; }
        & > .line--swapped { text-style: bold; }
    }
    """

    fixed_lines = 0  # lines at the top that stay while the others scroll

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._lines: Sequence[Line] = ()
        self._styles: dict[str, Style] = {}

    def show(self, lines: Sequence[Line]) -> None:
        """Replaces the lines and marks for repainting what differs."""
        lines = lines if isinstance(lines, LazyLines) else tuple(lines)
        old, self._lines = self._lines, lines
        if len(old) != len(self._lines):
            self.virtual_size = Size(0, len(self._lines))
            self.refresh(layout=self.styles.height is not None and self.styles.height.is_auto)
            return
        changed = [region for y in self._rows_in_view() for region in _changes(y, old[y], lines[y])]
        if changed:
            self.refresh(*[region.translate((0, self._shift(region.y))) for region in changed])

    @property
    def width(self) -> int:
        """Cells to draw in; while the view has no lines it has no size, and the screen's width stands in."""
        return self.size.width or (self.screen.size.width if self.is_attached else 0)

    @property
    def plain(self) -> str:
        """The text of all lines, for tests and for copying."""
        return "\n".join("".join(text for text, _ in line) for line in self._lines)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        row = y if y < self.fixed_lines else y + round(self.scroll_y)
        base = self.rich_style
        if row >= len(self._lines):
            return Strip.blank(self.size.width, base)
        segments = [Segment(visible(text), self._style(style)) for text, style in self._lines[row]]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _rows_in_view(self) -> list[int]:
        shown = (y if y < self.fixed_lines else y + round(self.scroll_y) for y in range(self.size.height))
        return [row for row in shown if row < len(self._lines)]

    def _shift(self, row: int) -> int:
        return 0 if row < self.fixed_lines else -round(self.scroll_y)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()

    def _style(self, names: str) -> Style:
        """The style of a name, or of several over each other: `"good cursor"`."""
        if names not in self._styles:
            classes = [f"line--{name}" for name in names.split()]
            # Textual 8.2 leaves `reverse` out of a visual style.
            swapped = Style(reverse=True) if "swapped" in names else Style.null()
            self._styles[names] = self.get_visual_style(*classes).rich_style + swapped
        return self._styles[names]


def _changes(y: int, old: Line, new: Line) -> list[Region]:
    """The cells of a line that differ, as regions; a line whose spans moved is one region."""
    if old == new:
        return []
    if [cell_len(text) for text, _ in old] != [cell_len(text) for text, _ in new]:
        return [Region(0, y, max(_width(old), _width(new)), 1)]
    regions, x = [], 0
    for before, after in zip(old, new, strict=True):
        width = cell_len(after[0])
        if before != after:
            regions.append(Region(x, y, width, 1))
        x += width
    return regions


def _width(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def cut(line: Line, width: int) -> Line:
    """The line in at most `width` cells."""
    kept: list[Span] = []
    for text, style in line:
        room = width - _width(tuple(kept))
        if room <= 0:
            break
        kept.append((text if cell_len(text) <= room else fit(text, room), style))
    return tuple(kept)
