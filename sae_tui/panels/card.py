"""The report card as a sheet of figures in columns, and the difference between two report cards as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import msgspec

from sae_tui.compare.cards import NO_ERROR, Difference, Verdict, differences, limits_of
from sae_tui.format import bar, fit, wrap
from sae_tui.jobs.features import readable
from sae_tui.panels.latents import cut_around
from sae_tui.widgets.lines import Line, LineView, Span
from trainer.contract.runs.card_figures import (
    CardFigure,
    Group,
    cautions,
    figures_of,
    in_form,
    next_to_twins,
    title_of_group,
)
from trainer.contract.runs.crosscoder import Crosscoder, letter
from trainer.contract.runs.effects import Effects, with_error
from trainer.contract.runs.report_card import LOWEST_DECADE, Card, SampledLatent, remarks, title_lines
from trainer.contract.runs.row_sums import LEAD
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.catalog import METRICS
from trainer.contract.store.seeds import Spread
from trainer.contract.wording import bars

# The widths, in cells, of the parts of a figure on the sheet: its indent and title, its value, and its error.
_TITLE, _VALUE, _ERROR = 20, 9, 10
_SIDE_ERROR = 9  # in a comparison
_SPREAD = 17  # a mean with its standard deviation
_CELLS = _TITLE + _VALUE + _ERROR
_LATENT_CELLS = 18
_BLANK: Line = ((" ", "text"),)
# A figure's style by its prominence; the styles also differ in weight, for terminals without colours.
_WORTH = {"key": "title", "result": "text", "minor": "dim"}
_VERDICTS: dict[Verdict, str] = {
    "same": "dim", "better": "good", "worse": "bad", "differs": "text", "missing": "dim",
}  # fmt: skip


class CardSheet(msgspec.Struct, frozen=True):
    """A report card, the histogram of cosines between its nearest decoder directions, and a card to compare it with.

    `over_seeds` contains the figures' spreads over all SAEs that differ only in the seed. `against_name` says which
    report card `against` is.
    """

    card: Card
    cosines: Sequence[int] = ()
    over_seeds: Sequence[tuple[CardFigure, Spread]] = ()
    against: Card | None = None
    against_name: str = ""

    def lines(self, width: int) -> list[Line]:
        """Return the sheet or, if there is another report card, the differences, in lines of at most `width` cells."""
        if self.against:
            return difference_lines(self.card, self.against, self.against_name, width)
        return card_lines(self.card, self.cosines, width, self.over_seeds)


class CardPanel(LineView, can_focus=True):
    """Shows a report card, or why it is missing. The cursor keys scroll the card."""

    DEFAULT_CSS = "CardPanel { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._shown: CardSheet | str = ""

    def show_card(self, sheet: CardSheet | str) -> None:
        if sheet != self._shown:
            self._shown = sheet
            self.scroll_home(animate=False)
            self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        # Reserve a column for the scrollbar, which is shown if there are more lines than rows.
        width = max(20, self.size.width - 1)
        if isinstance(self._shown, CardSheet):
            self.show(self._shown.lines(width))
        else:
            self.show([((f" {line}", "dim"),) for line in wrap(self._shown, width - 1)])


def card_lines(
    card: Card, cosines: Sequence[int], width: int, over_seeds: Sequence[tuple[CardFigure, Spread]] = ()
) -> list[Line]:
    """Return a report card as lines: its warnings, its figures in columns, and its remarks."""
    of_sae, of_rows, *_ = title_lines(card)
    lines: list[Line] = [((f" {line}", "label"),) for text in (of_sae, of_rows) for line in wrap(text, width - 1)]
    warned = set()
    for caution in cautions(card):
        warned.add(caution.text)
        lines += _wrapped("! ", f"{caution.text}: {caution.remedy}", width, "warn")
    blocks = [*_seed_blocks(over_seeds), *_twin_blocks(card), *_k_blocks(card), *_blocks(card, cosines)]
    lines += [*_in_columns(blocks, width), _BLANK]
    known = [(title, text) for title, text in remarks(card) if text not in warned]
    column = max((len(title) for title, _ in known), default=0) + 2
    for title, text in known:
        lines += _wrapped(f"{title:<{column}}", text, width)
    if card.latents:
        heading = f" {len(card.latents)} random latents that fire, each with its max-activating example"
        lines += [_BLANK, ((fit(heading, width), "label"),)]
    return lines + [_latent_line(one, width) for one in card.latents]


def _wrapped(title: str, text: str, width: int, style: str = "label") -> list[Line]:
    """Return a title followed by text, which is wrapped and indented to the title's width."""
    first, *others = wrap(text, max(10, width - len(title) - 1)) or [""]
    own = "text" if style == "label" else style
    indent = " " * (len(title) + 1)
    return [((f" {title}", style), (first, own)), *(((indent, "text"), (line, own)) for line in others)]


