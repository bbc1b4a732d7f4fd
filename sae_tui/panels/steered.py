"""Two continuations of a prompt with their first difference, and the effect of steering on the model's predictions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

from rich.cells import cell_len

from sae_tui.format import fit, wrap
from sae_tui.panels.latents import SHADE_STYLES, shade
from sae_tui.panels.tokens import quoted, styled, wrapped
from sae_tui.widgets.lines import PALETTE, Line, LineView
from trainer.contract.answers.interaction import Continued, Generated, MovedToken, TokenKl

# The minimum width for two texts side by side.
_WIDE = 90
_GAP = 3
_MARK = "▸"
_WORDS = re.compile(r"\s*\S+|\s+")
_TOKEN_CELLS = 20


class SteeredText(LineView, can_focus=True):
    """Shows an answer to `Generate`, or a message instead."""

    palette = PALETTE | SHADE_STYLES

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._make: Callable[[int], Sequence[Line]] = lambda _: ()
        self._hint = ""

    def show_answer(self, answer: Continued | Generated, progress: str) -> None:
        self._show(lambda width: answer_lines(answer, width), progress)

    def show_message(self, make: Callable[[int], Sequence[Line]]) -> None:
        """Show lines made for the width."""
        self._show(make, "")

    def _show(self, make: Callable[[int], Sequence[Line]], progress: str) -> None:
        self._make, self._progress = make, progress
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.size.width:
            title = f"Continuation: {self._progress}" if self._progress else "Continuation"
            self.show_titled(((title, "title"),), self._make(self.size.width))


def answer_lines(answer: Continued | Generated, width: int) -> list[Line]:
    """Return both continuations, side by side if they fit; then the moved tokens and the KL divergences."""
    at = _first_difference(answer.plain, answer.steered, is_over=isinstance(answer, Generated))
    same = ", the same" if at is None else ""
    blocks = []
    each = (width - _GAP) // 2 if width >= _WIDE else width
    for title, text in (("WITHOUT STEERING", answer.plain), (f"WITH STEERING{same}", answer.steered)):
        blocks.append([((title, "label"),), *_marked(text, at, each)])
    if width >= _WIDE:
        lines = [_in_columns(left, right, each) for left, right in zip_longest(*blocks, fillvalue=())]
    else:
        lines = [line for block in blocks for line in block]
    if isinstance(answer, Generated):
        lines += [(), *_moved_lines(answer.moved, width), (), *_kl_lines(answer.kl, answer.plain, width)]
    return lines


def _first_difference(plain: str, steered: str, *, is_over: bool) -> int | None:
    """Return the start of the first word that differs, or None; until the end, a text may only be shorter so far."""
    differing = (place for place, (one, other) in enumerate(zip(plain, steered, strict=False)) if one != other)
    shared = next(differing, min(len(plain), len(steered)))
    if plain == steered or (not is_over and shared == min(len(plain), len(steered))):
        return None
    longer = max(plain, steered, key=len)
    if shared == min(len(plain), len(steered)) and longer[shared].isspace():
        return shared
    before = longer[:shared]
    return len(before) - len(re.split(r"\s", before)[-1])


def _marked(text: str, at: int | None, width: int) -> list[Line]:
    """Wrap a continuation, with a mark at its first difference and the rest in bold."""
    cut = len(text) if at is None else at
    same, rest = _WORDS.findall(text[:cut]), _WORDS.findall(text[cut:])
    mark = [] if at is None else [_MARK]
    styles = ["text"] * len(same) + ["accent"] * len(mark) + ["title"] * len(rest)
    return styled(wrapped([*same, *mark, *rest], width), lambda number: styles[number]) if styles else [()]


def _in_columns(left: Line, right: Line, width: int) -> Line:
    used = sum(cell_len(text) for text, _ in left)
    return (*left, (" " * (width - used + _GAP), "text"), *right)


def _moved_lines(moved: Sequence[MovedToken], width: int) -> list[Line]:
    """Return a table of the tokens whose logits change most after the prompt."""
    if not moved:
        return [(("No logit of a likely token after the prompt changes.", "dim"),)]
    heading = f"{'TOKEN AFTER PROMPT':<{_TOKEN_CELLS}} {'LOGIT +/-':>9}  {'PROBABILITY':<11}"
    lines: list[Line] = [((fit(heading, width), "label"),)]
    for one in moved:
        style = "good" if one.logit > 0 else "bad"
        change = (f" {one.logit:+9.2f}", style)
        probabilities = (f"  {_percent(one.plain)} → {_percent(one.steered)}", "text")
        lines.append(((fit(quoted(one.text), _TOKEN_CELLS), "text"), change, probabilities))
    return lines


def _percent(probability: float) -> str:
    return f"{probability:6.1%}" if probability >= 0.001 else " <0.1%"


def _kl_lines(kl: Sequence[TokenKl], plain: str, width: int) -> list[Line]:
    """Return the KL divergences: mean and maximum in nats, and the tokens shaded by their share of the maximum."""
    if not kl:
        return []
    largest = max(kl, key=lambda one: one.kl)
    mean = sum(one.kl for one in kl) / len(kl)
    title = f"KL DIVERGENCE: mean {mean:.3f}, largest {largest.kl:.3f} nats, after "
    n_prompt = _n_prompt(kl, plain)
    texts = [one.text for one in kl]
    styles = [shade(one.kl, largest.kl) for one in kl]
    if n_prompt is not None:
        texts.insert(n_prompt, "│")
        styles.insert(n_prompt, "accent")
    lines = styled(wrapped(texts, width), lambda number: styles[number])
    words = "Of the predictions after each token, without and with steering; shaded by the share of the largest"
    words += "" if n_prompt is None else "; │ ends the prompt"
    return [
        ((fit(f"{title}{quoted(largest.text)}", width), "label"),),
        *(((line, "dim"),) for line in wrap(words, width)),
        *lines,
    ]


def _n_prompt(kl: Sequence[TokenKl], plain: str) -> int | None:
    """Return how many tokens precede the unchanged continuation, or None if they cannot be counted."""
    after = ""
    for number in range(len(kl), -1, -1):
        if after == plain:
            return number
        after = kl[number - 1].text + after if number else ""
    return None
