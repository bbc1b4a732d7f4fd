"""Colour distances for normal and colour-blind vision, in true colour and in 256 colours."""

from __future__ import annotations

import math

from rich.color import Color, ColorSystem
from rich.style import Style

Rgb = tuple[float, float, float]  # linear light, 0 to 1
# Colour matrices in linear light for eyes without one type of cone, from Machado, Oliveira and Fernandes, "A
# physiologically-based model for simulation of color vision deficiency", IEEE Trans. on Visualization and Computer
# Graphics 15 (2009), table 1.
BLIND = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
# sRGB to CIE XYZ under D65; each row is divided by the white point's value (IEC 61966-2-1).
_XYZ = ((0.4124 / 0.9505, 0.3576 / 0.9505, 0.1805 / 0.9505), (0.2126, 0.7152, 0.0722),
        (0.0193 / 1.089, 0.1192 / 1.089, 0.9505 / 1.089))  # fmt: skip


def linear(color: Color, of_256: bool = False) -> Rgb:
    """Return a colour in linear light; with `of_256`, the colour a 256-colour terminal would show."""
    shown = color.downgrade(ColorSystem.EIGHT_BIT) if of_256 else color
    red, green, blue = (share / 255 for share in shown.get_truecolor())
    return _unbend(red), _unbend(green), _unbend(blue)


def _unbend(share: float) -> float:
    return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)


def contrast(style: Style, of_256: bool = False) -> float:
    """Return the contrast ratio of text and its background, from 1 to 21, as defined by WCAG 2."""
    assert style.color
    assert style.bgcolor
    lights = sorted(_times(_XYZ, linear(color, of_256))[1] for color in (style.color, style.bgcolor))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def seen_by(color: Color, eye: str, of_256: bool = False) -> Rgb:
    """Return a colour in linear light as seen by one of the eye types in `BLIND`."""
    red, green, blue = (max(0.0, min(1.0, share)) for share in _times(BLIND[eye], linear(color, of_256)))
    return red, green, blue


def difference(one: Rgb, other: Rgb) -> float:
    """Return the distance between two colours in CIE L*a*b* (1976); 2 is barely visible for adjacent colours."""
    return math.dist(_lab(one), _lab(other))


def _lab(color: Rgb) -> Rgb:
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in _times(_XYZ, color))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _times(matrix: tuple[Rgb, Rgb, Rgb], vector: Rgb) -> Rgb:
    first, second, third = (sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return first, second, third
