"""The colours: two themes of our own and the terminal's.

Page, surface and panel are apart in 256 colours too, which is what ssh leaves of a terminal: a grey is taken as a grey
there only while its saturation is below 0.15, and any more blue would make all three of them black.
"""

from __future__ import annotations

from typing import Literal

from textual.theme import Theme

DARK = Theme(
    name="sae-dark",
    primary="#5fafff",
    secondary="#af87ff",
    accent="#5fd7d7",
    foreground="#d0d4dc",
    background="#14161a",
    surface="#22252a",
    panel="#2c3036",
    success="#5fd787",
    warning="#ffaf5f",
    error="#ff6b6b",
    dark=True,
)
LIGHT = Theme(
    name="sae-light",
    primary="#1f6feb",
    secondary="#8250df",
    accent="#0a7f83",
    foreground="#1f2328",
    background="#fbfbf8",
    surface="#f2f2ee",
    panel="#e6e6e0",
    success="#1a7f37",
    warning="#9a6700",
    error="#cf222e",
    dark=False,
)
ThemeName = Literal["dark", "light", "terminal"]
THEMES: dict[ThemeName, str] = {"dark": DARK.name, "light": LIGHT.name, "terminal": "ansi-dark"}


def shown_theme(chosen: ThemeName, color_system: str | None) -> str:
    """Return the theme's name for a setting; with only 16 colours, which lack our surfaces, the terminal's own."""
    return THEMES["terminal" if color_system == "standard" else chosen]
