"""Formats an SAE's report card: its metrics, and some of its latents with their top-activating texts."""

from __future__ import annotations

from sae_tui.format import fit, wrap
from sae_tui.jobs.features import readable
from sae_tui.panels.latents import cut_around
from sae_tui.widgets.lines import Line, LineView, Span
from trainer.contract.runs.report_card import Card, SampledLatent, facts, title_lines

_LATENT_CELLS = 18


class CardPanel(LineView, can_focus=True):
    """Shows a report card, or a message if there is none; the cursor keys scroll it."""

    DEFAULT_CSS = "CardPanel { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._shown: Card | str = ""

    def show_card(self, card: Card | str) -> None:
        if card != self._shown:
            self._shown = card
            self.scroll_home(animate=False)
            self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        # Reserve a column for the scrollbar, which appears if there are more lines than rows.
        width = max(20, self.size.width - 1)
        if isinstance(self._shown, Card):
            self.show(card_lines(self._shown, width))
        else:
            self.show([((f" {line}", "dim"),) for line in wrap(self._shown, width - 1)])


def card_lines(card: Card, width: int) -> list[Line]:
    """Return a report card as lines of at most `width` cells."""
    known = facts(card)
    column = max(len(title) for title, _ in known) + 2
    lines: list[Line] = [((f" {line}", "label"),) for text in title_lines(card) for line in wrap(text, width - 1)]
    for title, value in known:
        first, *others = wrap(value, width - column - 1) or [""]
        lines.append(((f" {title:<{column}}", "label"), (first, "text")))
        lines += [((" " * (column + 1), "label"), (line, "text")) for line in others]
    if card.latents:
        heading = f" {len(card.latents)} random latents that fire, each with its max-activating example"
        lines += [((" ", "text"),), ((fit(heading, width), "label"),)]
    return lines + [_latent_line(one, width) for one in card.latents]


def _latent_line(one: SampledLatent, width: int) -> Line:
    """Return a latent with its density and its first text, in which the strongest token is highlighted."""
    spans: list[Span] = [(fit(f" {one.latent:>6} {one.density:>8.3%}", _LATENT_CELLS), "label")]
    if one.texts:
        text = one.texts[0]
        styled = [(readable(token), "title" if at == text.at else "dim") for at, token in enumerate(text.tokens)]
        spans += cut_around(styled, text.at, max(0, width - _LATENT_CELLS))
    return tuple(spans)
