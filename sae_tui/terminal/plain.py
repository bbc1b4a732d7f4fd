"""The plain look for ASCII-only terminals: each symbol is drawn as an ASCII character of the same width.

Bars use `#`, histories use digits (tenths) with `#` for full, frames use `+-|`, and curves use `*`. The layout does not
change, so other code is unaffected.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Literal

import rich.color
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

Look = Literal["auto", "full", "plain"]
# Terminals that show only ASCII or, like the Linux console, a few blocks but no braille. TERM=vte is GNOME's terminal,
# which can show all characters.
_PLAIN_TERMS = re.compile(r"vt(?!e)|linux|ansi|cons|sun|wy|dumb", re.IGNORECASE)

_SIGNS = {
    # Bars and their rails, frames, axes.
    "━": "#", "╸": "=", "╺": "=", "─": "-", "═": "-", "│": "|", "┃": "|", "║": "|", "▏": "|", "▎": "|", "▍": "|",
    "▌": "|", "▐": "|", "▕": "|", "▋": "#", "▊": "#", "▉": "#", "▔": "-", "▀": "#", "░": ".", "▒": ":", "▓": "%",
    "╷": "|", "╵": "|", "◼": "#", "⟨": "<", "⟩": ">",
    # Histories, in tenths; # is full.
    "▁": "0", "▂": "1", "▃": "3", "▄": "4", "▅": "5", "▆": "6", "▇": "8", "█": "#",
    # States.
    "▶": ">", "✓": "+", "✗": "x", "◌": "o", "‖": "|", "⚠": "!", "◔": "c", "★": "*", "•": "*", "�": "?",
    # Curves: eight different signs.
    "●": "@", "▲": "^", "■": "#", "◆": "%", "○": "O", "△": "A", "□": "D", "◇": "&",
    "▾": "v", "▼": "v", "▸": ">", "◂": "<", "▴": "^", "→": ">", "←": "<", "↑": "^", "↓": "v", "⏎": "<", "↵": "<",
    # Words and numbers.
    "…": "~", "·": "-", "–": "-", "—": "-", "−": "-", "×": "x", "±": "~", "≈": "~", "≥": ">", "≤": "<", "°": " ",
    "²": "2", "³": "3", "√": "v", "µ": "u", "μ": "u", "γ": "g", "Σ": "S", "‘": "'", "’": "'", "“": '"', "”": '"',
    "₂": "2", "€": "E", "🔎": "/ ", "\N{COMBINING CIRCUMFLEX ACCENT}": "",
}  # fmt: skip


def is_plain(look: Look, term: str, *, has_blocks: bool = True) -> bool:
    """Return whether to draw only in ASCII: as the setting says or, for "auto", if the terminal requires it."""
    return look == "plain" if look != "auto" else not has_blocks or bool(_PLAIN_TERMS.match(term))


class Plain(LineFilter):
    """Draws everything in ASCII; with `letters`, keeps non-ASCII letters, as found in names."""

    def __init__(self, *, letters: bool = True) -> None:
        super().__init__()
        self._translate = functools.lru_cache(maxsize=4096)(functools.partial(to_ascii, letters=letters))

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(segment.control or segment.text.isascii() for segment in segments):
            return segments
        return [
            segment
            if segment.control or segment.text.isascii()
            else Segment(
                " " * segment.cell_length if _of_scrollbar(segment) else self._translate(segment.text), segment.style
            )
            for segment in segments
        ]


def _of_scrollbar(segment: Segment) -> bool:
    """Return True for the end of a scrollbar, where block characters do not represent history values."""
    return bool(segment.style and "@mouse.down" in segment.style.meta)


def to_ascii(text: str, *, letters: bool = True) -> str:
    """Return the text in ASCII with the same width; with `letters`, keep letters of other alphabets."""
    return "".join(char if char.isascii() else _sign(char, letters) for char in text)


def _sign(char: str, letters: bool) -> str:
    known = _SIGNS.get(char)
    if known is not None:
        return known
    if "\N{BRAILLE PATTERN BLANK}" <= char <= "\N{BRAILLE PATTERN DOTS-12345678}":
        return " " if char == "\N{BRAILLE PATTERN BLANK}" else "*"
    if "\N{BOX DRAWINGS LIGHT HORIZONTAL}" <= char <= "\N{BOX DRAWINGS LIGHT UP AND HEAVY DOWN}":
        return "+"
    return char if letters and char.isalnum() else "?" * cell_len(char)


_COLOURLESS_TERMS = re.compile(r"dumb|vt(?!e)", re.IGNORECASE)
# On a scale from 0 to 1, a background stands out if it differs from the app's background by more than `_STANDS_OUT`,
# and text is faint if its brightness differs from that of its background by less than `_FAINT`.
_STANDS_OUT, _FAINT = 0.2, 0.35


def is_colourless(environ: Mapping[str, str]) -> bool:
    """Return whether to send no colours because NO_COLOR is set or the terminal supports none."""
    return "NO_COLOR" in environ or bool(_COLOURLESS_TERMS.match(environ.get("TERM", "")))


class Colourless(LineFilter):
    """Removes colours. Text on a background that stands out is reversed, and faint text is dim."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.control or segment.style is None
            else Segment(segment.text, _without_colours(segment.style, background))
            for segment in segments
        ]


def _seen(color: rich.color.Color | None) -> Color | None:
    """Return a colour as terminals show it, or None for the terminal's own colour.

    Textual would turn each of a terminal's 16 colours into black.
    """
    return None if color is None or color.is_default else Color(*color.get_truecolor())


@functools.lru_cache(maxsize=1024)
def _without_colours(style: Style, base: Color) -> Style:
    behind, front = _seen(style.bgcolor) or base, _seen(style.color)
    apart = max(abs(one - other) / 255 for one, other in zip(behind.rgb, base.rgb, strict=True))
    is_faint = front is not None and abs(front.brightness - behind.brightness) < _FAINT
    is_marked = apart > _STANDS_OUT
    return style.without_color + Style(reverse=is_marked or None, dim=(is_faint and not is_marked) or None)
