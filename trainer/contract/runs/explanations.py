"""Reads and writes `explanations.jsonl`, in which `sae-tui explain` stores a language model's descriptions of latents.

The file is next to the SAE's weights and has one line per latent, in ascending order.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.json_file import CONFLICT_MARKS, decode_as, raw_lines, read_json_lines, write_lines
from trainer.contract.locks import locked
from trainer.contract.printable import on_one_line
from trainer.contract.wording import plural

EXPLANATIONS = "explanations.jsonl"
# The maximum number of characters in a description and in other texts.
LONGEST_TEXT = 300
# The expected score of a language model that guesses.
CHANCE = 0.5
# The number of equal bins in a histogram of scores from 0 to 1.
_N_BINS = 10
# The maximum number of characters of a model's name in a summary.
_LONGEST_MODEL = 60
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a latent by the language model `model`, with scores on examples that it was not written from.

    `text` is "" if the model gave no description. The scores are balanced accuracies: `detection` for finding the texts
    on which the latent fires, `fuzzing` for finding the texts in which the right tokens are marked. They are None if
    they were not measured. `n_examples` is the number of scored examples. `problem` says why the description or
    a score is missing, "" if nothing went wrong. `n_unparsed` counts the answers that were not in the requested form.
    `prompts` is the version of the prompts, and `weights` is the digest of the SAE's weights.
    """

    latent: Annotated[int, msgspec.Meta(ge=0)]
    text: str
    detection: Share | None = None
    detection_error: Share | None = None
    fuzzing: Share | None = None
    fuzzing_error: Share | None = None
    n_examples: int = 0
    n_unparsed: int = 0
    problem: str = ""
    model: str = ""
    prompts: str = ""
    time: float = 0.0
    weights: str = ""


class MeanScore(msgspec.Struct, frozen=True):
    """The mean of a score over `n` latents, with its standard error, and a histogram of the score from 0 to 1."""

    mean: float
    error: float
    n: int
    histogram: tuple[int, ...]

    @property
    def words(self) -> str:
        """The mean with its error, like `0.854 ± 0.012`."""
        return f"{self.mean:.3f} ± {self.error:.3f}"


class ExplainedLatents(msgspec.Struct, frozen=True, kw_only=True):
    """How many of an SAE's latents have a description, the models that wrote them, and their mean scores.

    `prompts` are the versions of the prompts. A score is None if it was not measured for any latent.
    """

    n_latents: int
    models: tuple[str, ...]
    prompts: tuple[str, ...]
    detection: MeanScore | None = None
    fuzzing: MeanScore | None = None

    @property
    def means(self) -> str:
        """The mean scores that were measured, like `detection 0.854 ± 0.012, fuzzing 0.791 ± 0.013`."""
        scores = {"detection": self.detection, "fuzzing": self.fuzzing}
        return ", ".join(f"{name} {score.words}" for name, score in scores.items() if score)

    @property
    def words(self) -> str:
        """The number of described latents and the mean scores, like `412 explained, detection 0.854 ± 0.012`."""
        return ", ".join(filter(None, [f"{self.n_latents:,} explained", self.means]))

    @property
    def by(self) -> str:
        """The language models, at most three of them, like `Qwen3-8B`."""
        more = len(self.models) - 3
        others = f" and {plural(more, 'other model')}" if more > 0 else ""
        return ", ".join(one[:_LONGEST_MODEL] for one in self.models[:3]) + others


def summary_of(explanations: Iterable[Explanation]) -> ExplainedLatents | None:
    """Return a summary of the explanations that have a description, or None if there are none."""
    described = [one for one in explanations if one.text]
    if not described:
        return None
    return ExplainedLatents(
        n_latents=len(described),
        models=tuple(sorted({one.model for one in described})),
        prompts=tuple(sorted({one.prompts for one in described})),
        detection=_mean([(one.detection, one.detection_error) for one in described]),
        fuzzing=_mean([(one.fuzzing, one.fuzzing_error) for one in described]),
    )


