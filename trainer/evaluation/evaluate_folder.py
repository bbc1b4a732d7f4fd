"""Creates the report card for an SAE from files written by a run or another tool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.activations.base import Source
from trainer.activations.open_source import continue_from, open_source
from trainer.contract.errors import JobFileError, UsageError, UserError
from trainer.contract.output import complain
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.printable import printable_lines
from trainer.contract.runs.card_versions import weights_of
from trainer.contract.runs.checkpoint_manifest import newest_first, read_state
from trainer.contract.runs.how_far import from_metadata
from trainer.contract.runs.recipe import read_recipe
from trainer.contract.runs.report_card import ROWS, Card
from trainer.contract.settings.hook_names import other_place
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.evaluation.card import rows_part, timer
from trainer.evaluation.cross_layer import LayerSae, StoredLayers
from trainer.evaluation.evaluated_job import evaluated_job
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.evaluation.figures import recovery
from trainer.evaluation.known_features import known_features
from trainer.evaluation.rows import EvaluationRows
from trainer.saes.refinement import refuse_transcoder
from trainer.sharing.base import NOTHING_GIVEN, Given, format_in, layer_of_metadata
from trainer.sharing.origins import ORIGIN
from trainer.sharing.parts import joined_paths, refuse_other_parts
from trainer.training.thresholds import SET_ON


class MeasuredSae(NamedTuple):
    """An SAE's folder, its report card, the rows on which it was measured, and tensors for its features file."""

    folder: Path
    card: Card
    rows: EvaluationRows
    tensors: dict[str, Tensor]


def cards_in(
    path: Path,
    device: torch.device,
    data: Sequence[str] | None = None,
    targets: str | None = None,
    given: Given = NOTHING_GIVEN,
    *,
    refine: int = 0,
    allows_code: bool = False,
) -> Iterator[MeasuredSae]:
    """Measure the SAE in a folder, or the SAEs in its subfolders, one at a time.

    An SAE is measured on the activations in the folder `data`, and a transcoder against the targets in `targets`. The
    rows of a crosscoder are joined from several folders. With `refine`, activations are also measured after that many
    steps of refinement.
    Without `data`, the held-out rows of the SAEs' run are used. `given` overrides settings in the SAEs' files. Raise
    `UserError` if there is neither `data` nor a run, or if a file cannot be read.
    """
    folders = saes_in(path)
    run = None if data else _run_of_folder(path)
    if data:
        job = _job_on(data, targets)
    elif run:
        job = evaluated_job(run.job_file, allows_code=allows_code)
    else:
        raise UsageError(f"--data: {path} does not belong to a run; give a folder of activations to measure on")
    source = open_source(job)
    if run and (saved := newest_first(run.checkpoints)):
        # The data may have grown, so hold out the same rows as at the start of the run.
        continue_from(source, job, read_state(saved[0]).data_before)
    rows = EvaluationRows.of_hooks(source, job, device)
    hooks = {label: job.layer_number(member) for label, member in members(job).items()}
    of_labels = {label: (path if folders != [path] else path.parent) / label for label in hooks}
    layers = StoredLayers(of_labels, device) if job.n_layers > 1 else None
    for folder in folders:
        label = str(folder.relative_to(path)) if folder != path else ""
        name, hook = path.name if data else job.name, hooks.get(label or path.absolute().name, 0)
        own = source.of_part(hook) if layers else source.of_hook(hook)
        sae = read_exported(folder, device, given)
        if layer_of_metadata(sae.metadata) and not layers:
            raise UsageError(
                f"--data: {folder} is a layer of a cross-layer transcoder; evaluate its run, without --data"
            )
        if strange := other_place(sae.metadata, own.meta):
            complain(f"warning: {printable_lines(strange)}\n")
        layer = LayerSae(layers.upto(hook), hook) if layers else None
        card = card_of(
            sae, folder, rows[hook], own, layer, name=name, label=label, is_trained_on=not data, refine=refine
        )
        yield MeasuredSae(folder, card, rows[hook], rows[hook].part_tensors)


