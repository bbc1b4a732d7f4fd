"""A view of styled lines that repaints only changed spans.

Over ssh, the cost of a monitor is the number of bytes it sends: an entire row takes ten times as many bytes as its two
changed digits. A single view also replaces dozens of widgets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, overload

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.style import Style

from sae_tui.format import RAIL, fit, visible
from sae_tui.theme import SHADES
from sae_tui.widgets.frame import entitle, frame_of

Span = tuple[str, str]  # text, name of its style
Line = tuple[Span, ...]

PALETTE = {
    "text": "$foreground",
    "dim": "$text-muted",
    "label": "$text-muted",
    "good": "$text-success",
    "warn": "bold $text-warning",
    "bad": "bold $text-error",
    # The styles for a reading, by its load.
    "low": "$text-success",
    "middle": "$text-warning",
    "high": "bold $text-error",
    "accent": "$text-accent",
    "spark": "$primary",
    "bar": "$success",
    "memory": "$secondary",
    "heat": "$warning",
    "title": "bold $foreground",
    "cursor": "on $primary 35%",
    "here": "underline",
    "trough": "on $panel",
    "rail": "$foreground 30%",
    "swapped": "bold",
    # The shades for GPU utilisation.
    "load0": "on $surface",
    "load1": "on $primary 10%",
    "load2": "on $primary 20%",
    "load3": "on $primary 30%",
    "load4": "on $primary 40%",
}
GRAPHS = {"spark": "$primary", "bar": "$success", "memory": "$secondary", "heat": "$warning"}
PALETTE |= {f"{name}-{shade}": f"{colour} {shade}%" for name, colour in GRAPHS.items() for shade in SHADES}
_RAILS = re.compile(f"({RAIL}+)")
BEFORE_TITLE: Span = (" ", "text")  # used if there is no frame
# The terminal's own 16 colours include neither surface colours nor shades, and its background may be light or dark: a
# background of a known colour needs text of a known colour. Blue is the darkest colour in nearly every terminal.
_ON_BLUE = "ansi_bright_white on ansi_blue"
_OF_16 = {
    "cursor": _ON_BLUE,
    "load3": _ON_BLUE,
    "load4": _ON_BLUE,
    "faint": "underline",
    "weak": f"underline {_ON_BLUE}",
    "strong": "underline ansi_black on ansi_bright_cyan",
    "full": "bold underline ansi_black on ansi_bright_yellow",
    "trough": "on ansi_bright_black",
    "rail": "ansi_bright_black",
    "load0": "",
    "load1": "",
    "load2": "",
} | {f"{name}-{shade}": colour for name, colour in GRAPHS.items() for shade in SHADES}
# Plain blue is too dark on black, and bright blue is readable on white too.
_OF_16 |= dict.fromkeys(("spark", *(f"spark-{shade}" for shade in SHADES)), "ansi_bright_blue")


class LazyLines(Sequence[Line]):
    """A sequence of lines created only on access, so that invisible lines cost no time."""

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
    """Draws lines of (text, style name) spans; `show` repaints only the differences."""

    # Do not use component classes, because Textual 8.2 recomputes all of them whenever a widget's classes change.
    # Recomputing them took a third of the app's CPU time while the user typed.
    palette: ClassVar[Mapping[str, str]] = PALETTE
    DEFAULT_CSS = """
    LineView {
        height: auto; background: $background; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0;
        scrollbar-background: $background;
    }
    """

    fixed_lines = 0  # number of lines at the top that do not scroll

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._lines: Sequence[Line] = ()
        # The title and the hint in the frame.
        self._framed: Line = ()
        self._hint = ""
        self._styles: dict[str, RichStyle] = {}

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines and mark the differences for repainting."""
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
    def has_title(self) -> bool:
        """Whether the view is a panel with a frame that can show a title."""
        return self.has_class("panel") and frame_of(*self.screen.size) != "bare"

    def show_titled(self, title: Line, lines: Sequence[Line], hint: str = "") -> None:
        """Draw lines with a title in the frame or, if there is no frame, in a fixed line above the others."""
        if self.has_title:
            self._framed, self._hint, self.fixed_lines = title, hint, 0
            self._write_title()
            self.show(lines)
        else:
            self._framed, self.fixed_lines = (), 1
            self.show([cut((BEFORE_TITLE, *title, _behind(hint)), self.width), *lines])

    def _write_title(self) -> None:
        """Write the title into the frame, in the current colours."""
        # The title itself has the frame's colour, which shows the focus.
        plain = Style(bold=False)
        parts = [text if style == "title" else (text, plain + self._look(style)) for text, style in self._framed]
        entitle(self, Content.assemble(*parts), self._hint)

    @property
    def width(self) -> int:
        """The width to draw in; a view without lines has no size yet, so use the screen's width."""
        return self.size.width or (self.screen.size.width if self.is_attached else 0)

    @property
    def plain(self) -> str:
        """The text in all lines and the frame, for tests and copying."""
        lines = [(*self._framed, _behind(self._hint)), *self._lines] if self._framed else self._lines
        return "\n".join("".join(text for text, _ in line) for line in lines)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        row = y if y < self.fixed_lines else y + round(self.scroll_y)
        base = self.rich_style
        if row >= len(self._lines):
            return Strip.blank(self.size.width, base)
        spans = (part for span in self._lines[row] for part in _apart(*span))
        segments = [Segment(visible(text), self._style(style)) for text, style in spans]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _rows_in_view(self) -> list[int]:
        shown = (y if y < self.fixed_lines else y + round(self.scroll_y) for y in range(self.size.height))
        return [row for row in shown if row < len(self._lines)]

    def _shift(self, row: int) -> int:
        return 0 if row < self.fixed_lines else -round(self.scroll_y)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()
        if self._framed:
            self._write_title()

    def _style(self, names: str) -> RichStyle:
        """Return the style for one name, or for several names combined, such as `"good cursor"`."""
        if names not in self._styles:
            look = self.visual_style
            for name in names.split():
                look += self._look(name)
            # Textual 8.2 omits `reverse` from a visual style.
            swapped = RichStyle(reverse=True) if "swapped" in names else RichStyle.null()
            self._styles[names] = look.rich_style + swapped
        return self._styles[names]

    def _look(self, name: str) -> Style:
        variables, is_of_16 = self.app.theme_variables, self.app.native_ansi_color
        style = variables.get(f"style-{name}", self.palette[name])
        if is_of_16 or self.app.console.color_system == "256":
            style = (_OF_16 if is_of_16 else {}).get(name, style)
            style = variables.get(f"style{16 if is_of_16 else 256}-{name}", style)
        # If a variable has several words, Textual 8.2 uses only the first.
        return Style.parse(style.replace("$text-muted", variables["text-muted"]))


def _behind(hint: str) -> Span:
    return (f"  {hint}" if hint else "", "dim")


def _apart(text: str, style: str) -> Sequence[Span]:
    """Split a bar or a history with a style like `"memory rail cursor"` into its values and its rails."""
    if "rail" not in style:
        return ((text, style),)
    own, others = style.split(" rail")
    parts = _RAILS.split(text)
    return [(part, ("rail" if place % 2 else own) + others) for place, part in enumerate(parts) if part]


def _changes(y: int, old: Line, new: Line) -> list[Region]:
    """Return the differing cells in a line, as regions; a line with moved spans is a single region."""
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
    """Return the line, truncated to at most `width` cells."""
    spans: list[Span] = []
    for text, style in line:
        space = width - _width(tuple(spans))
        if space <= 0:
            break
        spans.append((text if cell_len(text) <= space else fit(text, space), style))
    return tuple(spans)
