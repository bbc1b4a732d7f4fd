"""Composes screenshots of the app into one SVG with a CSS animation, without scripts or external fonts.

Rows that are identical in several pictures are stored once, and are visible whenever one of these pictures is shown. A
viewer without animation shows one of the pictures.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

_SVG = "{http://www.w3.org/2000/svg}"
# The geometry of Textual's screenshots: the size of a cell in pixels, and the window around the cells.
_CELL, _LINE, _LEFT, _TOP = 12.2, 24.4, 10, 42
_BLOCKS = "▁▂▃▄▅▆▇█"
_FONTS = "Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
_PAGE, _FRAME, _QUIET, _BRIGHT = "#14161a", "#22252a", "#43454a", "#d0d4dc"
_RULE = re.compile(r"\.[\w-]+-(r\d+) \{ ([^}]*) \}")


@dataclass(frozen=True)
class Picture:
    """A screenshot as SVG, its duration in seconds, and its caption."""

    svg: str
    seconds: float
    caption: str


class Styles:
    """Short class names for the styles of all pictures."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: str) -> str:
        return self._names.setdefault(style, f"c{len(self._names)}")

    def rules(self) -> str:
        return "".join(f".{name}{{{style}}}" for style, name in self._names.items())


def compose(pictures: Sequence[Picture], *, still: int, moves: bool = True) -> str:
    """Return the animated SVG; `still` is the index of the picture shown without animation."""
    styles = Styles()
    columns, rows = _size(pictures[0].svg)
    width, height = columns * _CELL + 2 * _LEFT, rows * _LINE + _TOP + _LEFT
    # Maps each SVG element to the indices of the pictures that contain it.
    seen: dict[str, set[int]] = {}
    for number, picture in enumerate(pictures):
        for part in [*_lines(picture.svg, styles), _caption(picture.caption, width, styles)]:
            seen.setdefault(part, set()).add(number)
    layers: dict[frozenset[int], list[str]] = {}
    for part, in_these in seen.items():
        layers.setdefault(frozenset(in_these), []).append(part)
    bounds = _bounds(pictures)
    drawn, rules = [], []
    for place, (numbers, parts) in enumerate(layers.items()):
        shown = "visible" if still in numbers else "hidden"
        kind = ""
        if len(numbers) < len(pictures):
            kind = f' class="k{place}" visibility="{shown}"'
            rules.append(_animation(f"k{place}", numbers, bounds) if moves else "")
        drawn.append(f"<g{kind}>{''.join(parts)}</g>")
    style = styles.rules() + "".join(rules) + (_progress(bounds[-1]) if moves else "")
    return _document(width, height, style, "".join(drawn))


def _size(svg: str) -> tuple[int, int]:
    """Return the number of columns and rows in a screenshot."""
    _, _, width, height = (float(word) for word in re.findall(r'viewBox="([^"]+)"', svg)[0].split())
    return round((width - 19) / _CELL), round((height - 50) / _LINE)


def _lines(svg: str, styles: Styles) -> list[str]:
    """Return the SVG elements in each screenshot row: rectangles, then texts."""
    rules = dict(_RULE.findall(svg))
    by_row: dict[int, list[str]] = {}
    cells = [group for group in ET.fromstring(svg).iter(f"{_SVG}g") if (group.get("class") or "").endswith("matrix")]
    (texts,) = cells
    surfaces = next(group for group in ET.fromstring(svg).iter(f"{_SVG}g") if group.find(f"{_SVG}rect") is not None)
    for rect in surfaces.findall(f"{_SVG}rect"):
        if rect.get("fill") != _PAGE:
            by_row.setdefault(_row(rect), []).append(_surface(rect, styles))
    for text in texts.findall(f"{_SVG}text"):
        if (text.text or "").strip("\xa0 \n"):
            by_row.setdefault(_row(text), []).append(_text(text, rules, styles))
    return [f'<g transform="translate({_LEFT},{_short(_TOP + row * _LINE)})">{"".join(parts)}</g>'
            for row, parts in sorted(by_row.items())]  # fmt: skip


def _row(element: ET.Element) -> int:
    return int(float(element.get("y", "0")) / _LINE)


