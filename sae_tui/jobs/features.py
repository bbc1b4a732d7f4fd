"""Finds and formats the stored features of a job's SAEs, including the texts that activate each latent."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.printable import on_one_line, printable_lines
from trainer.contract.runs.crosscoder import OTHER, SHARED, is_confirmed, letter
from trainer.contract.runs.effects import with_error
from trainer.contract.runs.explanations import CHANCE, Explanation
from trainer.contract.runs.features import (
    DENSE,
    FEATURES,
    ActivatingExample,
    Family,
    Feature,
    Features,
    LogitChange,
    is_filter,
)

STAR = "★"
# The maximum number of tokens shown for a latent in a list.
MOST_TOKENS = 6
_BOUND_WORDS: dict[Family, str] = {"token": "on one token", "position": "at one position", "rare": "rare"}
_LINE_ENDS = str.maketrans({"\n": "⏎", "\r": "⏎", "\t": " "})


def features_of_job(data: DataDir, job_id: int) -> dict[str, Path]:
    """Return a dict mapping each of a job's SAE labels ("" for a single SAE) to the SAE's feature file.

    Raise `UserError` if there are no feature files.
    """
    evaluate = f"`sae-tui eval {job_id}` finds its max-activating examples"
    return _files(data.sae(job_id), f"job {job_id}: {evaluate}, if its data has token ids")


def has_features(data: DataDir, job_id: int) -> bool:
    """Return whether a job has at least one feature file."""
    try:
        return bool(features_of_job(data, job_id))
    except UserError:
        return False


def features_in(folder: Path) -> dict[str, Path]:
    """Return a dict mapping each SAE label in a folder to the SAE's feature file.

    `folder` may also be a run folder. Raise `UserError` if there are no feature files.
    """
    place = folder / "sae" if os.path.isdir(folder / "sae") else folder
    return _files(place, f"{folder} has no {FEATURES}; `sae-train eval` on the run writes it")


def _files(folder: Path, problem: str) -> dict[str, Path]:
    # For a folder that cannot be searched, os.path.exists returns False, whereas Path.exists raises.
    if os.path.exists(single := folder / FEATURES):
        return {"": single}
    if os.path.isdir(folder) and (files := {one.parent.name: one for one in sorted(folder.glob(f"*/{FEATURES}"))}):
        return files
    raise UserError(problem)


class Found(NamedTuple):
    """The latents that a search found: by your notes, because they fire on the words, or only by their texts.

    Each latent is in one list only, the first that fits.
    """

    noted: list[int]
    firing: list[int]
    others: list[int]

    def counted(self, where: str) -> str:
        """Return the numbers of latents, like `1 by your notes, 9 fire on it, 525 have it only in their texts`.

        `where` is the result of `where_else`.
        """
        texts = [f"{len(self.noted):,} by your notes"] if self.noted else []
        texts += [f"{len(self.firing):,} {'fires' if len(self.firing) == 1 else 'fire'} on it"]
        only = f"has it only {where.replace('their', 'its')}" if len(self.others) == 1 else f"have it only {where}"
        return ", ".join(texts + [f"{len(self.others):,} {only}"] * bool(self.others))


def search(features: Features, words: str) -> Found:
    """Return the latents whose name, note or examples contain these words.

    Raise `UserError` if there are no such latents.
    """
    noted = features.search_notes(words)
    firing, others = ([one for one in some if one not in noted] for some in features.search_apart(words))
    if noted or firing or others:
        return Found(noted, firing, others)
    if is_filter(words):
        raise UserError(f"no latent matches {words}")
    written = {"no note": features.notes.by_latent, "no explanation": features.explanations}
    lacking = "".join(f", and {what} has it" for what, there in written.items() if there)
    raise UserError(f'no max-activating example contains a token with "{words}"{lacking}')


def where_else(features: Features) -> str:
    """Return where a search found its words if a latent does not fire on them."""
    return "in their texts or explanations" if features.explanations else "in their texts"


def counts(features: Features) -> str:
    """Describe the latents' families, like `23 dense (> 10%), 410 on one token, 3 never fire, 100 explained`."""
    n = Counter(features.families)
    bound = [f"{n[family]:,} {words}" for family, words in _BOUND_WORDS.items() if n[family]]
    explained = [f"{len(features.explanations):,} explained"] if features.explanations else []
    return ", ".join([f"{n['dense']:,} dense (> {DENSE:.0%})", *bound, f"{n['silent']:,} never fire", *explained])


def stability_words(feature: Feature) -> str:
    """Return a latent's similarity with other seeds, like `0.93, mean cosine with …; firing correlation 0.88`."""
    if feature.stability is None:
        return ""
    fires = feature.firing_correlation
    firing = "" if fires is None else f"; firing correlation {fires:.2f}"
    return f"{feature.stability:.2f}, mean cosine with the nearest latent of each other seed{firing}"


