"""The `eval` command: writes report cards next to SAEs' weights, and returns the cards as text lines and JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from trainer.contract.errors import UsageError, UserError, first_line
from trainer.contract.paths import RunPaths
from trainer.contract.progress import Planned, Progress
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.runs.evaluation_time import EFFECT_TOKENS, SEEDS, planned
from trainer.contract.runs.explanations import ExplanationsFile
from trainer.contract.runs.features import FEATURES
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.report_card import (
    EFFECTS,
    FIRES_ON,
    IN_MODEL,
    PROBES,
    PROMOTED,
    ROWS,
    Card,
    as_table,
    lines,
    read_card,
    with_explanations,
)
from trainer.contract.settings.consent import refuse_code
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import load_as, members, to_table
from trainer.contract.store.seeds import by_seeds
from trainer.contract.store.twins import without_twins
from trainer.evaluation.card import write_card
from trainer.evaluation.evaluate_folder import MeasuredSae, cards_in, saes_in
from trainer.evaluation.evaluate_run import Evaluation, evaluations_of
from trainer.evaluation.evaluated_job import evaluated_job
from trainer.evaluation.probe_sets import DEFAULTS
from trainer.evaluation.rows import EvaluationRows
from trainer.evaluation.stability import are_compared, write_stability
from trainer.evaluation.twins import write_twins
from trainer.sharing.base import NOTHING_GIVEN, Given
from trainer.sharing.finding import in_folder
from trainer.training.export_checkpoint import checkpoint_of, kept_in, output_of

# The default number of texts to keep for each latent.
N_CONTEXTS = 20


def evaluate(
    path: Path,
    *,
    best: bool,
    device: str,
    model: str | None = None,
    n_tokens: int | None = None,
    n_contexts: int | None = None,
    data: Sequence[str] | None = None,
    targets: str | None = None,
    given: Given = NOTHING_GIVEN,
    has_effects: bool = False,
    n_effect_tokens: int | None = None,
    is_probed: bool = False,
    n_sets: int | None = None,
    keeps_rows: bool = False,
    refine: int = 0,
    allows_code: bool = False,
) -> list[dict[str, Any]]:
    """Measure the SAEs of a run or checkpoint on the run's data, or the SAEs in a folder on rows of `data` if given.

    `targets` contains the targets for a transcoder in a folder; `given` overrides settings in the folder's files.
    Return a dict for each SAE with its report card (`card`), the report card's text (`lines`), and the folder that the
    report card was written to (`written_to`). A job file may request a language model's own Python code; this code runs
    only if `allows_code` is set. With `keeps_rows`, an SAE is measured on rows only if its report card has no such
    measurement for the same weights. With `has_effects`, the effects of a run's latents on the loss of `model` are
    measured on about `n_effect_tokens` tokens. With `is_probed`, a run's SAEs are probed on `n_sets` (by default 12)
    sets of texts that `model` reads. With `refine`, activations are also measured on rows after that many steps of
    refinement. Report cards, and up to `n_contexts` (by default 20) texts for each latent, are written if the run has
    exported the SAE. Raise `UserError` if a file cannot be read.
    """
    _refuse_contradictions(
        model=model, data=data, targets=targets, given=given, n_tokens=n_tokens, has_effects=has_effects,
        n_effect_tokens=n_effect_tokens, is_probed=is_probed, n_sets=n_sets, keeps_rows=keeps_rows, refine=refine,
    )  # fmt: skip
    if path.is_file():
        raise UsageError(f"{path} is a file, but an SAE needs a folder for its report card; give a folder or import it")
    if is_folder_of_saes(path):
        of_runs = {
            "--keep-rows": keeps_rows,
            "--best": best,
            "--model": model is not None,
            "--contexts": n_contexts is not None,
        }
        for flag, is_given in of_runs.items():
            if is_given:
                raise UsageError(f"{flag}: requires the folder of a run, but {path} contains an SAE")
        with Progress("evaluating"):
            on = device_of(device)
            cards = cards_in(path.absolute(), on, data, targets, given, refine=refine, allows_code=allows_code)
            return [one.as_json() for one in _compared([_written(one) for one in cards], on)]
    if data and RunPaths(path).job_file.exists():
        message = f"requires the folder of an SAE, but {path} is a run, which is measured on its own data"
        raise UsageError(f"--data: {message}")
    if data:
        # If the folder contains no SAE, `in_folder` raises an error that names the missing files.
        in_folder(path)
    if model not in (None, "auto"):
        refuse_code(to_table(load_as(ExtractJob, model)), allows=allows_code)
    n_contexts = N_CONTEXTS if n_contexts is None else n_contexts
    n_sets = (n_sets or len(DEFAULTS)) if is_probed else 0
    on = device_of(device)
    n_effect_tokens = (n_effect_tokens or EFFECT_TOKENS[on.type]) if has_effects else 0
    evaluations = evaluations_of(
        path, on, best=best, model=model, n_tokens=n_tokens, n_effect_tokens=n_effect_tokens, n_sets=n_sets,
        keeps_rows=keeps_rows, refine=refine, allows_code=allows_code,
    )  # fmt: skip
    asked = {
        ROWS: not keeps_rows, FIRES_ON: n_contexts and not keeps_rows, IN_MODEL: model and n_tokens != 0,
        EFFECTS: has_effects, PROMOTED: model, PROBES: n_sets, SEEDS: True,
    }  # fmt: skip
    parts = [part for part, is_asked in asked.items() if is_asked]
    times = _planned(path, parts, on, best=best, keeps_rows=keeps_rows, refine=refine, allows_code=allows_code)
    with Progress("evaluating", times):
        found = _compared([_written_to_run(one, n_contexts) for one in evaluations], on, keeps_rows=keeps_rows)
    return [one.as_json() for one in found]


def _refuse_contradictions(
    *,
    model: str | None,
    data: Sequence[str] | None,
    targets: str | None,
    given: Given,
    n_tokens: int | None,
    has_effects: bool,
    n_effect_tokens: int | None,
    is_probed: bool,
    n_sets: int | None,
    keeps_rows: bool,
    refine: int,
) -> None:
    """Raise `UsageError` if a flag is given that needs, or excludes, another one."""
    if n_tokens is not None and model is None:
        raise UsageError("--tokens: requires --model; add --model, or leave out --tokens")
    if n_sets is not None and not is_probed:
        raise UsageError("--sets: requires --probe; add --probe, or leave out --sets")
    if is_probed and model is None:
        raise UsageError("--probe: needs --model; add --model auto, or --model with an extraction's job file")
    if n_effect_tokens is not None and not has_effects:
        raise UsageError("--effect-tokens: requires --effects; add --effects, or leave out --effect-tokens")
    if has_effects and model is None:
        raise UsageError("--effects: needs --model; add --model auto, or --model with an extraction's job file")
    for flag, is_given in {"--targets": targets, "--config": given.config, "--transcoder": given.transcoder}.items():
        if is_given and not data:
            raise UsageError(f"{flag}: needs --data; give the activations to measure on")
    if refine and keeps_rows:
        raise UsageError("--refine: is measured on rows; leave out --keep-rows")


def _planned(
    path: Path,
    parts: Sequence[str],
    device: torch.device,
    *,
    best: bool,
    keeps_rows: bool,
    refine: int,
    allows_code: bool,
) -> dict[str, Planned]:
    """Return the expected duration of each part of a run's evaluation, or {} if the run cannot be read."""
    with contextlib.suppress(UserError):
        run_dir, checkpoint = checkpoint_of(path.absolute(), best)
        job, output = evaluated_job(RunPaths(run_dir).job_file, allows_code=allows_code), output_of(run_dir)
        state = read_state(checkpoint)
        labels = [label for label in members(job) if label not in state.halved.dropped]
        cards = {label: card for label in labels if (card := read_card(output / label))}
        groups = [labels for labels in by_seeds(without_twins(labels)).values() if len(labels) > 1]
        is_compared = all({*own} <= cards.keys() and are_compared({one: cards[one] for one in own}) for own in groups)
        if not all(kept_in(output, state.position)(label) for label in labels) or (keeps_rows and is_compared):
            # SAEs that are not written to the run are not compared.
            parts = [part for part in parts if part != SEEDS]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        dropped = state.halved.dropped
        kind, measured = device.type, cards.values()
        return planned(job, parts, device=kind, name=name, cards=measured, dropped=dropped, refine=refine)
    return {}


