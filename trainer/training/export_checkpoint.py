"""Exports the SAEs in a checkpoint for other tools."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.checkpoints.checkpoint import load, usable
from trainer.contract.errors import JobFileError, Problem, UsageError, UserError
from trainer.contract.paths import RunPaths
from trainer.contract.planning.workload import Layout
from trainer.contract.progress import stage, track
from trainer.contract.runs.card_versions import FOLDER as VERSIONS
from trainer.contract.runs.card_versions import weights_of
from trainer.contract.runs.checkpoint_manifest import (
    MANIFEST,
    STATE,
    CheckpointState,
    Position,
    best_first,
    damage,
    newest_first,
    newest_whole,
    read_state,
)
from trainer.contract.runs.explanations import EXPLANATIONS
from trainer.contract.runs.features import CARD, FEATURES, STABILITY
from trainer.contract.runs.how_far import HowFar, exported_tokens, of_state
from trainer.contract.runs.latent_notes import NOTES
from trainer.contract.runs.recipe import Recipe, recipe_of
from trainer.contract.runs.report_card import TWINS, Card, read_card
from trainer.contract.runs.resume import last_spec, stored_job
from trainer.contract.runs.row_sums import SUMS
from trainer.contract.runs.run_job import load_run_job
from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.following import decay_fraction
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.schedule import Schedule
from trainer.contract.settings.series import held_out, measured_names
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.seeds import by_seeds
from trainer.contract.store.twins import without_twins
from trainer.parallel.base import Parallel
from trainer.saes.topk import TopK
from trainer.sharing.base import BELOW_K, MODEL_CARD, Firings, Format, SharedSae, carry_labels, shared_form
from trainer.training.export_saes import training_facts
from trainer.training.learner import Learner, layer_in
from trainer.training.sharded_state import under

CPU = torch.device("cpu")


NOTHING: Mapping[str, float] = MappingProxyType({})
FiringsOf = Callable[[Learner], Firings] | None


def export_checkpoint(
    path: Path,
    out: Path,
    *,
    form: str,
    best: bool,
    force: bool,
    only: Sequence[str] = (),
    k: int | None = None,
    firings: Callable[[JobConfig], FiringsOf] = lambda job: None,
) -> dict[str, Any]:
    """Export every SAE in a checkpoint, or in a run's newest or best checkpoint; return the step and the output paths.

    `path` is a checkpoint or a run folder, and `form` is a format's name. With `only`, just the SAEs with these labels
    are written. Otherwise, only one of the SAEs that differ only in the seed is written. `k` replaces the k of SAEs
    that are trained for several k. For a given job, `firings` returns a function that finds the tokens in the job's
    data on which an SAE's latents fire. Under `left_out`, the result lists the SAEs that the format cannot represent,
    with the reason for each label. Raise `UserError` if the format can represent none of the SAEs, and `JobFileError`
    if a flag is invalid.
    """
    run_dir, checkpoint = checkpoint_of(path.absolute(), best)
    chosen: Format = catalog.entry(catalog.FORMATS, form, "--format").load()()
    job = load_run_job(RunPaths(run_dir).job_file)
    # Follow a symbolic link given as --out, but no links inside its target folder.
    out = out.resolve() if out.is_symlink() else out.absolute()
    state = read_state(checkpoint)
    labels = labels_of(job, only, kept_in(output_of(run_dir), state.position), state.halved.dropped)
    if k is not None:
        if out.resolve() == output_of(run_dir).resolve():
            raise UsageError("--out: is the run's own SAE, which keeps its k; choose another folder")
        _refuse_k(k, {label: member for label, member in members(job).items() if label in labels})
    folders = {label: out / label if label else out for label in labels}
    refuse_to_overwrite(out, folders, force)
    stage("reading the checkpoint")
    tensors, position = load(checkpoint)
    notes = dict.fromkeys(notes_on_unfinished(run_dir, job, state))
    notes |= dict.fromkeys(notes_on_others(job, labels, only, state.halved.dropped))
    firings_of = firings(job.replace("train", precision="fp32")) if chosen.needs_firings else None
    with usable(checkpoint):
        saes = partial(shared_saes, run_dir, job, tensors, state, firings_of, k=k)
        left_out = {label: reason for label, sae in saes([*folders]) if (reason := chosen.refusal(sae))}
        refuse_where_none_fits(form, left_out, folders)
        folders = {label: folder for label, folder in folders.items() if label not in left_out}
        for label, sae in track(saes([*folders]), "writing", len(folders)):
            notes |= dict.fromkeys(chosen.write(sae, folders[label]))
            _remove_other_formats(chosen, folders[label])
            if chosen.has_labels:
                # An SAE that has features is the run's own SAE, with its own k.
                source, is_own = output_of(run_dir) / label, sae.features is not None
                notes |= dict.fromkeys(carry_labels(source, folders[label], has_same_weights=is_own))
    notes |= dict.fromkeys(f"{label} is not written: {reason}" for label, reason in left_out.items())
    return {
        "checkpoint": str(checkpoint),
        "step": position.step,
        "output_path": str(out),
        **({"saes": {label: str(folder) for label, folder in folders.items()}} if job.sweep else {}),
        **({"left_out": left_out} if left_out else {}),
        **({"notes": list(notes)} if notes else {}),
    }


def _refuse_k(k: int, jobs: Mapping[str, JobConfig]) -> None:
    """Raise `UsageError` if an SAE is not trained for several k, or only for smaller ones."""
    for label, job in jobs.items():
        of_label = f" of {label}" if label else ""
        settings = job.sae.settings
        if not settings.ks:
            needed = 'only SAEs with sae.architecture = "hierarchical_topk" are trained for several k'
            raise UsageError(f"--k: the SAE{of_label} is trained for a single k, {settings.n_active}; {needed}")
        if not 1 <= k <= settings.ks[-1]:
            raise UsageError(f"--k: must be from 1 to the k{of_label}, {settings.ks[-1]}, not {k}")


def kept_in(output: Path, position: Position) -> Callable[[str], bool]:
    """Return a function that says whether the SAE with a given label was exported at `position`.

    SAEs whose training failed are not exported.
    """
    return lambda label: exported_tokens(output / label) == position.tokens


def notes_on_others(
    job: JobConfig, written: Sequence[str], only: Sequence[str], dropped: Collection[str]
) -> Iterator[str]:
    """Yield a note if SAEs are not written because they are random twins or differ only in the seed."""
    labels = [label for label in members(job) if label not in dropped]
    trained = without_twins(labels)
    others = [label for label in trained if label not in written and not only]
    if others:
        yield f"only one seed is written; write another one with --only {others[0]}"
    twins = [label for label in labels if label not in trained and not only]
    if twins:
        yield f"random twins are not written; write one with --only {twins[0]}"


def labels_of(
    job: JobConfig, only: Sequence[str], is_kept: Callable[[str], bool], dropped: Mapping[str, float] = NOTHING
) -> list[str]:
    """Return the labels of a job's SAEs, limited to `only` if given; raise `JobFileError` for an unknown label.

    The SAEs in `dropped` have no weights, so they cannot be chosen. Without `only`, leave out random twins, and select
    one of the SAEs that differ only in the seed: the lowest seed whose training did not fail (`is_kept` is true), or
    the lowest seed if all failed.
    """
    labels = [label for label in members(job) if label not in dropped]
    if only and not job.sweep:
        raise JobFileError([Problem("--only", "this run has a single SAE, without a label; leave out --only")])
    if gone := [f"{one} was dropped at step {dropped[one]} (train.halving)" for one in only if one in dropped]:
        raise JobFileError([Problem("--only", f"{each}; the SAEs are {', '.join(labels)}") for each in gone])
    unknown = [Problem("--only", f"no SAE is called {one}; the SAEs are {', '.join(labels)}") for one in only]
    if wrong := [problem for problem, one in zip(unknown, only, strict=True) if one not in labels]:
        raise JobFileError(wrong)
    chosen = only or [next(filter(is_kept, group), group[0]) for group in by_seeds(without_twins(labels)).values()]
    return [label for label in labels if label in chosen]


def refuse_where_none_fits(form: str, left_out: Mapping[str, str], asked: Collection[str]) -> None:
    """Raise `UserError` if a format can represent none of the requested SAEs."""
    if len(left_out) < len(asked):
        return
    if "" in left_out:
        raise UsageError(f"--format: {left_out['']}")
    reasons = "; ".join(f"{label}: {reason}" for label, reason in left_out.items())
    raise UserError(f"--format: {form} cannot represent any of these SAEs, so nothing is written ({reasons})")


def how_far_of(
    run_dir: Path,
    job: JobConfig,
    state: CheckpointState,
    measured: Mapping[str, float] = NOTHING,
    *,
    is_transcoder: bool,
) -> HowFar | None:
    """Return a run's progress at a checkpoint, with the metrics `measured` at that step; None at step 0."""
    step, tokens = state.position.step, state.position.tokens
    if not step:
        return None
    planned = job.train.n_steps or -(-job.train.n_tokens // (tokens // step))
    kind = catalog.entry(catalog.OPTIMIZERS, job.train.optimizer, "train.optimizer").load()
    falls = decay_fraction(job, is_transcoder=is_transcoder)
    schedule = None if kind.is_schedule_free else Schedule(planned, job.train.warmup_fraction, falls)
    newest = newest_first(RunPaths(run_dir).checkpoints)
    is_last = not newest or newest[0].name == f"step-{step:08d}"
    return msgspec.structs.replace(of_state(state, schedule, planned, measured), is_last=is_last)


def how_far_of_sae(
    run_dir: Path, job: JobConfig, label: str, state: CheckpointState, *, is_transcoder: bool
) -> HowFar | None:
    """Return an SAE's training progress at a checkpoint, with the metrics measured when it was saved."""
    if job.sweep:
        # A sweep's best FVU is a mean over its SAEs, so it does not describe a single SAE.
        state = msgspec.structs.replace(state, best=msgspec.UNSET)
    measured = _read_measurements(run_dir, state.position.step, label if job.sweep else "")
    return how_far_of(run_dir, members(job)[label], state, measured, is_transcoder=is_transcoder)


def notes_on_unfinished(run_dir: Path, job: JobConfig, state: CheckpointState) -> Iterator[str]:
    """If the run is unfinished, yield a note saying so and, for its last checkpoint, how to finish the run."""
    how_far = how_far_of(run_dir, job, state, is_transcoder=state.d_out is not None)
    if how_far and how_far.unfinished:
        yield f"{how_far.unfinished}{f': {_resume(run_dir)} --finish' * how_far.is_last}"


def _resume(run_dir: Path) -> str:
    """Return the command that resumes a run."""
    with contextlib.suppress(UserError):
        if (job_id := last_spec(run_dir).job_id) is not None:
            return f"sae-tui resume {job_id}"
    return f"sae-train resume {run_dir}"


def shared_saes(
    run_dir: Path,
    job: JobConfig,
    tensors: dict[str, Tensor],
    state: CheckpointState,
    firings_of: FiringsOf,
    labels: Collection[str],
    k: int | None = None,
) -> Iterator[tuple[str, SharedSae]]:
    """Yield the label of each SAE, and the SAE in its export form with its metrics and training facts.

    `k` replaces the k of SAEs that are trained for several k.
    """
    position, output = state.position, output_of(run_dir)
    for label, learner in learners_of(job, tensors, state, labels=labels):
        has_other_k = k is not None and k != learner.k
        training = training_facts(learner, position, recipe_of_run(run_dir, state, label, learner.sae.d_in, k))
        how_far = how_far_of_sae(run_dir, job, label, state, is_transcoder=learner.sae.is_transcoder)
        if how_far:
            # The best held-out FVU of the run is that of the SAE's own k.
            training |= (msgspec.structs.replace(how_far, best=None) if has_other_k else how_far).metadata()
        measured = _read_measurements(run_dir, position.step, label if job.sweep else "")
        of_these_weights = exported_tokens(output / label) == position.tokens
        # The max-activating examples and the twins' figures are those at the SAE's own k.
        features = output / label / FEATURES if of_these_weights and not has_other_k else None
        card = read_card(output / label) if of_these_weights else None
        if card and card.stability:
            # Decoder directions do not depend on k, but the activations do.
            no_rows: dict[str, Any] = {"firing_correlation": None, "n_rows": 0, "rows": ""} if has_other_k else {}
            training[STABILITY] = msgspec.to_builtins(msgspec.structs.replace(card.stability, **no_rows))
        is_topk = isinstance(learner.sae, TopK) and not ARCHITECTURES[learner.architecture].per_batch
        if card and card.data.is_held_out and is_topk and not has_other_k:
            training[BELOW_K] = card.figures.l0_below_most
        if card and card.twins and not has_other_k:
            training[TWINS] = msgspec.to_builtins(card.twins)
        if has_other_k:
            measured = _held_out_at(k, card, output / label) if card else {}
        own = learner.k if k is None else k
        with learner.sae.using(own) if isinstance(learner.sae, TopK) else contextlib.nullcontext():
            sae = shared_form(learner.sae, state.origin_of(label) | training | measured, own, features)
            yield label, sae._replace(firings=partial(firings_of, learner)) if firings_of else sae


def _held_out_at(k: int | None, card: Card, folder: Path) -> dict[str, float]:
    """Return the held-out FVU at a k on the report card of the SAE in a folder, or {} if it was not measured."""
    if not card.data.is_held_out or card.weights not in ("", weights_of(folder)):
        return {}
    return {held_out("fvu"): at.fvu for at in card.figures.by_k if at.k == k and math.isfinite(at.fvu)}


def recipe_of_run(run_dir: Path, state: CheckpointState, label: str, d_in: int, k: int | None = None) -> Recipe | None:
    """Return an SAE's training recipe up to a checkpoint; None at step 0, or if the recipe is unknown.

    `k` replaces the target L0 if it is given.
    """
    with contextlib.suppress(UserError):
        if (position := state.position).step:
            # The number of tokens per step does not depend on the number of ranks.
            own = stored_job(run_dir, []).replace("train", global_batch_size=position.tokens // position.step)
            of = Layout(own, 1), members(own)[label], position, d_in
            facts: dict[str, Any] = {"is_transcoder": state.d_out is not None, "n_rows": state.n_train_rows}
            recipe = recipe_of(*of, **facts, device=_device_of(run_dir))
            return recipe if k is None else msgspec.structs.replace(recipe, target_l0=k)
    return None


def _device_of(run_dir: Path) -> str:
    """Return the device type of a run's ranks, or of this process if the run was started from Python."""
    with contextlib.suppress(UserError):
        return last_spec(run_dir).device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _remove_other_formats(chosen: Format, folder: Path) -> None:
    """Remove the files left by an earlier export in another format, so that the folder does not contain two SAEs.

    Keep files whose names match a format's pattern, since they may belong to other SAEs of a set.
    """
    names = {name for other in catalog.FORMATS.values() for name in other.load().files if "*" not in name}
    for name in names - {*chosen.files}:
        (folder / name).unlink(missing_ok=True)


def output_of(run_dir: Path) -> Path:
    """Return the folder for a run's exported SAEs."""
    with contextlib.suppress(UserError):
        return last_spec(run_dir).output_dir
    return run_dir / "sae"


def checkpoint_of(path: Path, best: bool) -> tuple[Path, Path]:
    """Return the run folder and the checkpoint for `path`, which may be a run folder or a checkpoint."""
    if (path / STATE).exists() or (path / MANIFEST).exists():
        if best:
            raise JobFileError([Problem("--best", f"requires a run folder, but {path} is a single checkpoint")])
        return path.parent.parent, newest_whole(path)
    checkpoints = RunPaths(path).checkpoints
    if not RunPaths(path).job_file.exists():
        reason = f"{path} is neither a run folder nor a checkpoint in a run folder"
        raise JobFileError([Problem("RUN_DIR_OR_CHECKPOINT", reason)])
    saved = newest_first(checkpoints)
    if not saved:
        raise UserError(f"nothing to export: no checkpoint was saved in {checkpoints}")
    return path, _best(saved) if best else newest_whole(checkpoints)


def _best(checkpoints: list[Path]) -> Path:
    for folder in best_first(checkpoints):
        if damage(folder) is None:
            return folder
    raise UserError(
        f"--best: no complete checkpoint in {checkpoints[0].parent} has a held-out FVU; leave out --best for the newest"
    )


def refuse_to_overwrite(out: Path, folders: dict[str, Path], force: bool) -> None:
    """Raise an error if an output folder is not empty; with `force`, accept folders that contain only exported SAEs."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out.parent} cannot be created: {error.strerror}; choose another folder") from None
    there = [folder for folder in folders.values() if folder.exists()]
    if there and not force and any(folder.is_file() or any(folder.iterdir()) for folder in there):
        raise UsageError(f"--out: {there[0]} already exists; choose another folder or give --force")
    for folder in there:
        if other_users := [folder.name] if folder.is_file() else _other_users(folder):
            raise UsageError(
                f"--out: {folder} contains other files ({other_users[0]}), so it is not replaced; choose another folder"
            )


def _other_users(folder: Path) -> list[str]:
    """Return the names of the files in a folder that did not come from an export."""
    ours = [CARD, FEATURES, NOTES, EXPLANATIONS, SUMS, MODEL_CARD, VERSIONS]
    for entry in catalog.FORMATS.values():
        ours += entry.load().files
    return [item.name for item in folder.iterdir() if not any(fnmatchcase(item.name, one) for one in ours)]


def learners_of(
    job: JobConfig,
    tensors: dict[str, Tensor],
    state: CheckpointState,
    device: torch.device = CPU,
    labels: Collection[str] | None = None,
) -> Iterator[tuple[str, Learner]]:
    """Yield the label and the learner of each SAE, or only of the SAEs in `labels`; the learner is in its export form.

    SAEs that have been dropped are left out. Only one learner is in memory at a time.
    """
    for label, member in members(job).items():
        if label in state.halved.dropped or (labels is not None and label not in labels):
            continue
        own = under(tensors, f"{label}/")
        layer = layer_in(job, member)
        d_in = _fitting_width(member, own, state.d_out, layer.n_targets if layer else 1)
        learner = Learner(member, d_in, state.d_out, Parallel(device), job.hook_number(member), layer)
        learner.state.load(own)
        with learner.evaluating():
            yield label, learner


def _fitting_width(job: JobConfig, tensors: dict[str, Tensor], d_out: int | None, n_targets: int) -> int:
    """Return an SAE's d_in; raise `UserError` if the shapes in the checkpoint do not fit the job."""
    d_in, *_ = tensors["sae.W_enc"].shape
    d_sae = job.sae.width(d_in)
    for name, wanted in (("W_enc", (d_in, d_sae)), ("W_dec", (d_sae, d_in if d_out is None else n_targets * d_out))):
        if (shape := tuple(tensors[f"sae.{name}"].shape)) != wanted:
            raise UserError(f"the checkpoint does not fit this job's SAE: {name} is {shape} instead of {wanted}")
    return d_in


def _read_measurements(run_dir: Path, step: int, label: str) -> dict[str, float]:
    """Return the metrics measured at a checkpoint's step, or an empty dict if the metrics store cannot be read."""
    values: dict[str, float] = {}
    with contextlib.suppress(StoreError), contextlib.closing(SeriesReader(RunPaths(run_dir).metrics_db)) as reader:
        for name in measured_names():
            points = reader.points(f"{name}@{label}" if label else name, after=step - 1)
            if points and points[0].step == step and points[0].value is not None:
                values[name] = points[0].value
    return values
