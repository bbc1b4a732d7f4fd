"""A list of an SAE's latents that reads only visible rows, and the page for one latent with its examples."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from textual import events
from textual.message import Message
from textual.reactive import reactive

from sae_tui.format import fit, visible
from sae_tui.jobs.features import (
    STAR,
    effect_words,
    family_words,
    in_row,
    label,
    label_lines,
    part_lines,
    readable,
    stability_words,
    where_else,
)
from sae_tui.widgets.lines import PALETTE, LazyLines, Line, LineView, Span
from sae_tui.widgets.table import MOVES
from trainer.contract.runs.crosscoder import letter
from trainer.contract.runs.features import ActivatingExample, Feature, Features
from trainer.contract.wording import bars

# The minimum width at which the list has a column for the largest activation.
_WIDE = 44
# The upper limit of each shade, as a share of the latent's largest activation.
SHADES = ((0.25, "faint"), (0.5, "weak"), (0.75, "strong"), (1.0, "full"))
SHADE_STYLES = {
    "faint": "underline on $warning 12%",
    "weak": "underline on $warning 22%",
    "strong": "underline on $warning 32%",
    "full": "bold underline on $warning 40%",
}
# The horizontal position of the strongest tokens, as a share of the width to the right of the activations.
_MIDDLE = 0.6
_ACT_CELLS = 9


class LatentList(LineView, can_focus=True):
    """Shows one latent per line; posts `Moved` when the cursor moves to another latent."""

    BINDINGS = [*MOVES]
    fixed_lines = 1

    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor has moved to another latent, or to None if the list is empty."""

        def __init__(self, latent: int | None) -> None:
            super().__init__()
            self.latent = latent

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._features: Features | None = None
        self.latents: Sequence[int] = ()
        # Latents from this index on have examples containing the search words, but do not fire on these words.
        self._n_firing = 0
        self._has_effects = False

    def show_latents(
        self,
        features: Features,
        firing: Sequence[int],
        others: Sequence[int] = (),
        latent: int | None = None,
        *,
        has_effects: bool = False,
    ) -> None:
        """Replace the list; put the cursor on `latent`, or on the first latent if it is not listed.

        With `has_effects`, a column shows the latents' effects instead of their densities.

        A separator is drawn between the latents firing on the search words and the `others`.
        """
        latents = [*firing, *others]
        self._features, self.latents, self._n_firing = features, latents, len(firing)
        self._has_effects = has_effects
        place = latents.index(latent) if latent in latents else 0
        self.set_reactive(LatentList.cursor, place)
        self._draw()
        self._show_cursor()
        self.post_message(self.Moved(self.latent))

    @property
    def n_firing(self) -> int:
        """The number of listed latents above the separator."""
        return self._n_firing

    def show_notes(self) -> None:
        """Draw the list again after a note was changed; the latents keep their places."""
        # `show` would find no difference, because the earlier lines are read lazily too.
        self.refresh()

    @property
    def latent(self) -> int | None:
        return self.latents[self.cursor] if self.cursor < len(self.latents) else None

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(len(self.latents) - 1, self.cursor + by))

    def watch_cursor(self) -> None:
        self._draw()
        self._show_cursor()
        self.post_message(self.Moved(self.latent))

    def _show_cursor(self) -> None:
        visible_rows, top, here = max(1, self.size.height - 1), round(self.scroll_y), self._line_of(self.cursor)
        if not top <= here < top + visible_rows:
            self.scroll_to(y=here - (visible_rows - 1) * (here > top), animate=False, force=True)

    @property
    def _border(self) -> int | None:
        """The separator line below the latents firing on the search words, or None if there are no others."""
        return self._n_firing if self._n_firing < len(self.latents) else None

    def _line_of(self, place: int) -> int:
        return place + (self._border is not None and place >= self._n_firing)

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        row = -1 if at is None else at.y - 1 + round(self.scroll_y)
        place = row - (self._border is not None and row > self._n_firing)
        if 0 <= place < len(self.latents) and row != self._border:
            self.cursor = place

    def on_resize(self) -> None:
        self._draw()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def _draw(self) -> None:
        features, latents, width = self._features, self.latents, self.size.width
        if not width or features is None:
            return
        border = self._border
        apart = f"── only {where_else(features)}: {len(latents) - self._n_firing:,} "
        often = "EFFECT" if self._has_effects else "DENSITY"
        here, mark = self._line_of(self.cursor), "cursor" if self.has_focus else "here"

        def line(index: int) -> Line:
            if not index:
                parts = tuple(map(letter, range(len(features.part_names))))
                return ((_row(("LATENT", often, "LARGEST", "FIRES ON"), width, parts), "label"),)
            if index - 1 == border:
                return ((fit(apart.ljust(width, "─"), width), "label"),)
            place = index - 1 - (border is not None and index - 1 > border)
            style = f"text {mark}" if index - 1 == here else "text"
            feature = features.feature(latents[place])
            cells, shares = (
                _cells(feature, has_effects=self._has_effects),
                [f"{one.share:.2f}" for one in feature.parts],
            )
            return ((_row(cells, width, shares), style),)

        self.show(LazyLines(1 + len(latents) + (border is not None), line))


def _cells(feature: Feature, *, has_effects: bool) -> tuple[str, str, str, str]:
    number = f"{STAR if feature.starred else ' '}{feature.latent:>6}"
    often = f"{feature.effect or 0.0:+.1e}" if has_effects else f"{feature.density:.3%}"
    return number, often, f"{feature.largest:.2f}", label(feature)


