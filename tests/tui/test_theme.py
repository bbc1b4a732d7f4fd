"""Tests that themes are readable, including by colour-blind users, in terminals with 16 or more colours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from rich.color import Color, ColorSystem
from rich.style import Style
from support.colours import BLIND, contrast, difference, linear, seen_by
from textual.color import Color as Paint
from textual.theme import Theme

from sae_tui.app import SaeApp
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.latents import LatentDetail
from sae_tui.settings import load_settings
from sae_tui.theme import COLOUR_BLIND, COLOUR_BLIND_16, DARK, HIGH_CONTRAST, LIGHT, SHADES, THEMES, shown_theme
from sae_tui.widgets.chart import Chart

MakeApp = Callable[..., SaeApp]
TEXT = ("text", "dim", "label", "good", "warn", "bad", "low", "middle", "high", "accent", "title")
GRAPHS = ("spark", "bar", "memory", "heat")
SHADED = ("faint", "weak", "strong", "full")
# The minimum text contrast, with 24-bit colours and with 256 colours. With 256 colours, the line under the cursor is
# bright teal instead of blue, so dim text on that line has a contrast of less than 4.5 in the dark theme.
LEAST = {"dark": (4.5, 3.4), "light": (4.5, 4.4), "high-contrast": (7.0, 7.0), "colour-blind": (4.5, 4.5)}


@pytest.mark.parametrize("theme", [DARK, LIGHT, HIGH_CONTRAST, COLOUR_BLIND], ids=lambda theme: theme.name)
def test_page_surface_and_panel_differ_even_in_256_colours(theme: Theme) -> None:
    surfaces = [Paint.parse(text or "") for text in (theme.background, theme.surface, theme.panel)]
    # The background of a focused field is tinted.
    tinted = [surfaces[1].tint(Paint.parse(theme.foreground or "").with_alpha(0.05))]
    numbers = [Color.parse(one.hex).downgrade(ColorSystem.EIGHT_BIT).number for one in (*surfaces, *tinted)]
    assert len({*numbers[:3]}) == 3
    assert numbers[3] != numbers[0]


def test_a_terminal_with_16_colours_gets_a_16_colour_theme_for_any_chosen_theme() -> None:
    assert shown_theme("dark", "standard") == shown_theme("light", "standard") == "ansi-dark"
    assert shown_theme("colour-blind", "standard") == "sae-colour-blind-16"
    assert shown_theme("dark", "256") == "sae-dark"
    assert shown_theme("light", "truecolor") == "sae-light"


async def test_text_has_enough_contrast_with_its_background_in_every_theme(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        for theme, least in LEAST.items():
            app.redraw.choose_theme(theme)  # type: ignore[arg-type]
            await pilot.pause()
            for of_256, enough in zip((False, True), least, strict=True):
                use_colours(app, ColorSystem.EIGHT_BIT if of_256 else ColorSystem.TRUECOLOR)
                low = {name: found for name, style in written(app) if (found := contrast(style, of_256)) < enough}
                assert low == {}, (theme, of_256)
                graphs = [
                    contrast(styled(app, f"{name}{cursor}"), of_256) for name in GRAPHS for cursor in ("", " cursor")
                ]
                assert (min(graphs[::2]) >= 3, min(graphs) >= 2) == (True, True), (theme, of_256)


def use_colours(app: SaeApp, system: ColorSystem) -> None:
    """Draw as in a terminal with this colour system."""
    app.console._color_system = system
    app.screen.query_one(GpuPanel)._styles.clear()


@pytest.mark.parametrize("system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])
async def test_every_ramp_gets_further_from_the_background_at_each_step(make_app: MakeApp, system: ColorSystem) -> None:
    app = make_app()
    of_256 = system is ColorSystem.EIGHT_BIT
    async with app.run_test(size=(80, 24)) as pilot:
        for theme in THEMES:
            use_colours(app, system)
            app.redraw.choose_theme(theme)
            await pilot.pause()
            use_colours(app, system)
            for name in GRAPHS:
                lights = [brightness(styled(app, each).color, of_256) for each in ramp_of(name)]
                assert lights == sorted(lights, reverse=theme == "light"), (theme, name)
                assert app.native_ansi_color or len({*lights}) >= 3, (theme, name)
            for names in (("load0", "load1", "load2", "load3", "load4"), SHADED):
                lights = [brightness(styled(app, each).bgcolor, of_256) for each in names]
                drawn = [one for one in lights if one is not None]
                falls = theme == "light" and not app.native_ansi_color
                assert drawn == sorted(drawn, reverse=falls), (theme, names, lights)
                assert app.native_ansi_color or len({*lights}) == len(lights), (theme, names, lights)


def ramp_of(name: str) -> list[str]:
    return [*(f"{name}-{shade}" for shade in SHADES), name]


def brightness(color: Color | None, of_256: bool) -> float | None:
    """Return a colour's contrast with black, or None for the terminal's own foreground or background."""
    if color is None or color.is_default:
        return None
    return contrast(Style(color=color, bgcolor="#000000"), of_256)


async def test_tokens_have_a_different_style_at_each_step_in_the_terminals_own_16_colours(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        app.redraw.choose_theme("terminal")
        await pilot.pause()
        styles = [styled(app, name) for name in SHADED]
        assert len({*styles}) == len(SHADED)
        for style in styles:
            # A text colour is set wherever a background is set, since the terminal's own text colour may be light or
            # dark.
            assert (style.color is None or style.color.is_default) == (
                style.bgcolor is None or style.bgcolor.is_default
            )
            if style.bgcolor and not style.bgcolor.is_default:
                assert contrast(style) >= 4.5


def written(app: SaeApp) -> Iterator[tuple[str, Style]]:
    """Yield each combination of text style and background: the page, the line under the cursor, fields, header and
    footer.
    """
    for name in TEXT:
        style = styled(app, name)
        yield name, style
        yield f"{name} cursor", styled(app, f"{name} cursor")
        for surface in ("surface", "panel"):
            yield f"{name} on {surface}", style + Style(bgcolor=app.theme_variables[surface].lower())
    for name in SHADED:
        yield name, styled(app, name)
    for name, shade in itertools.product(("title", "text", "good", "warn"), range(5)):
        yield f"{name} load{shade}", styled(app, f"{name} load{shade}")


def styled(app: SaeApp, names: str) -> Style:
    panel = app.screen.query_one(GpuPanel)
    panel.palette = GpuPanel.palette | LatentDetail.palette | Chart.palette  # type: ignore[misc]
    return panel._style(names)


@pytest.mark.parametrize("eye", BLIND)
@pytest.mark.parametrize(
    ("theme", "of_256"),
    [(COLOUR_BLIND, False), (COLOUR_BLIND, True), (COLOUR_BLIND_16, False)],
    ids=["24", "256", "16"],
)
async def test_good_bad_and_warning_differ_for_each_kind_of_colour_blindness(
    make_app: MakeApp, eye: str, theme: Theme, of_256: bool
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        app.theme = theme.name
        await pilot.pause()
        colours = {name: styled(app, name).color for name in ("good", "bad", "warn", *GRAPHS)}
    seen = {name: seen_by(color, eye, of_256) for name, color in colours.items() if color}
    for names, least in ((("good", "bad", "warn"), 20), (GRAPHS, 15)):
        for one, other in itertools.combinations(names, 2):
            assert difference(seen[one], seen[other]) >= least, (one, other)


def test_the_measures_of_contrast_and_colour_difference_match_known_values() -> None:
    black, white, red, green = (Color.parse(text) for text in ("#000000", "#ffffff", "#d04040", "#8a7a30"))
    assert contrast(Style(color="#ffffff", bgcolor="#000000")) == pytest.approx(21, abs=0.05)
    assert difference(linear(black), linear(white)) == pytest.approx(100, abs=0.1)
    assert difference(linear(red), linear(green)) > 2 * difference(
        *(seen_by(one, "deuteranopia") for one in (red, green))
    )


async def test_a_theme_chosen_in_the_palette_is_saved_and_titles_follow_it(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        for name in THEMES:
            (act,) = [each.callback for each in app.get_system_commands(app.screen) if each.title == f"Theme: {name}"]
            act()
            await pilot.pause()
            assert app.session.settings.theme == name
            assert load_settings(app.session.data.settings_file)[0].theme == name
            assert app.theme == THEMES[name][0]
