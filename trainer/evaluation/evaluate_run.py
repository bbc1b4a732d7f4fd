"""Makes the cards of the SAEs of a run, or of one of its checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.activations.base import Source
from trainer.activations.open_source import continue_from, open_source
from trainer.checkpoints.checkpoint import load, usable
from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths
from trainer.contract.progress import advance, stage
from trainer.contract.runs.card_versions import of_weights, weights_of
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.runs.evaluation_time import LOADING
from trainer.contract.runs.report_card import (
    FIRES_ON,
    IN_MODEL,
    PART_TITLES,
    PROBES,
    PROMOTED,
    ROWS,
    Card,
    Figures,
    Part,
    Probing,
    Spliced,
)
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.hooks import ends_of
from trainer.contract.settings.job_file import load_extraction
from trainer.contract.settings.model_source import ModelKnobs
from trainer.contract.settings.shards import inspect_shards
from trainer.contract.settings.sources import SourceKnobs
from trainer.contract.settings.tokens_of_data import folder_of
from trainer.evaluation.card import rows_part, timer
from trainer.evaluation.contexts import MOST_ROWS, Text, acts_of, contexts_of, moved_alone, texts_of
from trainer.evaluation.evaluated_job import evaluated_job
from trainer.evaluation.figures import measure, recovery
from trainer.evaluation.probe_sets import read_sets
from trainer.evaluation.probing import DenseProbes, LabelledRows, probe, probe_rows
from trainer.evaluation.rows import Rows
from trainer.evaluation.rows_with_tokens import rows_with_tokens
from trainer.evaluation.spliced import SplicedModel, hook_of_data, job_of_data
from trainer.extraction.model_stream import job_of_stream
from trainer.extraction.token_bytes import read_tokens
from trainer.saes.sparse_acts import Acts
from trainer.sharing.saelens import exported_tokens
from trainer.training.export_checkpoint import checkpoint_of, how_far_of_sae, learners_of, output_of, recipe_of_run
from trainer.training.learner import Learner
from trainer.training.thresholds import SET_ON, threshold_facts


class Evaluation(NamedTuple):
    """An SAE's card, of which only the parts that were measured have an entry in `parts`, and the folder it belongs to.

    `features(n)` returns what `trainer.contract.runs.features` reads, with `n` texts for each latent, and its parts;
    with 0 only the tokens that latents promote. It is empty where the data does not tell its tokens.
    """

    folder: Path
    card: Card
    features: Callable[[int], tuple[dict[str, Tensor], dict[str, Part]]]


def evaluations_of(
    path: Path,
    device: torch.device,
    *,
    best: bool = False,
    model: str | None = None,
    n_tokens: int | None = None,
    n_sets: int = 0,
    keeps_rows: bool = False,
) -> Iterator[Evaluation]:
    """Evaluate each SAE of a run's newest or best checkpoint, or of the checkpoint `path`, one after the other.

    `model` is the job file of an extraction, or "auto" for the one that wrote the data or the model that streamed it:
    the SAE is then measured in its language model too, on about `n_tokens` (0: not), and probed on `n_sets` sets of
    texts that it reads. With `keeps_rows` rows are not measured again where the card in the folder has them of the same
    weights. Raise `UserError` where something cannot be read.
    """
    sets = read_sets(n_sets) if n_sets else []
    run_dir, checkpoint = checkpoint_of(path.absolute(), best)
    job = evaluated_job(RunPaths(run_dir).job_file)
    state, source = read_state(checkpoint), open_source(job)
    if job.data.held_out(source.n_tokens):
        # Rows are held out as they were in training, also where there are more now.
        continue_from(source, job, state.data_before)
    rows = Rows.of_hooks(source, job, device)
    knobs = [*job.hooks.values()]

    # The SAEs of a hook come one after the other.
    @functools.lru_cache(maxsize=1)
    def model_of_hook(hook: int) -> SplicedModel:
        stage(LOADING)
        return _language_model(str(model), knobs[hook], source.of_hook(hook), device, only_reads=bool(sets))

    @functools.lru_cache(maxsize=1)
    def probes_of_hook(hook: int) -> DenseProbes:
        stage(PART_TITLES[PROBES], sum(len(one.texts) for one in sets))
        read = model_of_hook(hook).last_rows
        return probe_rows([LabelledRows(one.name, read(one.texts), one.labels) for one in sets])

    tensors, position = load(checkpoint)
    with usable(checkpoint), contextlib.ExitStack() as stored:

        @functools.cache
        def texts_of_hook(hook: int) -> Path | None:
            return stored.enter_context(rows_with_tokens(knobs[hook], device))

        for label, learner in learners_of(job, tensors, state, device):
            own, of_hook = source.of_hook(learner.hook), rows[learner.hook]
            texts = partial(texts_of_hook, learner.hook)
            folder = output_of(run_dir) / label
            weights = weights_of(folder) if exported_tokens(folder) == position.tokens else ""
            version = of_weights(folder, weights, position.tokens) if keeps_rows and weights else None
            language_model = None if model is None else model_of_hook(learner.hook)
            parts: dict[str, Part] = {}
            begin = partial(timer, position.step, device)
            if version:
                data, figures = version.card.data, version.card.figures
            else:
                timed = begin()
                figures = _measure(learner, of_hook)
                data = of_hook.describe(own.place, figures.n_tokens, learner.sae.dimension_scales)
                parts[ROWS] = rows_part(timed, figures, data)
            spliced = _splice(language_model, learner, own, n_tokens, begin, parts)
            timed = begin()
            probing = _probe(probes_of_hook(learner.hook), learner) if sets else None
            if probing and language_model:
                settings = {"sets": probing.n_sets, "seeds": probing.n_seeds}
                parts[PROBES] = timed(probing.n_texts, "texts", model=language_model.name, settings=settings)
            card = Card(
                name=job.name,
                label=label,
                architecture=learner.architecture,
                step=position.step,
                tokens=position.tokens,
                origin=state.origin_of(label),
                data=data,
                figures=figures,
                sums=of_hook.sums if ROWS in parts else None,
                recovery=recovery(own, learner.sae.raw_decoder()),
                spliced=spliced,
                probing=probing,
                recipe=recipe_of_run(run_dir, state, label, learner.sae.d_in),
                threshold_set_on=str(threshold_facts(learner.sae).get(SET_ON, "")),
                training=how_far_of_sae(run_dir, job, label, state, is_transcoder=learner.sae.is_transcoder),
                weights=weights,
                parts=parts,
            )
            features = partial(_features, learner, of_hook, texts, language_model, begin)
            yield Evaluation(folder, card, features)


def _features(
    learner: Learner,
    rows: Rows,
    texts: Callable[[], Path | None],
    language_model: SplicedModel | None,
    begin: Callable[[], Callable[..., Part]],
    n_contexts: int,
) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Return what the latents fire on, and of a language model at hand what they promote, with the parts of both."""
    path = texts()
    if path is None or not path.is_dir():
        return {}, {}
    parts: dict[str, Part] = {}
    sae, timed = learner.sae, begin()
    moved = language_model.moved_tokens(sae.raw_decoder()) if language_model else {}
    if moved and language_model:
        parts[PROMOTED] = timed(len(sae.W_dec), "latents", model=language_model.name)
    stage(PART_TITLES[FIRES_ON], min(MOST_ROWS, inspect_shards(path).n_tokens))
    if not n_contexts:
        return moved_alone(moved, read_tokens(path)), parts
    timed = begin()
    contexts = contexts_of(
        partial(acts_of, learner), _counted(texts_of(path)), rows.outliers, len(sae.W_dec), n_contexts
    )
    if contexts is None:
        return {}, {}
    parts[FIRES_ON] = timed(contexts.n_rows, "rows", text=str(path), settings={"contexts": n_contexts})
    return contexts.tensors(sae.W_dec, read_tokens(path), moved), parts


