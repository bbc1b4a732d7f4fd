"""Where it is stored what the latents of a job's SAEs fire on, and how a latent is told in words."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import DENSE, FEATURES, Context, Feature, Features, Moved

# How much of a latent's contexts its line in a list tells.
MOST_TOKENS = 6
_LINE_ENDS = str.maketrans({"\n": "⏎", "\r": "⏎", "\t": " "})


def features_of_job(data: DataDir, job_id: int) -> dict[str, Path]:
    """Return the files of a job's SAEs by their labels, "" for a single one; raise `UserError` where there is none."""
    evaluate = f"`sae-tui eval {job_id}` finds out what its latents fire on"
    return _files(data.sae(job_id), f"job {job_id}: {evaluate}, if its data tells its tokens")


def has_features(data: DataDir, job_id: int) -> bool:
    """Tell whether there is such a file of the job."""
    try:
        return bool(features_of_job(data, job_id))
    except UserError:
        return False


def features_in(folder: Path) -> dict[str, Path]:
    """Return the files of the SAEs in a folder, or in that of a run; raise `UserError` where there is none."""
    place = folder / "sae" if os.path.isdir(folder / "sae") else folder
    return _files(place, f"{folder} has no {FEATURES}; `sae-train eval` of the run writes it")


def _files(folder: Path, problem: str) -> dict[str, Path]:
    # os.path.exists is False, where Path.exists raises, in a folder that cannot be searched.
    if os.path.exists(single := folder / FEATURES):
        return {"": single}
    if os.path.isdir(folder) and (files := {one.parent.name: one for one in sorted(folder.glob(f"*/{FEATURES}"))}):
        return files
    raise UserError(problem)


def search(features: Features, words: str) -> tuple[list[int], list[int]]:
    """Return the latents that fire on these words, and the latents that only have them in their contexts.

    Raise `UserError` if there are none.
    """
    found = features.search_apart(words)
    if any(found):
        return found
    raise UserError(f'no stored context has a token with "{words}"')


def counts(features: Features) -> str:
    """Return how many latents are dense or never fire: `23 dense (on more than 10 % of the rows), 3 never fire`."""
    return f"{features.n_dense:,} dense (on more than {DENSE:.0%} of the rows), {features.n_silent:,} never fire"


def strongest_tokens(feature: Feature) -> str:
    """Return the tokens on which a latent fires most, each once, the strongest first."""
    tokens = dict.fromkeys(readable(context.tokens[context.at].text).strip() for context in feature.contexts)
    return " ".join(list(filter(None, tokens))[:MOST_TOKENS])


def in_row(moved: Iterable[Moved]) -> str:
    """Return tokens that a latent's direction moves, in a line with their logits."""
    return "  ".join(f"{readable(one.text).strip() or repr(one.text)} {one.logit:+.2f}" for one in moved)


def readable(text: str) -> str:
    """Return the text of a token within a line."""
    return text.translate(_LINE_ENDS)


def in_words(context: Context) -> str:
    """Return a context as a line, its strongest token in brackets."""
    texts = [readable(token.text) for token in context.tokens]
    texts[context.at] = f"[{texts[context.at]}]"
    return "".join(texts)
