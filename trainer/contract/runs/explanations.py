"""Reads and writes `explanations.jsonl`, in which `sae-tui explain` stores a language model's descriptions of latents.

The file is next to the SAE's weights and has one line per latent, in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.json_file import CONFLICT_MARKS, decode_as, raw_lines, read_json_lines, write_lines
from trainer.contract.locks import locked
from trainer.contract.printable import on_one_line

EXPLANATIONS = "explanations.jsonl"
# The maximum number of characters in a description and in other texts.
LONGEST_TEXT = 300
# The expected score of a language model that guesses.
CHANCE = 0.5
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