def _blocks(card: Card, cosines: Sequence[int]) -> list[list[Line]]:
    """Return the groups of figures, each with a heading, as lines of `_CELLS` cells."""
    figures = figures_of(card)
    blocks = []
    for group in get_args(Group):
        rows = [_figure_line(one) for one in figures if one.group == group]
        if group == "model" and not rows and card.figures.crosscoder is None:
            words = "none: the rows are synthetic" if card.known else "not measured; press e"
            rows = [((fit(f"  {words}", _CELLS), "dim"),)]
        if group == "parts" and card.figures.crosscoder:
            rows = [*_part_lines(card.figures.crosscoder), *rows, _norms_line(card.figures.crosscoder)]
        if group == "latents":
            rows = [*rows[:1], *_quantiles(card), *rows[1:], *_histograms(card, cosines)]
        if group == "explanations" and card.explained:
            scores = {"detection": card.explained.detection, "fuzzing": card.explained.fuzzing}
            rows += [_histogram(name, "0", score.histogram) for name, score in scores.items() if score]
        if group == "effects" and card.effects:
            rows = [*_effect_lines(card.effects), *rows]
        if rows:
            heading = title_of_group(group, card)
            blocks.append([((fit(f" {heading}", _CELLS), "accent"),), *rows])
    return blocks


def _part_lines(crosscoder: Crosscoder) -> list[Line]:
    """Return a line for each part with its letter and name, and its scale in training."""
    return [
        (
            (f"  {letter(number)} ", "text"),
            (fit(part.name, _CELLS - 15), "label"),
            (f"{f'scale {part.scale:.3g}':>11}", "dim"),
        )
        for number, part in enumerate(crosscoder.parts)
    ]


def _effect_lines(effects: Effects) -> list[Line]:
    """Return the numbers of latents that help and hurt, histograms of their effects, and the largest effects."""
    lines: list[Line] = []
    for title, n, counts in (
        ("help", effects.n_helping, effects.helping),
        ("hurt", effects.n_hurting, effects.hurting),
    ):
        lines.append(_histogram(f"{title} {n:,}", f"1e{LOWEST_DECADE}", counts))
    for one in effects.largest:
        words = with_error(one.effect, one.error)
        lines.append(((fit(f"  latent {one.latent}", 16), "label"), (fit(words, _CELLS - 16), "text")))
    return lines


def _norms_line(crosscoder: Crosscoder) -> Line:
    """Return the histogram of the latents' relative norms."""
    title = f"norm in {letter(1)}" if len(crosscoder.parts) == 2 else "largest"
    shown = bars(crosscoder.norms)
    return ((f"  {title:<10}0 │", "label"), (shown, "spark"), ("│ 1".ljust(_CELLS - 15 - len(shown)), "label"))


def _twin_blocks(card: Card) -> list[list[Line]]:
    """Return a group for each random twin with the main figures of the SAE and of the twin, or [] without twins."""
    by_twin: dict[str, list[Line]] = {}
    for figure, twins in next_to_twins(card):
        for twin, text in twins:
            title = (fit(f"  {figure.series.title}", _TITLE), "label")
            own, of_twin = fit(figure.text, _VALUE, right=True), fit(text.partition(" ")[0], _ERROR, right=True)
            values = (own, "title"), (of_twin, "text")
            by_twin.setdefault(twin.label, []).append((title, *values))
    blocks = []
    for twin in card.twins:
        heading = (fit(f" Next to a {twin.words}", _CELLS - _ERROR), "accent"), (f"{'twin':>{_ERROR}}", "dim")
        blocks += [[heading, *by_twin[twin.label]]] if twin.label in by_twin else []
    return blocks


def _seed_blocks(over_seeds: Sequence[tuple[CardFigure, Spread]]) -> list[list[Line]]:
    """Return the means of the main figures over the seeds, or [] for one seed."""
    rows: list[Line] = [
        ((fit(f"  {one.series.title}", _TITLE), "label"), (f"{spread_words(spread, one.series):>{_SPREAD}}", "title"))
        for one, spread in over_seeds
        if one.series.prominence == "key"
    ]
    if not rows:
        return []
    heading = f" Mean ± s.d. over {over_seeds[0][1].n} seeds"
    rest: Span = (" " * (_CELLS - _TITLE - _SPREAD), "text")
    return [[((fit(heading, _CELLS), "accent"),), *((*row, rest) for row in rows)]]


def _k_blocks(card: Card) -> list[list[Line]]:
    """Return the FVU for each k with a bar, or [] for an SAE that is trained for a single k."""
    at, series = card.figures.by_k, METRICS["fvu"].series
    if not at:
        return []
    largest = max((one.fvu for one in at if math.isfinite(one.fvu)), default=0.0) or 1.0
    rows: list[Line] = [
        (
            (f"{one.k:>6} ", "label"),
            (f"{bar(one.fvu / largest, _TITLE - 8)} ", "spark"),
            (f"{in_form(one.fvu, series) if math.isfinite(one.fvu) else '–':>{_VALUE}}", "title"),
            (fit(f" ± {in_form(one.fvu_error, series)}" if math.isfinite(one.fvu_error) else "", _ERROR), "dim"),
        )
        for one in at
    ]
    return [[((fit(" FVU by number of latents per row (k)", _CELLS), "accent"),), *rows]]