def saes_in(path: Path) -> list[Path]:
    """Return the folder itself if it contains an SAE, otherwise the subfolders that contain one, as in a sweep."""
    return [path] if format_in(path) else sorted(folder for folder in path.glob("*") if format_in(folder))


def _job_on(data: Sequence[str], targets: str | None) -> JobConfig:
    """Return a job whose data is all the rows in a folder."""
    stored = joined_paths(data) | {"held_out_tokens": 0} | ({"target_path": targets} if targets else {})
    job, problems = parse_job({"data": stored, "train": {"precision": "fp32"}})
    if job is None:
        raise JobFileError(problems)
    return job


def _run_of_folder(path: Path) -> RunPaths | None:
    """Return the run that wrote the SAEs in a folder (`RUN/sae`, or `saes/ID` next to `runs/ID`), or None."""
    for folder in (path, path.parent):
        is_launched = folder.parent.name == "saes" and folder.name.isdecimal()
        run = DataDir(folder.parent.parent).run(int(folder.name)) if is_launched else RunPaths(folder.parent)
        if (is_launched or folder.name == "sae") and run.job_file.is_file():
            return run
    return None


def card_of(
    sae: ExportedSae,
    folder: Path,
    rows: EvaluationRows,
    source: Source,
    layer: LayerSae | None = None,
    *,
    name: str,
    label: str = "",
    step: int = 0,
    is_trained_on: bool = True,
    refine: int = 0,
) -> Card:
    """Measure an SAE from a folder on rows from a source; raise `UserError` if the rows do not match the SAE.

    A `layer` of a cross-layer transcoder is measured together with the earlier layers. With `refine`, the SAE's
    activations are also measured after that many steps of refinement.
    """
    if refine:
        refuse_transcoder("--refine", is_transcoder=sae.is_transcoder)
    _refuse_other_rows(sae, source, folder, layer)
    timed, weights = timer(step, sae.W_dec.device), weights_of(folder)
    more = sae.levels, sae.refinement(refine)
    measured = layer or sae
    figures, data = rows.measure(
        measured, measured.reconstruct, sae.W_dec, source.place, *more, is_trained_on=is_trained_on
    )
    return Card(
        name=name,
        label=label,
        architecture=sae.architecture,
        step=step,
        tokens=sae.tokens,
        origin={fact: sae.metadata[fact] for fact in ORIGIN if fact in sae.metadata},
        data=data,
        figures=figures,
        sums=rows.sums,
        recovery=recovery(source, sae.W_dec),
        known=known_features(source, sae.W_dec, sae.encode),
        recipe=read_recipe(sae.metadata),
        threshold_set_on=str(sae.metadata.get(SET_ON, "")),
        training=from_metadata(sae.metadata),
        weights=weights,
        parts={ROWS: rows_part(timed, figures, data)},
    )


def _refuse_other_rows(sae: ExportedSae, source: Source, folder: Path, layer: LayerSae | None) -> None:
    """Raise `UserError` if the rows have the wrong width, a transcoder has no targets, or an SAE has targets."""
    if sae.is_transcoder and source.d_out is None:
        raise UsageError(f"--targets: is required, since {folder} is a transcoder; give the targets of the rows")
    if source.d_out is not None and not sae.is_transcoder:
        raise UsageError(f"--targets: {folder} is not a transcoder; leave it out")
    d_out = layer.d_out if layer else sae.W_dec.shape[1]
    wanted, there = (sae.d_in, d_out), (source.d_in, source.d_out or source.d_in)
    if wanted != there:
        shapes = [f"{d_in} to {d_out} dimensions" for d_in, d_out in (wanted, there)]
        raise UserError(f"--data: the SAE in {folder} maps {shapes[0]}, but {source.place} has {shapes[1]}")
    if source.part_widths:
        refuse_other_parts(sae.parts, source.part_widths)
