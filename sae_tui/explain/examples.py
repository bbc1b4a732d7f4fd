"""Chooses the texts for a latent's description and for its scores, and computes the scores."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sae_tui.explain.prompts import marked
from trainer.contract.runs.features import ActivatingExample, Feature, Features

# The maximum number of texts for a description, for a score, and in a request. With fewer than `LEAST` texts, none is
# held back for the scores.
MOST_SHOWN, MOST_HELD, IN_A_REQUEST, LEAST = 10, 10, 10, 8
# Two texts are from the same passage if they share this number of neighbouring tokens.
_PASSAGE = 5
# The maximum number of latents that are looked at for each text on which the latent does not fire.
_TRIES = 20


class Question(NamedTuple):
    """A text for a scorer, and whether the right answer is yes."""

    text: str
    is_right: bool


class Chosen(NamedTuple):
    """The texts for a latent: `shown` for its description, and the questions of each request for its scores."""

    shown: tuple[ActivatingExample, ...]
    detection: tuple[tuple[Question, ...], ...] = ()
    fuzzing: tuple[tuple[Question, ...], ...] = ()


def choose(features: Features, feature: Feature, alive: Sequence[int], seed: int) -> Chosen:
    """Choose the texts for a latent; the same seed chooses the same texts. `alive` are the latents that fire."""
    # A generator for each latent makes the choice independent of the other latents.
    rng = random.Random(f"{seed} {feature.latent}")
    examples = [*{_text(one): one for one in feature.contexts}.values()]
    if len(examples) < LEAST:
        return Chosen(tuple(examples[:MOST_SHOWN]))
    rng.shuffle(examples)
    n_shown = min(MOST_SHOWN, (len(examples) + 1) // 2)
    shown, held = examples[:n_shown], examples[n_shown : n_shown + MOST_HELD]
    # Strong examples first, as in the list of examples.
    shown.sort(key=lambda one: -one.act)
    others = _silent(features, feature, alive, len(held), rng)
    return Chosen(tuple(shown), tuple(_detection(held, others, rng)), tuple(_fuzzing(held, rng)))


def _silent(
    features: Features, feature: Feature, alive: Sequence[int], n: int, rng: random.Random
) -> list[ActivatingExample]:
    """Return examples of other latents, on which this latent does not fire as far as the stored examples say."""
    known = {passage for one in feature.contexts for passage in _passages(one)}
    found: dict[str, ActivatingExample] = {}
    for latent in rng.sample(alive, min(len(alive), _TRIES * n)):
        if latent == feature.latent or not (contexts := features.feature(latent).contexts):
            continue
        one = rng.choice(contexts)
        if known.isdisjoint(_passages(one)):
            found[_text(one)] = one
        if len(found) == n:
            break
    return [*found.values()]


def _passages(example: ActivatingExample) -> set[tuple[str, ...]]:
    """Return all sequences of `_PASSAGE` neighbouring tokens, or the whole text if it is shorter."""
    words = [token.text.strip() for token in example.tokens]
    return {tuple(words[at : at + _PASSAGE]) for at in range(max(1, len(words) - _PASSAGE + 1))}


def _text(example: ActivatingExample) -> str:
    return marked(example, ())


def _detection(
    held: Sequence[ActivatingExample], others: Sequence[ActivatingExample], rng: random.Random
) -> Iterator[tuple[Question, ...]]:
    questions = [Question(_text(one), True) for one in held] + [Question(_text(one), False) for one in others]
    rng.shuffle(questions)
    for first in range(0, len(questions) if others else 0, IN_A_REQUEST):
        yield tuple(questions[first : first + IN_A_REQUEST])


def _fuzzing(held: Sequence[ActivatingExample], rng: random.Random) -> Iterator[tuple[Question, ...]]:
    """Yield two requests with all held-back texts; a text has the right marks in one, and wrong marks in the other."""
    for is_right_first in (True, False):
        questions = []
        for number, one in enumerate(held):
            is_right = (number % 2 == 0) == is_right_first
            fires = {at for at, token in enumerate(one.tokens) if token.act > 0}
            if at := fires if is_right else _other_tokens(one, fires, rng):
                questions.append(Question(marked(one, at), is_right))
        rng.shuffle(questions)
        yield tuple(questions)


def _other_tokens(example: ActivatingExample, fires: set[int], rng: random.Random) -> set[int]:
    """Return random tokens on which the latent is silent, in runs as long as the runs of tokens on which it fires.

    The marks then have the same shape as the right ones. Runs without a place are left out.
    """
    free = {at for at, token in enumerate(example.tokens) if at not in fires and token.text.strip()}
    chosen: set[int] = set()
    for run in _runs(fires):
        starts = [at for at in sorted(free) if all(at + step in free for step in range(len(run)))]
        if starts:
            start = rng.choice(starts)
            taken = set(range(start, start + len(run)))
            chosen |= taken
            # Neighbouring runs would merge.
            free -= taken | {start - 1, start + len(run)}
    return chosen


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def balanced_accuracy(answers: Sequence[tuple[bool, bool]]) -> tuple[float, float] | None:
    """Return the balanced accuracy of pairs (right answer, given answer) and its standard error.

    Return None unless both right answers occur. The error is the posterior standard deviation for uniform priors of
    both rates, so that it is not 0 if all answers are right.
    """
    value = variance = 0.0
    for wanted in (True, False):
        given = [answer == wanted for right, answer in answers if right == wanted]
        n, k = len(given), sum(given)
        if not n:
            return None
        smoothed = (k + 1) / (n + 2)
        value += k / n / 2
        variance += smoothed * (1 - smoothed) / (n + 3) / 4
    return value, math.sqrt(variance)