class _Measured(NamedTuple):
    """A report card, the folder it was written to (None if it was not written), its rows, and notes for the user."""

    card: Card
    written_to: Path | None
    rows: EvaluationRows
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        written_to = str(self.written_to) if self.written_to else None
        card = with_explanations(self.card, ExplanationsFile(self.written_to)) if self.written_to else self.card
        return {"card": as_table(card), "lines": [*lines(card), *self.notes], "written_to": written_to}


def _written_to_run(one: Evaluation, n_contexts: int) -> _Measured:
    """Write an exported SAE's report card after each part, so that stopping loses only the current part."""
    notes, written = [], None
    for card in one.cards:
        if card.parts and exported_tokens(one.folder) == card.tokens:
            written = write_card(one.folder, card, replaces=written)
    if card.probing is not None and card.spliced is None and IN_MODEL not in card.parts:
        notes.append("no loss: the language model does not predict next tokens")
    there = exported_tokens(one.folder)
    if is_same := there == card.tokens:
        card = _with_features(one, card, n_contexts, written)
        notes.append(f"written to {one.folder}")
    else:
        reason = "there is no SAE" if there is None else "there is an SAE from another checkpoint"
        notes.append(f"not written: {reason} in {one.folder}")
    return _Measured(card, one.folder if is_same else None, one.rows, notes)


