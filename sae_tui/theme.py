"""The colour themes: four from this project, and one using the terminal's own colours.

The greys of page, surface and panel remain distinct in a 256-colour terminal, which is common over ssh. A terminal with
256 colours shows a colour as grey only if its saturation is below 0.15; with more blue, it would show all three as
black.

Colours have the same meaning in all themes: primary is utilisation, loss and FVU; secondary is memory; success is power
and progress; warning is heat. A variable `style-NAME` replaces the style NAME from `widgets/lines`, and `style256-NAME`
and `style16-NAME` replace it in terminals with 256 and 16 colours. There, the closest available match for a mixed
colour has a different hue, or the same brightness as its neighbour in a ramp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from textual.theme import BUILTIN_THEMES, Theme

# A history gets brighter towards the top; `SHADES` are the opacities of its colour, from the bottom row up.
SHADES = (45, 56, 67, 78, 89)


def _loads(*colours: str, n_colours: str = "") -> dict[str, str]:
    """Return the background styles of GPU tiles, from the lowest load to the highest."""
    return {f"style{n_colours}-load{number}": f"on {colour}" for number, colour in enumerate(colours, 1)}


def _ramps(n_colours: int, **ramps: tuple[str, str, str]) -> dict[str, str]:
    """Return the styles of histories, each as three of the terminal's colours from the bottom row up."""
    shades = {
        f"style{n_colours}-{name}-{shade}": ramp[place * len(ramp) // len(SHADES)]
        for name, ramp in ramps.items()
        for place, shade in enumerate(SHADES)
    }
    return shades | {f"style{n_colours}-{name}": ramp[-1] for name, ramp in ramps.items()}


def _activations(*styles: str) -> dict[str, str]:
    """Return token styles, from the weakest activation to the strongest, in colours of the 256-colour palette."""
    return {f"style-{name}": style for name, style in zip(("faint", "weak", "strong", "full"), styles, strict=True)}


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
    variables={
        "style-cursor": "on $primary 33%",
        **_activations(
            "underline on #303030",
            "underline on #5f5f00",
            "underline #14161a on #af8700",
            "bold underline #14161a on #ffd75f",
        ),
        **_loads(*(f"$primary {share}%" for share in (16, 24, 32, 40))),
        **_loads("#303030", "#005f5f", "#005f87", "#005faf", n_colours="256"),
        **_ramps(
            256,
            spark=("#005f87", "#5f87af", "#5fafff"),
            memory=("#5f5f87", "#875fd7", "#af87ff"),
            bar=("#00875f", "#5faf5f", "#5fd787"),
            heat=("#875f00", "#af875f", "#ffaf5f"),
        ),
    },
)
LIGHT = Theme(
    name="sae-light",
    primary="#1a62d2",
    secondary="#8250df",
    accent="#0a6f75",
    foreground="#1f2328",
    background="#fbfbf8",
    surface="#f2f2ee",
    panel="#e6e6e0",
    success="#1a7f37",
    warning="#8f5f00",
    error="#cf222e",
    dark=False,
    variables={
        "text-muted": "auto 68%",
        "style-cursor": "on $primary 25%",
        "button-color-foreground": "#ffffff",
        **_loads(*(f"$primary {share}%" for share in (7, 13, 19, 25))),
        **_loads("#e6e6e6", "#d7d7ff", "#afd7ff", "#005fd7", n_colours="256"),
        "style256-load4": "#ffffff on #005fd7",
        **_activations(
            "underline on #ffffaf", "underline on #ffd787", "underline on #ffaf5f", "bold underline on #d78700"
        ),
        **_ramps(
            256,
            spark=("#87afff", "#5f87d7", "#005fd7"),
            memory=("#d7afff", "#af87d7", "#875fd7"),
            bar=("#87d787", "#5faf5f", "#00875f"),
            heat=("#d7af87", "#af875f", "#875f00"),
        ),
    },
)
# All text has a contrast ratio of at least 7 against its background, even in the line under the cursor.
HIGH_CONTRAST = Theme(
    name="sae-high-contrast",
    primary="#5fd7ff",
    secondary="#ffafff",
    accent="#5fffff",
    foreground="#ffffff",
    background="#000000",
    surface="#1c1c1c",
    panel="#262626",
    success="#5fff87",
    warning="#ffd75f",
    error="#ffafaf",
    dark=True,
    variables={
        "text": "#ffffff",
        "text-muted": "#d0d0d0",
        "text-disabled": "#c6c6c6",
        "text-success": "#5fff87",
        "text-warning": "#ffd75f",
        "text-error": "#ffafaf",
        "text-accent": "#5fffff",
        "block-cursor-foreground": "#000000",
        "button-color-foreground": "#000000",
        "style-cursor": "on #0000af",
        "style-rail": "#878787",
        "style-load0": "on #121212",
        **_loads("#00005f", "#000087", "#0000af", "#0000d7"),
        **_activations(
            "underline on #262626", "underline on #3a3a3a", "underline on #4e4e4e", "bold underline #000000 on #ffd75f"
        ),
        **_ramps(
            256,
            spark=("#0087af", "#5fafd7", "#5fd7ff"),
            memory=("#875f87", "#d787d7", "#ffafff"),
            bar=("#00875f", "#5fd75f", "#5fff87"),
            heat=("#875f00", "#d7af5f", "#ffd75f"),
        ),
    },
)
# Based on the palette of Okabe and Ito (2008), with lighter colours for text. The colours for good and bad differ in
# brightness and in blue, which people with red-green colour blindness can see.
COLOUR_BLIND = Theme(
    name="sae-colour-blind",
    primary="#56b4e9",
    secondary="#b8689a",
    accent="#8fc7ff",
    foreground="#d0d4dc",
    background="#14161a",
    surface="#22252a",
    panel="#2c3036",
    success="#2fc9a5",
    warning="#f0e442",
    error="#e8702a",
    dark=True,
    variables={
        "text-muted": "#b4b8c0",
        "text-disabled": "#8f949c",
        "text-success": "#4fd7c4",
        "text-warning": "#f0e442",
        "text-error": "#ff875f",
        "text-accent": "#8fc7ff",
        "button-color-foreground": "#14161a",
        "style-cursor": "on #1c2b5a",
        "style-load0": "on #14161a",
        **_loads("#191f38", "#1b2656", "#1b2a72", "#1a2d90"),
        **_loads("#303030", "#3a3a3a", "#444444", "#4e4e4e", n_colours="256"),
        **_activations(
            "underline on #303030", "underline on #3a3a3a", "underline on #4e4e4e", "bold underline #14161a on #ffd75f"
        ),
        **_ramps(
            256,
            spark=("#005f87", "#0087af", "#5fafd7"),
            memory=("#87005f", "#875f87", "#af5f87"),
            bar=("#005f5f", "#00af87", "#00d7af"),
            heat=("#5f5f00", "#afaf00", "#ffd75f"),
        ),
    },
)
_OF_16 = BUILTIN_THEMES["ansi-dark"]
HIGH_CONTRAST_16 = replace(
    _OF_16,
    name="sae-high-contrast-16",
    primary="ansi_bright_cyan",
    secondary="ansi_bright_magenta",
    accent="ansi_bright_cyan",
    success="ansi_bright_green",
    warning="ansi_bright_yellow",
    error="ansi_bright_red",
    foreground="ansi_bright_white",
    background="ansi_black",
    variables={
        **_OF_16.variables,
        "text-muted": "ansi_white",
        **_ramps(
            16,
            spark=("ansi_cyan", "ansi_cyan", "ansi_bright_cyan"),
            memory=("ansi_magenta", "ansi_magenta", "ansi_bright_magenta"),
            bar=("ansi_green", "ansi_green", "ansi_bright_green"),
            heat=("ansi_yellow", "ansi_yellow", "ansi_bright_yellow"),
        ),
    },
)
COLOUR_BLIND_16 = replace(
    _OF_16,
    name="sae-colour-blind-16",
    primary="ansi_bright_blue",
    secondary="ansi_magenta",
    accent="ansi_bright_cyan",
    success="ansi_bright_cyan",
    warning="ansi_bright_yellow",
    error="ansi_bright_red",
    variables={
        **_OF_16.variables,
        **_ramps(
            16,
            spark=("ansi_blue", "ansi_blue", "ansi_bright_blue"),
            memory=("ansi_magenta", "ansi_magenta", "ansi_magenta"),
            bar=("ansi_cyan", "ansi_cyan", "ansi_bright_cyan"),
            heat=("ansi_yellow", "ansi_yellow", "ansi_bright_yellow"),
        ),
    },
)
ThemeName = Literal["dark", "light", "high-contrast", "colour-blind", "terminal"]
_TERMINAL = _OF_16.name
# Maps each value of the setting `theme` to its theme and a variant for 16-colour terminals. Terminals with 16 colours
# cannot show the surface colours.
THEMES: dict[ThemeName, tuple[str, str]] = {
    "dark": (DARK.name, _TERMINAL),
    "light": (LIGHT.name, _TERMINAL),
    "high-contrast": (HIGH_CONTRAST.name, HIGH_CONTRAST_16.name),
    "colour-blind": (COLOUR_BLIND.name, COLOUR_BLIND_16.name),
    "terminal": (_TERMINAL, _TERMINAL),
}
OWN_THEMES = (DARK, LIGHT, HIGH_CONTRAST, COLOUR_BLIND, HIGH_CONTRAST_16, COLOUR_BLIND_16)


def shown_theme(chosen: ThemeName, color_system: str | None) -> str:
    """Return the name of the theme implementing the setting's value in a terminal with the given colour system."""
    return THEMES[chosen][color_system == "standard"]