def _counted(texts: Iterable[Text]) -> Iterator[Text]:
    for text in texts:
        yield text
        advance(len(text.x))


def _language_model(
    model: str, knobs: SourceKnobs, source: Source, device: torch.device, *, only_reads: bool
) -> SplicedModel:
    """Return the model that the data is of, with its text."""
    extraction = _extraction_of(knobs) if model == "auto" else load_extraction(model)
    hook = hook_of_data(extraction, source.meta)
    target = {"hook_name": source.meta.get("hook_name_out")}
    hook_out = None if source.d_out is None else hook_of_data(extraction, target)
    return SplicedModel(extraction, hook, device, hook_out, only_reads=only_reads)


def _extraction_of(knobs: SourceKnobs) -> ExtractJob:
    """Return the extraction that wrote the data, or that would store what a model streams."""
    if isinstance(knobs, ModelKnobs):
        return job_of_stream(knobs, [*dict.fromkeys(ends_of(knobs.hook))])
    if folder := folder_of(knobs):
        return job_of_data(folder)
    raise UserError("--model: the data is not of one extraction; give the job file of the one meant instead of auto")


def _splice(
    language_model: SplicedModel | None,
    learner: Learner,
    source: Source,
    n_tokens: int | None,
    begin: Callable[[], Callable[..., Part]],
    parts: dict[str, Part],
) -> Spliced | None:
    if language_model is None or not language_model.has_loss or n_tokens == 0:
        return None
    mean = source.meta.get("mean" if source.d_out is None else "mean_out")
    is_row = isinstance(mean, list) and len(mean) == learner.sae.d_out
    timed = begin()
    reconstruct = partial(_reconstruct, learner)
    spliced = language_model.measure(reconstruct, torch.tensor(mean) if is_row else None, n_tokens)
    settings = {"tokens": n_tokens, **language_model.settings}
    parts[IN_MODEL] = timed(spliced.n_tokens, "tokens", text=spliced.text, model=language_model.name, settings=settings)
    return spliced


def _reconstruct(learner: Learner, x: Tensor, y: Tensor) -> tuple[Acts, Tensor]:
    """Return the activations and the reconstruction [n, d_out] of raw rows x [n, d_in] with targets y [n, d_out]."""
    sae = learner.sae
    output = learner.forward(x * sae.x_scale, y * sae.y_scale)
    return output.acts, sae.raw(output.x_hat)


def _probe(dense: DenseProbes, learner: Learner) -> Probing:
    with torch.inference_mode():
        return probe(dense, lambda rows: acts_of(learner, rows).dense())


def _measure(learner: Learner, rows: Rows) -> Figures:
    sae = learner.sae
    try:
        batches = partial(rows.batches, sae.measuring_half)
        reconstruct = partial(_reconstruct, learner)
        return measure(reconstruct, batches, sae.raw_decoder(), rows.grouped, sae.dimension_scales)
    except ValueError as error:
        raise UserError(f"data: {error}") from None
