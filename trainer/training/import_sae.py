"""Imports an SAE from another tool as a run that can be evaluated, compared, exported and trained further."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.base import Source
from trainer.activations.open_source import open_source
from trainer.activations.training_data import open_data
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.contract.errors import UsageError, UserError
from trainer.contract.files import write_own
from trainer.contract.paths import RunPaths, working_folder
from trainer.contract.runs.card_versions import KS
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.import_check import ImportCheck
from trainer.contract.runs.latent_notes import LatentNote
from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.settings.architectures import HierarchicalTopKSettings
from trainer.contract.settings.hook_names import other_place
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, job_of
from trainer.parallel.base import Parallel
from trainer.sharing.base import NOTHING_GIVEN, Given, SharedSae, carry_labels, folder_of
from trainer.sharing.finding import find
from trainer.sharing.origins import origin_of
from trainer.sharing.parts import PARTS, SaePart, joined_paths, refuse_other_parts, scales_of_parts
from trainer.sharing.saelens import export_sae, origin
from trainer.training.import_check import check
from trainer.training.learner import Learner
from trainer.training.row_sample import RowSampler

CPU = torch.device("cpu")
# The tolerance within which a row of W_dec is considered to have unit norm.
_UNIT = 1e-3


class ImportResult(NamedTuple):
    """An import's result: the run folder, the format, this project's name for the architecture, and notes.

    `check` contains L0 and FVU on sample rows; `warnings` lists reasons why these values look wrong.
    """

    run_dir: Path
    form: str
    architecture: str
    notes: list[str]
    check: ImportCheck
    warnings: list[str]


def import_sae(
    name: Path,
    run_dir: Path,
    data: Sequence[str],
    overrides: Sequence[str],
    form: str | None = None,
    given: Given = NOTHING_GIVEN,
) -> ImportResult:
    """Create the folder of a finished run, with the SAE as its first checkpoint and as its exported SAE.

    `name` is the SAE's folder, file or hub name. `data` is the path of activations that resemble the SAE's training
    data; they determine the scale for further training and are used for evaluations. A crosscoder needs a path for each
    of its parts. `overrides` contains job settings.
    Raise `UserError` if the SAE or the data cannot be read.
    """
    found = find(name, form)
    shared = found.read(given)
    job = _job(shared, name, data, overrides)
    source = _open(job, shared)
    learner = Learner(job, source.d_in, source.d_out, Parallel(CPU))
    x, y = _sample(source, job)
    learner.initialise(x, y)
    if shared.parts:
        _keep_scales(learner, x, shared.parts)
    _set_weights(learner, shared)
    checked, doubts = check(learner, shared, x, y, partial(_set_weights, learner))
    facts = origin(source.meta) | origin_of(shared.metadata)
    if shared.parts:
        facts[PARTS] = [part.facts() for part in shared.parts]
    _write(job, run_dir, learner, facts | {"imported_from": found.form})
    strange = other_place(shared.metadata, source.meta)
    moved = partial(_moved, shared.metadata.get("training_tokens"))
    left = carry_labels(folder_of(found.place), run_dir / "sae", moved=moved)
    notes = [*([strange] if strange else []), *shared.notes, *_notes(learner), *left]
    return ImportResult(run_dir, found.form, learner.architecture, notes, checked, doubts)


def _moved(tokens: Any, note: LatentNote) -> LatentNote:
    """Return a note for the imported SAE, whose tokens are counted from 0; a note about other weights stays as it is.

    `tokens` is the number of tokens that the SAE was trained on, None if unknown.
    """
    is_of_weights = tokens is None or note.tokens in (None, tokens)
    return msgspec.structs.replace(note, tokens=0) if is_of_weights else note


def _job(shared: SharedSae, folder: Path, data: Sequence[str], overrides: Sequence[str]) -> JobConfig:
    """Return the job that would have trained an SAE like this on the data."""
    sae: dict[str, Any] = {"architecture": _architecture(shared), "d_sae": shared.d_sae}
    if shared.k is not None:
        sae["k"] = shared.k
    if n_levels := _n_levels(shared):
        sae |= {"architecture": "hierarchical_topk", "n_levels": n_levels}
    if shared.has_skip:
        sae["skip"] = True
    name = "".join(one if one.isprintable() else "?" for one in folder.absolute().name)[:60]
    raw: dict[str, Any] = {"name": name or "imported", "data": joined_paths(data), "sae": dict(sae)}
    job = job_of(raw, overrides).with_paths([working_folder()])
    changed = [name for name, value in sae.items() if _setting(job, name) != value]
    if job.data.drop_dimensions:
        raise UsageError("--set data.drop_dimensions: the SAE reads all dimensions; leave it out")
    if changed or job.sweep:
        raise UsageError(f"--set sae.{(changed or ['*'])[0]}: is fixed by the SAE and cannot be changed; leave it out")
    return job


def _setting(job: JobConfig, name: str) -> object:
    return getattr(job.sae, name) if hasattr(job.sae, name) else getattr(job.sae.settings, name)


def _n_levels(shared: SharedSae) -> int:
    """Return how many k values a TopK SAE was trained for; 0 if it was trained for one, or with another largest k."""
    stated = shared.metadata.get(KS)
    if shared.form != "topk" or shared.k is None or not isinstance(stated, list):
        return 0
    n = len(stated)
    return n if 1 <= n <= 16 and stated == list(HierarchicalTopKSettings(k=shared.k, n_levels=n).ks) else 0


def _architecture(shared: SharedSae) -> str:
    """Return this project's name for the architecture.

    A JumpReLU SAE that was trained as BatchTopK, with a single threshold and a known k, is called "batch_topk" here.
    """
    if shared.trained_as == "batch_topk" and shared.form == "jumprelu" and shared.k is not None:
        threshold = shared.weights["threshold"]
        if (threshold == threshold[0]).all():
            return "batch_topk"
    # Architectures without a k have the same name here and in SAELens.
    return shared.form


def _open(job: JobConfig, shared: SharedSae) -> Source:
    source = open_source(job)
    if source.d_in != shared.d_in:
        raise UsageError(f"--data: has rows of {source.d_in} dimensions, but the SAE reads {shared.d_in}")
    refuse_other_parts(shared.parts, source.part_widths)
    if shared.is_transcoder and source.d_out is None:
        raise UsageError("--set data.target_path: is missing, but a transcoder needs target rows")
    if (source.d_out or source.d_in) != shared.d_out or (source.d_out is not None) != shared.is_transcoder:
        raise UsageError(
            f"--set data.target_path: does not fit, since the SAE maps {shared.d_in} to {shared.d_out} dimensions"
        )
    return source


def _sample(source: Source, job: JobConfig) -> tuple[Tensor, Tensor]:
    sampler = RowSampler(open_data(source, job, Parallel(CPU)).of_hook(0), CPU)
    sampler.find_outliers(job)
    return sampler.sample(job.train.seed)


@torch.no_grad()
def _keep_scales(learner: Learner, x: Tensor, parts: Sequence[SaePart]) -> None:
    """Restore the ratios between the scales of a crosscoder's parts, so that its decoder rows and FVU stay the same."""
    sae = learner.sae
    scales = (scales_of_parts(parts) * sae.acts_scale).float()
    for mean in (sae.x_mean, sae.y_mean):
        mean.mul_(scales / sae.x_scale)
    for own in (sae.x_scale, sae.y_scale):
        own.copy_(scales)
    sae.y_variance.copy_((x * scales - sae.y_mean).square().sum(dim=1).mean())


