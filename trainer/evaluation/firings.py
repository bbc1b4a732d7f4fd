"""Finds where the latents of an SAE fire in the texts of its data, for tools that read all activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from trainer.activations.open_source import open_source
from trainer.activations.outliers import Outliers
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.tokens_of_data import folder_of, tells_tokens
from trainer.evaluation.contexts import acts_of, entries_of, texts_of
from trainer.evaluation.rows import EvaluationRows
from trainer.sharing.base import Firings
from trainer.training.learner import Learner

# Tokens of a context: a multiple of 32 and 64, the lengths that tools show at once.
CONTEXT = 256


def firings_of(job: JobConfig) -> Callable[[Learner], Firings] | None:
    """Return a function that finds where the latents of a job's SAE fire, or None if the data records no tokens."""
    folders = [folder_of(settings) for settings in job.hooks.values()]
    if not all(folder is not None and folder.is_dir() and tells_tokens(folder) for folder in folders):
        return None
    rows = EvaluationRows.of_hooks(open_source(job), job, torch.device("cpu"))

    def firings(learner: Learner) -> Firings:
        folder = folders[learner.hook]
        assert folder is not None
        return _firings(folder, rows[learner.hook].outliers, learner)

    return firings


def _firings(path: Path, outliers: Outliers, learner: Learner) -> Firings:
    """Return where latents fire in the first texts of a folder, cut into contexts.

    An incomplete context at the end is dropped. Outlier rows have no activations. Activations are at the scale of the
    raw data.
    """
    tokens, rows, latents, activations, n_rows = [], [], [], [], 0
    for text in texts_of(path):
        entries = entries_of(partial(acts_of, learner), text.x, outliers)
        tokens.append(text.origin.token_ids)
        rows.append(entries.rows + n_rows)
        latents.append(entries.latents)
        activations.append(entries.values / learner.sae.acts_scale)
        n_rows += len(text.x)
    length = min(CONTEXT, n_rows)
    n_kept = n_rows // length * length
    place = torch.cat(rows)
    places = torch.stack([place // length, place % length, torch.cat(latents)], 1)
    is_kept = place < n_kept
    return Firings(torch.cat(tokens)[:n_kept].reshape(-1, length), places[is_kept], torch.cat(activations)[is_kept])
