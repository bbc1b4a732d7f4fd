"""Frames around panels: how much of a frame fits, and its title."""

from __future__ import annotations

import asyncio
import gc
from contextvars import Context
from typing import Literal

from textual._styles_cache import StylesCache
from textual.content import Content
from textual.events import ScreenResume
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Label

Frame = Literal["framed", "ruled", "bare"]

FRAMES: dict[Frame, int] = {"framed": 2, "ruled": 1, "bare": 0}  # rows taken by each kind of frame
# A smaller window shows only the top line of each frame, with the title. Below `RULED_FROM_ROWS`, there are no frames.
FRAMED_FROM_COLUMNS, FRAMED_FROM_ROWS, RULED_FROM_ROWS = 100, 30, 18

# The delay between closing a screen and freeing its memory.
_FREED_AFTER_S = 2.0


def frame_of(width: int, height: int) -> Frame:
    """Return how much of a frame fits: all of it, only its top line with the title, or nothing."""
    if width >= FRAMED_FROM_COLUMNS and height >= FRAMED_FROM_ROWS:
        return "framed"
    return "ruled" if height >= RULED_FROM_ROWS else "bare"


class HeadingLine(Label):
    """Shows the title of a screen's main panel if there is no frame for it."""

    DEFAULT_CSS = """
    HeadingLine { display: none; width: 100%; height: 1; background: $panel; text-style: bold; }
    HeadingLine { text-wrap: nowrap; text-overflow: ellipsis; }
    """


class FramedScreen(Screen[None]):
    """A screen with panels (widgets of class `panel`) showing as much of their frames as the window size allows."""

    # How many times the app's style sheet had changed when this screen was last shown, or -1 if it has not been shown
    # yet.
    _styled_with = -1

    def on_compose(self) -> None:
        # Set the classes before there are widgets, because setting them later would make Textual recompute all styles.
        self._fit_frames(self.app.size)

    def on_resize(self) -> None:
        self._fit_frames(self.size)

    def _on_screen_resume(self, event: ScreenResume) -> None:
        """Keep the styles that Textual set on mounting, because setting them again takes half of the opening time.

        They change only if another theme was chosen while this screen was closed.
        """
        now = self.app._css_update_count
        event.refresh_styles, self._styled_with = self._styled_with not in (-1, now), now

    def on_unmount(self) -> None:
        """Free this screen soon, because its objects refer to each other, and five closed forms would take up 15 MB.

        Freeing it takes 30 ms, so wait until the next screen has been drawn and its first keys have probably been
        handled.
        """
        # The timer has its own context, because Textual's context refers to this screen.
        asyncio.get_running_loop().call_later(_FREED_AFTER_S, _free_closed, context=Context())

    def watch_focused(self, before: Widget | None, now: Widget | None) -> None:
        """Give the class `-focus-within` to the focused widget and its ancestors.

        A rule with `:focus-within` would make Textual restyle everything in the panel whenever the focus moves inside
        it, doubling the time to handle a key in a long form.
        """
        old, new = (set(one.ancestors_with_self if one else ()) - {self, self.app} for one in (before, now))
        for node in old ^ new:
            node.set_class(node in new, "-focus-within", update=False)
        self.app.stylesheet.update_nodes(old ^ new)

    def _fit_frames(self, size: Size) -> None:
        frame = frame_of(*size)
        for name in FRAMES:
            self.set_class(name == frame, f"-{name}")

    def entitle(self, panel: Widget, title: str, hint: str = "") -> None:
        """Write the title into the frame of the main panel and into the heading line."""
        entitle(panel, title, hint)
        for line in self.query(HeadingLine):
            line.update(_with_hint(Content(title), hint, self.size.width))


def _free_closed() -> None:
    """Free closed screens with the lines they rendered.

    Textual 8.2 caches background colours under keys that contain a widget's rendered lines. This cache would keep the
    lines of the last 1,024 widgets, 6 MiB each time all screens are opened.
    """
    StylesCache.get_inner_outer.cache_clear()
    gc.collect()


def entitle(panel: Widget, title: Content | str, hint: str = "") -> None:
    """Write a title at the top of the panel's frame and a hint at its bottom, or both at the top if it has none."""
    title = title if isinstance(title, Content) else Content(title)
    framed = frame_of(*panel.screen.size) == "framed"
    over = title if framed else _with_hint(title, hint, panel.outer_size.width)
    under = Content(hint) if framed and hint else None
    old = panel._border_title
    if old is None or (old.plain, old.spans) != (over.plain, over.spans):
        panel.border_title = over
    if under != panel._border_subtitle:
        panel.border_subtitle = under


def _with_hint(title: Content, hint: str, width: int) -> Content:
    """Return the title followed by a hint, with a space at both ends; a long title is truncated to fit the hint."""
    space = width - len(hint) - 6  # 6 cells: two before the hint, and a space and a frame cell at each end
    if hint and 0 < space < title.cell_length:
        title = title.truncate(space, ellipsis=True)
    # Textual leaves a cell free next to a title only if the frame has corners.
    return Content.assemble(" ", title, "  " if hint else "", (hint, "not bold $text-muted"), " ")