def effect_words(feature: Feature) -> str:
    """Return a latent's effect, like `+0.039 ± 0.0036 nats per token if ablated, +0.0867 per row …`."""
    if feature.effect is None or feature.effect_per_firing is None:
        return ""
    effect = with_error(feature.effect, feature.effect_error)
    return f"{effect} nats per token if ablated, {feature.effect_per_firing:+.3g} per row on which it fires"


def family_words(feature: Feature) -> str:
    """Describe when a latent fires, like ` (almost only on one token)`, or return "" for any other family."""
    words = {"dense": "dense", "token": "almost only on one token", "position": "almost only at one position"}
    return f" ({words[feature.family]})" if feature.family in words else ""


def part_lines(feature: Feature) -> list[tuple[str, str]]:
    """Return titles and texts about a crosscoder's latent: its norms and latent scaling, by part; [] for other SAEs."""
    if not feature.parts:
        return []
    names = ", ".join(f"{letter(number)} {part.name}" for number, part in enumerate(feature.parts))
    lines = [("Parts", names), ("Norms", _by_part([part.share for part in feature.parts]))]
    if feature.nu_error is not None and feature.nu_reconstruction is not None:
        errors, rebuilt = zip(*((part.beta_error, part.beta_reconstruction) for part in feature.parts), strict=True)
        lines.append(("β error", f"{_by_part(errors)}  ν {feature.nu_error:.2f}"))
        lines.append(("β reconstr.", f"{_by_part(rebuilt)}  ν {feature.nu_reconstruction:.2f}"))
        if feature.part not in (SHARED, OTHER):
            shares = [part.share for part in feature.parts]
            holds = is_confirmed(shares, feature.nu_error, feature.nu_reconstruction)
            lines.append(("Scaling", f"{'confirmed' if holds else 'not confirmed'} as only in {feature.part}"))
    return lines


def _by_part(values: Sequence[float | None]) -> str:
    known = ("–" if value is None else f"{value:.2f}" for value in values)
    return "  ".join(f"{letter(number)} {value}" for number, value in enumerate(known))


def label(feature: Feature) -> str:
    """Return what a list shows for a latent: its name or else its description, and the tokens on which it fires."""
    return " · ".join(filter(None, [own_title(feature), strongest_tokens(feature.contexts)]))


def own_title(feature: Feature) -> str:
    """Return a latent's name or, without one, its description; "" if it has neither, or if scoring it failed."""
    one = feature.explanation
    return on_one_line(feature.name) or (one.text if one and not one.problem else "")


def note_lines(feature: Feature) -> list[tuple[str, str]]:
    """Return titles and texts about what the user has written about a latent."""
    lines = [("Name", on_one_line(feature.name)), ("Note", printable_lines(feature.note))]
    if feature.noted_at_tokens is not None:
        lines.append(("Written", f"at {feature.noted_at_tokens:,} tokens, about other weights"))
    return [line for line in lines if line[1]]


def label_lines(feature: Feature) -> list[tuple[str, str]]:
    """Return titles and texts about what the user, or a language model, has written about a latent."""
    return [*note_lines(feature), *_explanation_lines(feature)]


def _explanation_lines(feature: Feature) -> list[tuple[str, str]]:
    one = feature.explanation
    if one is None:
        return []
    scores = f"{scores_words(one)}, by {one.model}"
    return [("Explanation", one.text), ("Scores", f"{scores}; {one.problem}" if one.problem else scores)]


def scores_words(one: Explanation) -> str:
    """Return the scores of a description, like `detection 0.93 ± 0.05, fuzzing 0.88 ± 0.06 (chance 0.5)`."""
    scores = {"detection": (one.detection, one.detection_error), "fuzzing": (one.fuzzing, one.fuzzing_error)}
    known = [f"{name} {score_words(*score)}" for name, score in scores.items() if score[0] is not None]
    return f"{', '.join(known)} (chance {CHANCE})" if known else "not scored"


def score_words(value: float | None, error: float | None) -> str:
    """Return a score with its standard error, or "" for an unknown score."""
    return "" if value is None else f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")


def strongest_tokens(contexts: Iterable[ActivatingExample]) -> str:
    """Return the distinct tokens on which a latent fires most strongly in some contexts, strongest first."""
    tokens = dict.fromkeys(readable(context.tokens[context.at].text).strip() for context in contexts)
    return " ".join(list(filter(None, tokens))[:MOST_TOKENS])


def in_row(moved: Iterable[LogitChange]) -> str:
    """Format the tokens that a latent promotes or suppresses as one line, with the change in each token's logit."""
    return "  ".join(f"{readable(one.text).strip() or repr(one.text)} {one.logit:+.2f}" for one in moved)


def readable(text: str) -> str:
    """Return a token's text with visible symbols for line breaks, and spaces for tabs."""
    return text.translate(_LINE_ENDS)


def in_words(context: ActivatingExample) -> str:
    """Format a max-activating example as one line, with the token that activates the latent most in brackets."""
    texts = [readable(token.text) for token in context.tokens]
    texts[context.at] = f"[{texts[context.at]}]"
    return "".join(texts)