def _figure_line(one: CardFigure) -> Line:
    style = _WORTH[one.series.prominence]
    error = f" ± {one.error_text}" if one.error_text else ""
    return (
        (fit(f"  {one.series.title}", _TITLE), "label"),
        (f"{one.text:>{_VALUE}}", style),
        (fit(error, _ERROR), "dim"),
    )


def _quantiles(card: Card) -> list[Line]:
    low, _, _, _, high = card.figures.l0_quantiles
    text = f"{low:g} to {high:g}"
    return [((fit("  L0, 5 to 95 %", _TITLE), "label"), (fit(f"{text:>{_VALUE}}", _VALUE + _ERROR), "dim"))]


def _histograms(card: Card, cosines: Sequence[int]) -> list[Line]:
    """Return the histograms of the latents' densities and of the cosines of their nearest decoder directions."""
    drawn = [("density", f"1e{LOWEST_DECADE}", card.figures.density_histogram), ("nearest decoder", "0", cosines)]
    return [_histogram(title, low, counts) for title, low, counts in drawn if any(counts)]


def _histogram(title: str, low: str, counts: Sequence[int]) -> Line:
    """Return a histogram that ends at 1."""
    return (
        (f"  {title:<15}{low:>5} │", "label"),
        (bars(counts), "spark"),
        ("│ 1".ljust(_CELLS - 24 - len(counts)), "label"),
    )


def _in_columns(blocks: Sequence[list[Line]], width: int) -> list[Line]:
    """Arrange blocks side by side in as many columns as fit, placing each block in the shortest column so far."""
    n_columns = max(1, min(len(blocks), width // _CELLS))
    columns: list[list[Line]] = [[] for _ in range(n_columns)]
    for block in blocks:
        shortest = min(columns, key=len)
        shortest += [_padding(_CELLS), *block] if shortest else block
    height = max(map(len, columns))
    gap = (" " * min(4, (width - n_columns * _CELLS) // n_columns), "text")
    rows = zip(*(column + [_padding(_CELLS)] * (height - len(column)) for column in columns), strict=True)
    return [_BLANK, *(tuple(span for cell in row for span in (*cell, gap)) for row in rows)]


def _padding(width: int) -> Line:
    return ((" " * width, "text"),)


def difference_lines(here: Card, there: Card, name: str, width: int) -> list[Line]:
    """Return the differences from another report card as lines of at most `width` cells, one line per figure."""
    lines: list[Line] = []
    for limit in limits_of(here, there):
        lines += _wrapped("! ", limit, width, "warn")
    found = differences(here, there)
    n = Counter(one.verdict for one in found)
    counts = f"{n['better']} better, {n['worse']} worse, {n['same']} the same (=)"
    lines += _wrapped("", f"Against {name}: {counts}, within {LEAD:g} standard errors.", width)
    if any(one.is_exact for one in found):
        lines += _wrapped("* ", f"{NO_ERROR}.", width)
    sides = "".join(fit(f"{side:>{_VALUE}}", _VALUE + _SIDE_ERROR) for side in ("THIS", name.upper()))
    lines.append(((fit(f" {'FIGURE':<{_TITLE - 1}}{sides}{'DIFFERENCE':>11}", width), "label"),))
    for group in get_args(Group):
        own = [one for one in found if one.figure.group == group]
        if own:
            lines.append(((fit(f" {title_of_group(group, here)}", width), "accent"),))
            lines += [_difference_line(one) for one in own]
    return lines


def _difference_line(one: Difference) -> Line:
    series = one.figure.series
    sides: list[Span] = []
    for side in (one.here, one.there):
        error = f" ± {side.error_text}" if side and side.error_text else ""
        sides.append((f"{side.text if side else '–':>{_VALUE}}", _WORTH[series.prominence]))
        sides.append((fit(error, _SIDE_ERROR), "dim"))
    style = _VERDICTS[one.verdict]
    return ((fit(f"  {series.title}", _TITLE), "label"), *sides, (f" {one.signed:>10} ", style), (one.mark, style))


def _latent_line(one: SampledLatent, width: int) -> Line:
    """Return a latent with its density and its first text, with the strongest token highlighted."""
    spans: list[Span] = [(fit(f" {one.latent:>6} {one.density:>8.3%}", _LATENT_CELLS), "label")]
    if one.texts:
        text = one.texts[0]
        styled = [(readable(token), "title" if at == text.at else "dim") for at, token in enumerate(text.tokens)]
        spans += cut_around(styled, text.at, max(0, width - _LATENT_CELLS))
    return tuple(spans)