def _mean(scores: Sequence[tuple[float | None, float | None]]) -> MeanScore | None:
    """Return the mean of the known scores with its standard error over latents, or None if none is known."""
    known = [(score, error or 0.0) for score, error in scores if score is not None]
    if not known:
        return None
    values, n = [score for score, _ in known], len(known)
    over_latents = statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    # If all scores are alike, the spread over latents is smaller than the errors of the scores allow.
    error = max(over_latents, math.hypot(*(error for _, error in known)) / n)
    counts = [0] * _N_BINS
    for value in values:
        counts[min(_N_BINS - 1, int(value * _N_BINS))] += 1
    return MeanScore(statistics.fmean(values), error, n, tuple(counts))


class ExplanationsFile:
    """The stored explanations of the SAE in a folder; they are read again only if their file has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The state of the file when it was read, and what was read.
        self._read: tuple[object, dict[int, Explanation]] = None, {}

    def of(self, weights: str) -> dict[int, Explanation]:
        """Return the descriptions of latents that belong to these weights; {} if the file cannot be read."""
        try:
            status = os.stat(self._folder / EXPLANATIONS)
        except OSError:
            return {}
        state = weights, status.st_ino, status.st_size, status.st_mtime_ns
        if state != self._read[0]:
            known: dict[int, Explanation] = {}
            # An unreadable file must not hide the latents, nor the report card.
            with contextlib.suppress(UserError):
                known = of_weights(read_explanations(self._folder).values(), weights)
            self._read = state, known
        return self._read[1]

    def summary_of(self, weights: str, n_latents: int) -> ExplainedLatents | None:
        """Return a summary of the descriptions of an SAE's latents that belong to these weights; None without any."""
        return summary_of(one for one in self.of(weights).values() if one.latent < n_latents) if weights else None


def carry_explanations(source: Path, target: Path, weights: str, new_weights: str) -> list[str]:
    """Add the explanations of the SAE in a folder to a copy of the SAE, whose weights have another digest.

    Explanations of other weights than `weights` are left out. Return sentences about what is not copied.
    """
    try:
        stored = read_explanations(source)
        own = of_weights(stored.values(), weights) if weights and new_weights else {}
        if own:
            record(target, *(msgspec.structs.replace(one, weights=new_weights) for one in own.values()))
    except UserError as error:
        return [f"the explanations of latents are not copied: {error}"]
    n_others = sum(bool(one.text) for one in stored.values()) - len(own)
    return [f"{plural(n_others, 'explanation')} of other weights not copied"] if n_others else []


def read_explanations(folder: Path) -> dict[int, Explanation]:
    """Return all stored explanations by latent, for any weights; raise `UserError` if this fails."""
    lines = read_json_lines(folder / EXPLANATIONS, Explanation)
    return {one.latent: _shown(one) for one in sorted(lines, key=lambda one: one.latent)}


def of_weights(explanations: Iterable[Explanation], weights: str) -> dict[int, Explanation]:
    """Return the descriptions of latents, without failures and without descriptions that belong to other weights."""
    return {one.latent: one for one in explanations if one.text and one.weights == weights}


def record(folder: Path, *explanations: Explanation) -> None:
    """Add explanations to the file, replacing older ones of the same latents; raise `UserError` if this fails.

    A failure does not replace a description for the same weights. Lines about other latents are kept as they are, and
    so are lines that are not explanations.
    """
    file = folder / EXPLANATIONS
    with locked(folder):
        known: dict[int, tuple[Explanation, bytes]] = {}
        others = []
        for line in raw_lines(file):
            try:
                one = decode_as(line, Explanation)
            except ValueError:
                if line.startswith(CONFLICT_MARKS):
                    raise UserError(f"{file} has marks of a merge conflict; delete them first") from None
                others.append(line)
            else:
                known[one.latent] = one, line
        for one in map(_shown, explanations):
            older, _ = known.get(one.latent, (None, b""))
            if one.text or not (older and older.text and older.weights == one.weights):
                known[one.latent] = one, msgspec.json.encode(one)
        write_lines(file, [*(known[latent][1] for latent in sorted(known)), *others])


def _shown(one: Explanation) -> Explanation:
    """Return an explanation with texts that a terminal can show, since the file may come from another user."""
    texts = {name: cut(on_one_line(getattr(one, name))) for name in ("text", "problem", "model", "prompts", "weights")}
    return msgspec.structs.replace(one, **texts)


def cut(text: str) -> str:
    """Return a text with at most `LONGEST_TEXT` characters."""
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
