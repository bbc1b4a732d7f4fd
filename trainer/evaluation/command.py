"""The command `eval`: the cards of a run's SAEs, written beside their weights and returned in lines and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.contract.errors import UsageError
from trainer.contract.paths import RunPaths
from trainer.contract.runs.report_card import Card, as_table, lines
from trainer.evaluation.card import with_latents, write_card
from trainer.evaluation.contexts import write_features
from trainer.evaluation.evaluate_folder import cards_in, saes_in
from trainer.evaluation.evaluate_run import evaluations_of
from trainer.evaluation.probe_sets import DEFAULTS
from trainer.sharing.saelens import exported_tokens

# Texts to keep of each latent where nobody says how many.
N_CONTEXTS = 20


def evaluate(
    path: Path,
    *,
    best: bool,
    device: str,
    model: str | None = None,
    n_tokens: int | None = None,
    n_contexts: int | None = None,
    data: str | None = None,
    is_probed: bool = False,
    n_sets: int | None = None,
) -> list[dict[str, Any]]:
    """Measure the SAEs of a run, of a checkpoint, or in a folder on rows of `data`.

    Return each as `card`, as `lines` and where it was `written_to`.
    With `is_probed` the SAEs of a run are probed on `n_sets` (12) sets of texts that `model` reads.
    Cards, and up to `n_contexts` (20) texts on which each latent fires, are written where the run has exported the
    SAE. Raise `UserError` where something cannot be read.
    """
    if n_tokens is not None and model is None:
        raise UsageError("--tokens: says how many --model reads; give that too, or leave it out")
    if n_sets is not None and not is_probed:
        raise UsageError("--sets: says on how many sets --probe trains; give that too, or leave it out")
    if is_probed and model is None:
        raise UsageError("--probe: takes texts that --model reads; give that too, auto or an extraction's job file")
    if is_folder_of_saes(path):
        of_runs = {"--best": best, "--model": model is not None, "--contexts": n_contexts is not None}
        for flag, is_given in of_runs.items():
            if is_given:
                raise UsageError(f"{flag}: takes the folder of a run, and {path} is that of an SAE")
        return [_written(*one) for one in cards_in(path.absolute(), _device(device), data)]
    if data:
        raise UsageError(f"--data: takes the folder of an SAE, and {path} is none; a run has its own data")
    told, n_contexts = [], N_CONTEXTS if n_contexts is None else n_contexts
    n_sets = (n_sets or len(DEFAULTS)) if is_probed else 0
    evaluations = evaluations_of(path, _device(device), best=best, model=model, n_tokens=n_tokens, n_sets=n_sets)
    for folder, card, features in evaluations:
        there = exported_tokens(folder)
        is_same = there == card.tokens
        if is_same:
            if n_contexts and (tensors := features(n_contexts)):
                write_features(folder, tensors)
            card = with_latents(card, folder)
            write_card(folder, card)
        reason = "there is no SAE" if there is None else "there is another checkpoint's SAE"
        note = f"written to {folder}" if is_same else f"not written: {reason} in {folder}"
        has_no_loss = card.probing is not None and card.spliced is None
        notes = ["no loss: the language model predicts no next token", note] if has_no_loss else [note]
        written_to = str(folder) if is_same else None
        told.append({"card": as_table(card), "lines": [*lines(card), *notes], "written_to": written_to})
    return told


def is_folder_of_saes(path: Path) -> bool:
    """Tell whether a folder holds SAEs as they are exported, and no run."""
    return bool(saes_in(path)) and not RunPaths(path).job_file.exists()


def _written(folder: Path, card: Card) -> dict[str, Any]:
    card = with_latents(card, folder)
    write_card(folder, card)
    note = f"written to {folder}"
    return {"card": as_table(card), "lines": [*lines(card), note], "written_to": str(folder)}


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError('--device: PyTorch sees no GPU here; use "cpu" or "auto"')
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