def _compared(found: Sequence[_Measured], device: torch.device, *, keeps_rows: bool = False) -> list[_Measured]:
    """Compare the SAEs that differ only in the seed, and SAEs with their random twins; return the changed results."""
    folders = {one.card.label: one.written_to for one in found if one.written_to}
    rows = {one.card.label: one.rows for one in found}
    compared: dict[str, Card] = {}
    notes = []
    # A failed comparison must not lose the report cards, which are complete without it.
    try:
        stable, lack = write_stability(folders, rows.__getitem__, device, keeps_rows=keeps_rows)
        compared |= stable
        if lack:
            notes.append(f"stability across seeds was not measured: {lack}")
    except Exception as error:
        notes.append(f"stability across seeds was not fully measured: {first_line(error)}")
        compared |= {label: card for label, folder in folders.items() if (card := read_card(folder)) and card.stability}
    try:
        compared |= write_twins(folders)
    except Exception as error:
        notes.append(f"no comparison with random twins: {first_line(error)}")
    return [one._replace(card=compared.get(one.card.label, one.card), notes=[*one.notes, *notes]) for one in found]


def _with_features(one: Evaluation, card: Card, n_contexts: int, written: Card | None) -> Card:
    """Write the features file with the latents' texts and promoted tokens; return the updated report card."""
    has_rows, is_there = ROWS in card.parts, (one.folder / FEATURES).exists()
    if not has_rows and is_there:
        n_contexts = 0
    # Promoted tokens are only shown next to the latents' texts, so do not write them without a features file.
    tensors, parts = one.features(n_contexts) if n_contexts or (is_there and not has_rows) else ({}, {})
    if written and not tensors:
        return written
    card = msgspec.structs.replace(card, parts=card.parts | parts)
    return write_card(one.folder, card, tensors, replaces=written)


def is_folder_of_saes(path: Path) -> bool:
    """Return whether a folder contains exported SAEs and is not a run."""
    return bool(saes_in(path)) and not RunPaths(path).job_file.exists()


def _written(one: MeasuredSae) -> _Measured:
    card = write_card(one.folder, one.card, one.tensors)
    return _Measured(card, one.folder, one.rows, [f"written to {one.folder}"])


def device_of(name: str) -> torch.device:
    """Return the device that `--device` names; raise `UsageError` if it is not available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError('--device: PyTorch sees no GPU here; use "cpu" or "auto"')
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
