"""Compares two report cards figure by figure, taking the figures' standard errors into account."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from trainer.contract.runs.card_figures import CardFigure, figures_of, in_form, texts_of
from trainer.contract.runs.recipe import MOST_L0_MISS
from trainer.contract.runs.report_card import Card
from trainer.contract.runs.row_sums import LEAD

NO_ERROR = "compared by the digits shown, because there is no standard error"
Verdict = Literal["same", "better", "worse", "differs", "missing"]


class Difference(msgspec.Struct, frozen=True):
    """A figure as it appears on two report cards; at least one of them has it."""

    here: CardFigure | None
    there: CardFigure | None

    @property
    def figure(self) -> CardFigure:
        found = self.here or self.there
        assert found is not None
        return found

    @property
    def change(self) -> float | None:
        """How much higher the figure is on this report card than on the other, or None if either lacks it."""
        return self.here.value - self.there.value if self.here and self.there else None

    @property
    def least(self) -> float | None:
        """The largest difference within the error margin (`LEAD` combined errors), or None if an error is unknown."""
        errors = [one.error for one in (self.here, self.there) if one]
        known = [error for error in errors if error is not None]
        return LEAD * math.hypot(*known) if len(known) == 2 else None

    @property
    def is_exact(self) -> bool:
        """Whether the figures are compared by the digits shown, because an error is unknown."""
        return self.change is not None and self.least is None

    @property
    def verdict(self) -> Verdict:
        """Whether the figure on this report card is better, worse or, within the errors, the same.

        If neither direction is better, or the figures were measured under different conditions, the verdict is only
        "differs".
        """
        if self.change is None or self.here is None or self.there is None:
            return "missing"
        # If an error is unknown, compare the displayed text rather than the values, because two measurements of the
        # same SAE differ in the eighth digit.
        if self.here.text == self.there.text if self.least is None else abs(self.change) <= self.least:
            return "same"
        better = self.here.series.better
        if better is None or self.here.condition != self.there.condition:
            return "differs"
        return "better" if (self.change > 0) == (better == "higher") else "worse"

    @property
    def mark(self) -> str:
        """The verdict as text: `=` if the figures are the same; a star follows if a standard error is unknown."""
        if self.verdict == "missing":
            return "only here" if self.here else "only there"
        return f"{'=' if self.verdict == 'same' else self.verdict}{'*' * self.is_exact}"

    @property
    def signed(self) -> str:
        """The signed difference, or "" if both look the same; if it would round to 0, show one significant digit."""
        change, series = self.change, self.figure.series
        if change is None or (self.here and self.there and self.here.text == self.there.text):
            return ""
        usual = in_form(abs(change), series)
        small = f"{100 * abs(change):.1g}%" if usual.endswith("%") else f"{abs(change):.0e}"
        return f"{'+' if change > 0 else '-'}{usual if usual.strip('0.%') else small}"


def differences(here: Card, there: Card) -> list[Difference]:
    """Return every figure on either of two report cards, in the order in which a report card lists them."""
    ours, theirs = ({one.name: one for one in figures_of(card)} for card in (here, there))
    only_theirs = [Difference(None, one) for name, one in theirs.items() if name not in ours]
    return [Difference(one, theirs.get(name)) for name, one in ours.items()] + only_theirs


def limits_of(here: Card, there: Card) -> Iterator[str]:
    """Yield reasons why the differences between two report cards may not be due to the SAEs."""
    if here.data.place != there.data.place:
        yield f"measured on rows from {here.data.place} here, but from {there.data.place} there"
    elif here.figures.n_tokens != there.figures.n_tokens:
        yield f"measured on {here.figures.n_tokens:,} rows here, on {there.figures.n_tokens:,} there"
    if here.data.dimensions != there.data.dimensions:
        yield "different dimensions are left out or scaled down, so the reconstructions are not ranked"
    ours, theirs = here.figures.l0, there.figures.l0
    if max(ours, theirs) > (1 + MOST_L0_MISS) * min(ours, theirs):
        yield f"L0 is {ours:.1f} here, {theirs:.1f} there: a higher L0 alone lowers the FVU"
    if here.explained and there.explained and here.explained.models != there.explained.models:
        yield f"explained by {here.explained.by} here, by {there.explained.by} there, so the scores are not ranked"
    if here.spliced and there.spliced and texts_of(here) != texts_of(there):
        left_out = [one.spliced.left_out or "no tokens" for one in (here, there) if one.spliced]
        if left_out[0] == left_out[1]:
            yield "the language model read different texts, so its losses and scores are not ranked"
        else:
            yield f"the losses leave out {left_out[0]} here, {left_out[1]} there, so they are not ranked"
