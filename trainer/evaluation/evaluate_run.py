"""Makes the cards of the SAEs of a run, or of one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.base import Pair, Source, on_device
from trainer.activations.outliers import Outliers
from trainer.activations.training_data import TrainingData, are_finite, open_data
from trainer.checkpoints.checkpoint import load, usable
from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import load_extraction, load_job
from trainer.contract.settings.toml import read_plain_text
from trainer.evaluation.card import Card, Data
from trainer.evaluation.contexts import contexts_of, texts_of
from trainer.evaluation.figures import Figures, measure, recovered
from trainer.evaluation.spliced import Spliced, SplicedModel, hook_of_data, job_of_data
from trainer.extraction.meta import TOKENS
from trainer.parallel.base import Parallel
from trainer.saes.sparse_acts import Acts
from trainer.training.export_checkpoint import checkpoint_of, learners_of, output_of
from trainer.training.learner import Learner
from trainer.training.row_sample import Sampler

# Rows that pass through an SAE at once.
_BATCH = 1024


class Rows:
    """The rows to measure on: those that a run has held back, or else a sample of those it was trained on.

    Rows that are not finite and outliers are left out and counted each time that `batches` goes through them.
    """

    def __init__(self, source: Source, job: JobConfig, device: torch.device) -> None:
        self._data: TrainingData = open_data(source, job, Parallel(device))
        self.outliers: Outliers = Sampler(self._data, device).find_outliers(job.train.seed, job.data.max_norm)
        self._device, self._seed = device, job.train.seed
        self.is_held_out = self._data.n_held_out > 0
        self.n_not_finite = self.n_outliers = 0

    def batches(self) -> Iterator[Pair]:
        """Yield inputs and targets, fp32 on the device; the same ones every time."""
        self.n_not_finite = self.n_outliers = 0
        for x, y in self._stored():
            finite = are_finite(x, y)
            inputs = x[finite]
            ordinary = self.outliers.leave_out(*on_device((inputs, inputs if y is x else y[finite]), self._device))
            self.n_not_finite += len(x) - len(inputs)
            self.n_outliers += len(inputs) - len(ordinary[0])
            if len(ordinary[0]):
                yield ordinary

    def _stored(self) -> Iterator[Pair]:
        if self.is_held_out:
            yield from self._data.held_out(_BATCH)
            return
        x, y = self._data.sample(self._seed)
        for first in range(0, len(x), _BATCH):
            inputs = x[first : first + _BATCH]
            yield inputs, inputs if y is x else y[first : first + _BATCH]


class Evaluation(NamedTuple):
    """An SAE's card, and the folder that it belongs into.

    `features(n)` returns what `trainer.contract.runs.features` reads, with `n` texts for each latent; None where the
    data does not tell its tokens.
    """

    folder: Path
    card: Card
    features: Callable[[int], dict[str, Tensor] | None]


def evaluations_of(
    path: Path, device: torch.device, *, best: bool = False, model: str | None = None, n_tokens: int | None = None
) -> Iterator[Evaluation]:
    """Evaluate each SAE of a run's newest or best checkpoint, or of the checkpoint `path`, one after the other.

    `model` is the job file of an extraction, or "auto" for the one that wrote the data: the SAE is then measured in its
    language model too, on about `n_tokens`. Raise `UserError` where something cannot be read.
    """
    run_dir, checkpoint = checkpoint_of(path.absolute(), best)
    job = load_job(RunPaths(run_dir).job_file, read=read_plain_text).replace("train", precision="fp32")
    load_source = catalog.entry(catalog.SOURCES, job.data.source, "data.source").load()
    source: Source = load_source(**msgspec.structs.asdict(job.data.knobs))
    rows = Rows(source, job, device)
    language_model = None if model is None else _language_model(model, job, source, device)
    tensors, position = load(checkpoint)
    state = read_state(checkpoint)
    with usable(checkpoint):
        for label, learner in learners_of(job, tensors, state, device):
            figures = _measure(learner, rows)
            card = Card(
                name=job.name,
                label=label,
                architecture=learner.architecture,
                step=position.step,
                tokens=position.tokens,
                origin=state.origin,
                data=_describe(rows, source, job, figures.n_tokens),
                figures=figures,
                recovery=_recovery(source, learner),
                spliced=_splice(language_model, learner, source, n_tokens) if language_model else None,
            )
            yield Evaluation(output_of(run_dir) / label, card, partial(_features, learner, rows, job, language_model))


def _features(
    learner: Learner, rows: Rows, job: JobConfig, language_model: SplicedModel | None, n_contexts: int
) -> dict[str, Tensor] | None:
    """Return what the latents fire on, and of a language model at hand what they promote.

    None where the data does not tell its tokens.
    """
    sae, path = learner.sae, _folder_of(job)
    if path is None or not path.is_dir():
        return None

    def acts_of(x: Tensor) -> Acts:
        scaled = x.to(sae.W_dec.device) * sae.x_scale
        targets = scaled if sae.d_out == sae.d_in else scaled.new_zeros(len(x), sae.d_out)
        return learner.forward(scaled, targets).acts

    contexts = contexts_of(acts_of, texts_of(path), rows.outliers, len(sae.W_dec), n_contexts)
    if contexts is None:
        return None
    moved = language_model.moved_tokens(sae.W_dec) if language_model else {}
    return contexts.tensors(sae.W_dec, read_json(path / TOKENS, list[str]) or [], moved)


def _folder_of(job: JobConfig) -> Path | None:
    """Return the folder of the data; None where it has none, or several."""
    path = getattr(job.data.knobs, "path", None)
    paths = path if isinstance(path, list) else [path]
    return Path(str(paths[0])) if len(paths) == 1 and paths[0] else None


def _language_model(model: str, job: JobConfig, source: Source, device: torch.device) -> SplicedModel:
    """Return the model that the data was extracted from, with its text."""
    if source.d_out is not None:
        raise UserError("--model: a transcoder maps one hook to another, and is not spliced into a model")
    folder = _folder_of(job)
    if model == "auto" and folder is None:
        raise UserError(
            "--model: the data is not of one extraction; give the job file of the one meant instead of auto"
        )
    extraction = job_of_data(folder) if model == "auto" and folder else load_extraction(model)
    return SplicedModel(extraction, hook_of_data(extraction, source.meta), device)


def _splice(language_model: SplicedModel, learner: Learner, source: Source, n_tokens: int | None) -> Spliced:
    sae, mean = learner.sae, source.meta.get("mean")

    def reconstruct(x: Tensor) -> Tensor:
        scaled = x * sae.x_scale
        return learner.forward(scaled, scaled).x_hat / sae.y_scale

    is_row = isinstance(mean, list) and len(mean) == sae.d_in
    return language_model.measure(reconstruct, torch.tensor(mean) if is_row else None, n_tokens)


def _measure(learner: Learner, rows: Rows) -> Figures:
    sae = learner.sae

    def reconstruct(x: Tensor, y: Tensor) -> tuple[Acts, Tensor]:
        output = learner.forward(x * sae.x_scale, y * sae.y_scale)
        return output.acts, output.x_hat / sae.y_scale

    try:
        return measure(reconstruct, rows.batches, sae.W_dec)
    except ValueError as error:
        raise UserError(f"data: {error}") from None


def _describe(rows: Rows, source: Source, job: JobConfig, n_measured: int) -> Data:
    """Return what is known of the rows after they were gone through."""
    total, squares = torch.zeros(()), 0.0
    for x, _ in rows.batches():
        exact = x.double()
        total, squares = total.to(x.device) + exact.sum(0), squares + float(exact.square().sum())
    mean = float((total / n_measured).square().sum())
    return Data(
        place=source.place,
        is_held_out=rows.is_held_out,
        gamma=(mean / max(squares / n_measured - mean, 1e-300)) ** 0.5,
        outlier_fraction=rows.n_outliers / (n_measured + rows.n_outliers),
        not_finite=rows.n_not_finite,
        max_norm=job.data.max_norm,
    )


def _recovery(source: Source, learner: Learner) -> float | None:
    """Return the mean over known features of the largest cosine with a decoder direction; None where none is known."""
    features = getattr(source, "features", None)
    return None if features is None else recovered(features, learner.sae.W_dec)