def _surface(rect: ET.Element, styles: Styles) -> str:
    kind = styles.name(f"fill:{rect.get('fill')}")
    width = float(rect.get("width", "0")) + 0.3  # no seam between adjacent rectangles
    return f'<rect class="{kind}" x="{_short(rect.get("x"))}" width="{_short(width)}" height="24.7"/>'


def _text(text: ET.Element, rules: dict[str, str], styles: Styles) -> str:
    rule = rules[(text.get("class") or "").rpartition("-")[2]]
    kind = styles.name(re.sub(r"\s*([:;])\s*", r"\1", rule).strip("; "))
    words = (text.text or "").replace("\xa0", " ")
    if set(words) <= {" ", *_BLOCKS}:
        return "".join(_bars(float(text.get("x", "0")), words, kind))
    length = f' textLength="{_short(text.get("textLength"))}"' if len(words) > 1 else ""
    return f'<text class="{kind}" x="{_short(text.get("x"))}" y="18.5"{length}>{escape(words)}</text>'


def _bars(x: float, words: str, kind: str) -> Iterator[str]:
    """Return block characters as rectangles, because a font leaves seams between them."""
    for block, run in groupby(enumerate(words), lambda one: one[1]):
        places = [place for place, _ in run]
        if block != " ":
            height = _LINE * (_BLOCKS.index(block) + 1) / len(_BLOCKS)
            yield (
                f'<rect class="{kind}" x="{_short(x + places[0] * _CELL)}" y="{_short(_LINE - height)}"'
                f' width="{_short(len(places) * _CELL + 0.3)}" height="{_short(height + 0.3)}"/>'
            )


def _short(number: str | float | None) -> str:
    return f"{float(number or 0):.1f}".removesuffix(".0")


def _caption(words: str, width: float, styles: Styles) -> str:
    kind = styles.name(f"fill:{_BRIGHT};font-weight:bold;text-anchor:middle")
    return f'<text class="{kind}" x="{_short(width / 2)}" y="27">{escape(words)}</text>'


def _bounds(pictures: Sequence[Picture]) -> list[float]:
    """Return the start of each picture in seconds, and the end of the last one."""
    bounds = [0.0]
    for picture in pictures:
        bounds.append(bounds[-1] + picture.seconds)
    return bounds


def _animation(name: str, numbers: frozenset[int], bounds: Sequence[float]) -> str:
    """Return a CSS rule that shows a layer during its pictures."""
    changes = [(0, 0 in numbers)]
    for here, group in groupby(range(len(bounds) - 1), lambda number: number in numbers):
        changes.append((next(group), here))
    steps = "".join(
        f"{_percent(bounds[number] / bounds[-1])}{{visibility:{'visible' if here else 'hidden'}}}"
        for number, here in dict(changes).items()
    )
    return f"@keyframes {name}{{{steps}}}.{name}{{animation:{name} {_short(bounds[-1])}s step-end infinite}}"


def _percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def _progress(seconds: float) -> str:
    grow = "@keyframes p{from{transform:scaleX(0)}to{transform:scaleX(1)}}"
    still = "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"
    return f"{grow}.p{{animation:p {_short(seconds)}s linear infinite}}{still}"


def _document(width: float, height: float, style: str, drawn: str) -> str:
    w, h = _short(width), _short(height)
    buttons = "".join(f'<circle cx="{22 + 20 * place}" cy="21" r="6" fill="{_QUIET}"/>' for place in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" xml:space="preserve" font-size="20"'
        f' font-family="{_FONTS}"><style>text{{white-space:pre}}rect{{shape-rendering:crispEdges}}{style}</style>'
        f'<rect width="{w}" height="{h}" rx="8" fill="{_FRAME}"/>{buttons}'
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_short(width - 2 * _LEFT)}" height="{_short(height - _TOP - _LEFT)}"'
        f' fill="{_PAGE}"/>{drawn}'
        f'<rect class="p" x="{_LEFT}" y="{_short(height - 6)}" width="{_short(width - 2 * _LEFT)}" height="2"'
        f' fill="#5fafff" transform="scale(0,1)"/></svg>\n'
    )
