"""The colours: two themes of our own and the terminal's."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="sae-dark",
    primary="#5fafff",
    secondary="#af87ff",
    accent="#5fd7d7",
    foreground="#d0d4dc",
    background="#101318",
    surface="#171b22",
    panel="#1f252e",
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
THEMES = {"dark": DARK.name, "light": LIGHT.name, "terminal": "ansi-dark"}