def _row(cells: tuple[str, str, str, str], width: int, parts: Sequence[str] = ()) -> str:
    """Return a line of the list; `parts` has a value for each part of a crosscoder, instead of less useful columns."""
    latent, density, largest, tokens = cells
    shares = "".join(f" {one:>4}" for one in parts)
    often = f" {density:>8}" if not parts or width >= _WIDE else ""
    strongest = f" {largest:>8}" if width >= _WIDE + len(shares) else ""
    return fit(f"{latent:>7}{often}{strongest}{shares}  {tokens}", width)


class LatentDetail(LineView, can_focus=True):
    """How often and how strongly a latent fires, the most similar latents, and its max-activating examples."""

    palette = PALETTE | SHADE_STYLES

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._title = ""
        self._make: Callable[[int], list[Line]] = lambda _: []

    def show_feature(self, feature: Feature, features: Features) -> None:
        star = f" {STAR}" * feature.starred
        self.show_made(f"Latent {feature.latent}{star}", lambda width: feature_lines(feature, features, width))
        self.scroll_home(animate=False)

    def show_instead(self, text: str) -> None:
        """Show a message instead of a latent."""
        self.show_made("Features", lambda width: _message(text, width))

    def show_made(self, title: str, make: Callable[[int], list[Line]]) -> None:
        """Show the lines that a function makes for the width."""
        self._title, self._make = title, make
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if width := self.size.width:
            self.show_titled(((self._title, "title"),), self._make(width))


def _message(text: str, width: int) -> list[Line]:
    wrapped = textwrap.wrap(text, max(10, width - 2), break_on_hyphens=False)
    return [((f" {line}", "dim"),) for line in wrapped]


def _wrapped(title: str, text: str, width: int) -> list[Line]:
    """Return a titled text over several lines; [] for an empty text."""
    # A scroll bar covers the last columns.
    space = max(10, width - 14)
    lines = [one for line in text.splitlines() for one in textwrap.wrap(line, space) or [""]]
    return [((f"{'' if number else title:<12}", "label"), (visible(line), "text")) for number, line in enumerate(lines)]


def _label_lines(feature: Feature, width: int) -> list[Line]:
    return [line for title, text in label_lines(feature) for line in _wrapped(title, text, width)]


def feature_lines(feature: Feature, features: Features, width: int) -> list[Line]:
    """Return a latent's data, with its examples aligned at their strongest tokens."""
    share = f"fires on {feature.density:.3%} of {features.n_rows:,} rows{family_words(feature)}"
    often = f"{share}, at most {feature.largest:.2f}, {feature.mean:.2f} on average"
    near = "  ".join(f"{latent} ({cosine:.2f})" for latent, cosine in feature.nearest)
    head: list[Line] = [
        *_label_lines(feature, width),
        *(((line, "text"),) for line in textwrap.wrap(often, max(10, width))),
        (
            ("Activations ", "label"),
            ("0 ", "text"),
            (bars(feature.histogram), "bar"),
            (f" {feature.largest:.2f}", "text"),
        ),
        (("Nearest     ", "label"), (fit(near, max(0, width - 12)), "text")),
        *_wrapped("Stability", stability_words(feature), width),
        *_wrapped("Effect", effect_words(feature), width),
        *(((f"{title:<12}", "label"), (fit(text, max(0, width - 12)), "text")) for title, text in part_lines(feature)),
        *_moved_lines(feature, width),
        ((" ", "text"),),
    ]
    return head + [context_line(one, feature.largest, width) for one in feature.contexts]


def _moved_lines(feature: Feature, width: int) -> list[Line]:
    """Return lines with the tokens promoted and suppressed by the latent's direction, or [] if they are unknown."""
    rows = (("Promotes    ", feature.promoted), ("Suppresses  ", feature.suppressed))
    space = max(0, width - 12)
    return [((name, "label"), (visible(fit(in_row(moved), space)), "text")) for name, moved in rows if moved]


def context_line(context: ActivatingExample, largest: float, width: int) -> Line:
    """Return an example, truncated at both ends to the width, with each token shaded by the latent's activation."""
    space = max(0, width - _ACT_CELLS)
    spans = [(visible(readable(token.text)), shade(token.act, largest)) for token in context.tokens]
    return ((f"{context.act:{_ACT_CELLS - 2}.2f}  ", "label"), *cut_around(spans, context.at, space))


def cut_around(spans: Sequence[Span], at: int, width: int) -> list[Span]:
    """Return the spans around index `at` in at most `width` cells. The span `at` always starts in the same column."""
    left = _last_cells(spans[:at], round(width * _MIDDLE))
    return [*left, *_first_cells(spans[at:], width - sum(cell_len(text) for text, _ in left))]


def shade(act: float, largest: float) -> str:
    """Return the style of a token on which a latent fires, by its share of the latent's largest activation."""
    if act <= 0 or largest <= 0:
        return "text"
    return next((name for most, name in SHADES if act <= most * largest), SHADES[-1][1])


def _last_cells(spans: Sequence[Span], width: int) -> list[Span]:
    """Return the end of the spans in exactly `width` cells, padded with spaces on the left."""
    kept: list[Span] = []
    space = width
    for whole, style in reversed(spans):
        text = whole
        while cell_len(text) > space:
            text = text[1:]
        kept.insert(0, (text, style))
        space -= cell_len(text)
        # If half of a wide character is cut off, an empty cell remains that the next span must not fill.
        if not space or text != whole:
            break
    return [(" " * space, "text"), *kept]


def _first_cells(spans: Sequence[Span], width: int) -> list[Span]:
    """Return the start of the spans in at most `width` cells."""
    kept: list[Span] = []
    for whole, style in spans:
        text = whole
        while cell_len(text) > width:
            text = text[:-1]
        kept.append((text, style))
        width -= cell_len(text)
        if text != whole:
            break
    return kept