@torch.no_grad()
def _set_weights(learner: Learner, shared: SharedSae) -> None:
    """Set weights that compute the same function on normalised data; this is the inverse of `Sae.export_weights`."""
    sae, scale = learner.sae, learner.sae.acts_scale
    x_scale, y_scale = sae.x_scale.reshape(-1, 1), sae.y_scale
    encoder = shared.weights["W_enc"] * (scale / x_scale)
    # Only a transcoder's encoder reads x − x_mean.
    shift = sae.x_mean @ encoder if sae.is_transcoder else 0
    own = {"W_enc": encoder, "b_dec": shared.weights["b_dec"] * y_scale}
    own["W_dec"] = shared.weights["W_dec"] * (y_scale / scale)
    own["b_enc"] = shared.weights["b_gate" if "b_gate" in shared.weights else "b_enc"] * scale + shift
    if shared.has_skip:
        own["W_skip"] = shared.weights["W_skip"].T * (y_scale / x_scale)
        own["b_dec"] = own["b_dec"] + sae.x_mean @ own["W_skip"]
    own |= {name: shared.weights[name] * scale for name in ("threshold", "b_mag") if name in shared.weights}
    own |= {name: shared.weights[name] for name in ("r_mag",) if name in shared.weights}
    for name, value in own.items():
        place = getattr(sae, name)
        place.copy_(value if value.shape == place.shape else value[0])
        if not place.isfinite().all():
            raise UserError(
                f"--data: {name} overflows fp32 at the scale of the rows; use rows that resemble its training rows"
            )


def _write(job: JobConfig, run_dir: Path, learner: Learner, facts: dict[str, Any]) -> None:
    """Write a finished run's files; if any write fails, remove all of them."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UsageError(f"--out: {run_dir} already exists; choose another folder")
    RunPaths(run_dir).create()
    try:
        _fill(job, RunPaths(run_dir), learner, facts)
    except BaseException:
        # The folder was empty or did not exist before.
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _fill(job: JobConfig, paths: RunPaths, learner: Learner, facts: dict[str, Any]) -> None:
    tensors = {f"/{name}": value for name, value in learner.state.tensors()}
    d_out = learner.sae.d_out if learner.sae.is_transcoder else None
    Checkpoints(paths.checkpoints, d_out=d_out, origin=facts).save(tensors, Position(0, 0))
    output = paths.root / "sae"
    with learner.evaluating():
        training = {"training_architecture": learner.architecture, "training_tokens": 0}
        export_sae(learner.sae, output, facts | training)
    write_spec(RankSpec(paths.root, output, attempt=1, world_size=1, device="cpu"))
    write_own(paths.job_file, dump_job(job))


def _notes(learner: Learner) -> list[str]:
    """Return notes on changes that the first step of further training would make."""
    lengths = learner.sae.W_dec.detach().norm(dim=1)
    if learner.sae.traits.unit_decoder and (lengths - 1).abs().max() > _UNIT:
        return ["its decoder rows do not have norm 1; further training would normalise them at its first step"]
    return []
