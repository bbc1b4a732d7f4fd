"""Creates report cards for the SAEs in a run or one of its checkpoints."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.base import IndexedSource, Source
from trainer.activations.open_source import continue_from, open_source
from trainer.activations.shards import Shards
from trainer.checkpoints.checkpoint import load, usable
from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths
from trainer.contract.progress import advance, stage
from trainer.contract.runs.card_versions import of_weights, weights_of
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.runs.evaluation_time import LOADING, READING, ROWS_READ_AGAIN
from trainer.contract.runs.features import ACTS_SCALE
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.report_card import (
    EFFECTS,
    FIRES_ON,
    IN_MODEL,
    PART_TITLES,
    PROBES,
    PROMOTED,
    ROWS,
    Card,
    Part,
    PatchedModel,
    Probing,
)
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.hooks import ends_of, is_of_transcoder
from trainer.contract.settings.job import HOOK, JobConfig
from trainer.contract.settings.job_file import load_as
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.shards import inspect_shards
from trainer.contract.settings.sources import SourceSettings
from trainer.contract.settings.tokens_of_data import folder_of
from trainer.evaluation.card import rows_part, timer
from trainer.evaluation.contexts import (
    MOST_ROWS,
    TokenRows,
    acts_of,
    contexts_of,
    joined_source,
    moved_alone,
    texts_of,
)
from trainer.evaluation.cross_layer import ExportedLayers, LayerSae
from trainer.evaluation.effects import effects_of
from trainer.evaluation.evaluated_job import evaluated_job
from trainer.evaluation.exported import ExportedSae
from trainer.evaluation.figures import Levels, Reconstruct, Refinement, recovery
from trainer.evaluation.known_features import known_features
from trainer.evaluation.probe_sets import TextSet, read_sets
from trainer.evaluation.probing import DenseProbes, LabelledRows, probe, probe_rows
from trainer.evaluation.rows import EvaluationRows
from trainer.evaluation.spliced import SplicedModel, hook_of_data, job_of_data
from trainer.extraction.extraction import extract
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.model_stream import job_of_stream, load_alike
from trainer.extraction.peers import Alone
from trainer.extraction.token_bytes import read_tokens
from trainer.saes.hierarchical_topk import HierarchicalTopK
from trainer.saes.refinement import refined_output, refuse_transcoder
from trainer.saes.sparse_acts import Acts
from trainer.sharing.base import shared_form
from trainer.training.export_checkpoint import checkpoint_of, how_far_of_sae, learners_of, output_of, recipe_of_run
from trainer.training.learner import Learner
from trainer.training.thresholds import SET_ON, threshold_facts


class Evaluation(NamedTuple):
    """An SAE's lazy evaluation, and the `folder` for its report card.

    `cards` yields the report card after each part, at least once; `card.parts` lists the parts measured so far.
    `features(n)` returns the tensors that `trainer.contract.runs.features` reads, and the parts measured for them. The
    tensors contain `n` texts for each latent, or only promoted tokens if n is 0. Both results are empty if the data's
    tokens are unknown. `rows` are the rows on which the SAE is measured.
    """

    folder: Path
    cards: Iterator[Card]
    features: Callable[[int], tuple[dict[str, Tensor], dict[str, Part]]]
    rows: EvaluationRows


def evaluations_of(
    path: Path,
    device: torch.device,
    *,
    best: bool = False,
    model: str | None = None,
    n_tokens: int | None = None,
    n_effect_tokens: int = 0,
    n_sets: int = 0,
    keeps_rows: bool = False,
    refine: int = 0,
    allows_code: bool = False,
) -> Iterator[Evaluation]:
    """Evaluate the SAEs in a run's latest or best checkpoint, or in the checkpoint `path`, one at a time.

    `model` is an extraction's job file, or "auto" for the extraction that wrote the data or the model that streams it.
    With `model`, each SAE is also measured in its language model, on about `n_tokens` tokens (0 skips this), the
    effects of its latents are measured on about `n_effect_tokens` tokens, and it is probed on `n_sets` data sets. With
    `keeps_rows`, rows are not remeasured if the report card in the folder has a measurement on rows for the same
    weights. With `refine`, activations are also measured after that many steps of refinement. Raise `UserError` if a
    file cannot be read.
    """
    sets = read_sets(n_sets) if n_sets else []
    run_dir, checkpoint = checkpoint_of(path.absolute(), best)
    job = evaluated_job(RunPaths(run_dir).job_file, allows_code=allows_code)
    state, source = read_state(checkpoint), open_source(job)
    if job.data.held_out(source.n_tokens):
        # The data may have grown, so hold out the same rows as in training.
        continue_from(source, job, state.data_before)
    rows = EvaluationRows.of_hooks(source, job, device)
    tensors, position = load(checkpoint)
    with usable(checkpoint), contextlib.ExitStack() as stored:
        hooks = _Hooks(job, source, device, model, sets, stored, has_effects=n_effect_tokens > 0)
        layers = None
        if job.n_layers > 1 or (model and is_transcoder_set(job)):
            # A learner is in its export form only until the next one is loaded.
            exported = [_exported(one, device) for _, one in learners_of(job, tensors, state, device)]
            layers = ExportedLayers(exported) if job.n_layers > 1 else None
            hooks.all_mlps = layers.in_turn() if layers else [one.reconstruct for one in exported]
        for label, learner in learners_of(job, tensors, state, device):
            number = learner.layer.number if learner.layer else learner.hook
            if refine:
                refuse_transcoder("--refine", is_transcoder=learner.sae.is_transcoder)
            folder = output_of(run_dir) / label
            weights = weights_of(folder) if exported_tokens(folder) == position.tokens else ""
            version = of_weights(folder, weights, position.tokens) if keeps_rows and weights else None
            begin = partial(timer, position.step, device)
            one = _PartTimer(learner, number, rows[number], hooks, begin, refine, layers)
            own = hooks.source(number)
            facts = {
                "name": job.name,
                "label": label,
                "architecture": learner.architecture,
                "step": position.step,
                "tokens": position.tokens,
                "origin": state.origin_of(label),
                "recovery": recovery(own, learner.sae.raw_decoder()),
                "known": known_features(own, learner.sae.raw_decoder(), partial(acts_of, learner)),
                "recipe": recipe_of_run(run_dir, state, label, learner.sae.d_in),
                "threshold_set_on": str(threshold_facts(learner.sae).get(SET_ON, "")),
                "training": how_far_of_sae(run_dir, job, label, state, is_transcoder=learner.sae.is_transcoder),
                "weights": weights,
            }
            cards = one.cards(facts, version.card if version else None, n_tokens, n_effect_tokens)
            yield Evaluation(folder, cards, one.features, rows[number])


class _Hooks:
    """Provides what all SAEs at a hook share: the language model, dense probes, and rows with their tokens.

    These objects are created on first use. The SAEs at a hook are evaluated consecutively, so only the latest model and
    probes stay in memory.
    """

    def __init__(
        self,
        job: JobConfig,
        source: Source,
        device: torch.device,
        model: str | None,
        sets: list[TextSet],
        stored: contextlib.ExitStack,
        *,
        has_effects: bool = False,
    ) -> None:
        self._settings, self._source, self._device = [*job.hooks.values()], source, device
        self._is_cross_layer = job.n_layers > 1
        self._model, self._sets, self._stored = model, sets, stored
        # Probes need no next-token loss; the effects of latents do.
        self._only_reads = bool(sets) and not has_effects
        self._loaded = functools.lru_cache(maxsize=1)(self._load_model)
        self.probes = functools.lru_cache(maxsize=1)(self._train_probes)
        self.texts = functools.cache(self._rows_with_tokens)
        # The functions that replace the outputs of all MLPs, in the order of their layers; empty for other SAEs.
        self.all_mlps: list[Reconstruct] = []
        self.together = functools.cache(self._measure_together)

    def source(self, hook: int) -> Source:
        return self._source.of_part(hook) if self._is_cross_layer else self._source.of_hook(hook)

    def model(self, hook: int) -> SplicedModel | None:
        """Return the language model behind a hook's data, with its text, or None without --model."""
        # One model replaces the outputs of all MLPs of a cross-layer transcoder.
        return self._loaded(0 if self._is_cross_layer else hook)

    def _load_model(self, hook: int) -> SplicedModel | None:
        if self._model is None:
            return None
        if self._is_cross_layer:
            return self._load_with_all_mlps()
        source = self.source(hook)
        if source.part_widths:
            raise UserError("--model: a crosscoder reconstructs several hooks or models at once; leave --model out")
        stage(LOADING)
        extraction = self._extraction([hook])
        at = hook_of_data(extraction, source.meta)
        target = {"hook_name": source.meta.get("hook_name_out")}
        hook_out = None if source.d_out is None else hook_of_data(extraction, target)
        return SplicedModel(extraction, at, self._device, hook_out, only_reads=self._only_reads)

    def _measure_together(self, n_tokens: int | None) -> PatchedModel | None:
        """Measure the language model with the outputs of all MLPs replaced; None if the SAEs are not a set of all."""
        if not self.all_mlps:
            return None
        model = self.model(0) if self._is_cross_layer else self._load_with_all_mlps()
        return model.measure(*self.all_mlps, n_tokens=n_tokens) if model else None

    def _load_with_all_mlps(self) -> SplicedModel:
        stage(LOADING)
        numbers = range(len(self._settings))
        extraction = self._extraction(numbers)
        (first, last), *others = [self._ends(extraction, number) for number in numbers]
        return SplicedModel(extraction, first, self._device, last, others=others, only_reads=self._only_reads)

    def _extraction(self, hooks: Sequence[int]) -> ExtractJob:
        if self._model == "auto":
            return _extraction_of([self._settings[hook] for hook in hooks])
        return load_as(ExtractJob, str(self._model))

    def _ends(self, extraction: ExtractJob, hook: int) -> tuple[str, str]:
        """Return the extraction's names of the hooks at an MLP's input and output."""
        meta = self.source(hook).meta
        return hook_of_data(extraction, meta), hook_of_data(extraction, {"hook_name": meta.get("hook_name_out")})

    def _train_probes(self, hook: int) -> DenseProbes | None:
        """Return probes on each data set's raw rows, or None without --probe."""
        model = self.model(hook)
        if model is None or not self._sets:
            return None
        stage(PART_TITLES[PROBES], sum(len(one.texts) for one in self._sets))
        at = hook if self._is_cross_layer else 0
        return probe_rows([LabelledRows(one.name, model.last_rows(one.texts, at), one.labels) for one in self._sets])

    def _rows_with_tokens(self, hook: int) -> _Texts | None:
        return self._stored.enter_context(_texts(self._settings[hook], self.source(hook), self._device))


class _PartTimer:
    """Measures one SAE in several parts, and times each part; `begin` starts the timer for a part."""

    def __init__(
        self,
        learner: Learner,
        hook: int,
        rows: EvaluationRows,
        hooks: _Hooks,
        begin: Callable[[], Callable[..., Part]],
        refine: int = 0,
        layers: ExportedLayers | None = None,
    ) -> None:
        self._learner, self._rows, self._hooks, self._begin, self._refine = learner, rows, hooks, begin, refine
        self._hook, self._layers = hook, layers
        self._part_tensors: dict[str, Tensor] = {}
        self._effects: dict[str, Tensor] = {}

    def cards(
        self, facts: Mapping[str, Any], kept: Card | None, n_tokens: int | None, n_effect_tokens: int = 0
    ) -> Iterator[Card]:
        """Yield the report card, including `facts`, after each part; if `kept` is given, reuse its metrics on rows."""
        learner, hooks = self._learner, self._hooks
        if kept:
            yield (card := Card(**facts, data=kept.data, figures=kept.figures))
        else:
            timed = self._begin()
            sae, place = learner.sae, hooks.source(self._hook).place
            more = _levels(learner), _refinement(learner, self._refine)
            layer = LayerSae(self._layers, self._hook) if self._layers else None
            reconstruct = layer.reconstruct if layer else partial(_reconstruct, learner)
            figures, data = self._rows.measure(layer or sae, reconstruct, sae.raw_decoder(), place, *more)
            self._part_tensors = self._rows.part_tensors
            card = Card(**facts, data=data, figures=figures, sums=self._rows.sums)
            yield (card := _with(card, ROWS, rows_part(timed, figures, data)))
        model = hooks.model(self._hook)
        if model and model.has_loss and n_tokens != 0:
            timed = self._begin()
            # The target of a layer of a cross-layer transcoder depends on the rows at earlier layers.
            spliced = None if self._layers else _splice(model, learner, hooks.source(self._hook), n_tokens)
            together = hooks.together(n_tokens)
            settings, read = {"tokens": n_tokens, **model.settings}, spliced or together
            assert read is not None
            part = timed(read.n_tokens, "tokens", text=read.text, model=model.name, settings=settings)
            yield (card := _with(card, IN_MODEL, part, spliced=spliced, together=together))
        timed = self._begin()
        if model and n_effect_tokens:
            effects, self._effects = effects_of(model, learner, n_effect_tokens)
            settings = {"tokens": n_effect_tokens, **model.settings}
            part = timed(effects.n_tokens, "tokens", text=effects.text, model=model.name, settings=settings)
            yield (card := _with(card, EFFECTS, part, effects=effects))
        timed = self._begin()
        if model and (dense := hooks.probes(self._hook)):
            probing = _probe(dense, learner)
            settings = {"sets": probing.n_sets, "seeds": probing.n_seeds}
            part = timed(probing.n_texts, "texts", model=model.name, settings=settings)
            yield _with(card, PROBES, part, probing=probing)

    def features(self, n_contexts: int) -> tuple[dict[str, Tensor], dict[str, Part]]:
        """Return tensors with the latents' texts (and promoted tokens, if there is a model), and the measured parts."""
        learner, texts = self._learner, self._hooks.texts(self._hook)
        if texts is None or not texts.folder.is_dir():
            return self._effects, {}
        path = texts.folder
        parts: dict[str, Part] = {}
        sae, timed, model = learner.sae, self._begin(), self._hooks.model(self._hook)
        if model:
            stage(PART_TITLES[PROMOTED])
        # All targets are added to the residual stream, so the sum over targets is a latent's direct effect.
        directions = sae.raw_decoder().unflatten(1, (sae.n_targets, -1)).sum(1)
        moved = model.moved_tokens(directions) if model else {}
        if moved and model:
            parts[PROMOTED] = timed(len(sae.W_dec), "latents", model=model.name)
        stage(PART_TITLES[FIRES_ON], min(MOST_ROWS, inspect_shards(path).n_tokens))
        if not n_contexts:
            return moved_alone(moved, read_tokens(path)) | self._effects, parts
        timed, outliers = self._begin(), self._rows.input_outliers
        read = _counted(texts_of(path, source=texts.source))
        contexts = contexts_of(partial(acts_of, learner), read, outliers, len(sae.W_dec), n_contexts)
        if contexts is None:
            return self._effects, {}
        parts[FIRES_ON] = timed(contexts.n_rows, "rows", text=str(path), settings={"contexts": n_contexts})
        tensors = contexts.tensors(sae.W_dec, read_tokens(path), moved)
        scale = {ACTS_SCALE: sae.acts_scale.reshape(1).cpu().float()}
        return tensors | self._part_tensors | self._effects | scale, parts


def _with(card: Card, name: str, part: Part, **figures: Any) -> Card:
    return msgspec.structs.replace(card, parts=card.parts | {name: part}, **figures)


def _counted(texts: Iterable[TokenRows]) -> Iterator[TokenRows]:
    for text in texts:
        yield text
        advance(len(text.x))


def _extraction_of(hooks: Sequence[SourceSettings]) -> ExtractJob:
    """Return the extraction that wrote the data or, for a streaming model, an extraction that would store its rows.

    `hooks` contains the settings of one data section for one or several of its hooks.
    """
    if isinstance(first := hooks[0], ModelSettings):
        ends = [end for one in hooks if isinstance(one, ModelSettings) for end in ends_of(one.hook)]
        return job_of_stream(first, [*dict.fromkeys(ends)])
    if folder := folder_of(first):
        return job_of_data(folder)
    raise UserError("--model: the data is not from one extraction; give an extraction's job file instead of auto")


def _splice(model: SplicedModel, learner: Learner, source: Source, n_tokens: int | None) -> PatchedModel:
    mean = source.meta.get("mean" if source.d_out is None else "mean_out")
    is_row = isinstance(mean, list) and len(mean) == learner.sae.d_out
    of_mean = torch.tensor(mean) if is_row else None
    return model.measure(partial(_reconstruct, learner), mean=of_mean, n_tokens=n_tokens)


def _reconstruct(learner: Learner, x: Tensor, y: Tensor) -> tuple[Acts, Tensor]:
    """Return the activations and the reconstruction [n, d_out] for raw rows x [n, d_in] with targets y [n, d_out]."""
    sae = learner.sae
    output = learner.forward(x * sae.x_scale, y * sae.y_scale)
    return output.acts, sae.raw(output.x_hat)


@torch.no_grad()
def _exported(learner: Learner, device: torch.device) -> ExportedSae:
    """Return a transcoder as it is exported, without the learner's optimizer state."""
    shared = shared_form(learner.sae, threshold_facts(learner.sae), learner.k)
    copied = {name: tensor.detach().clone() for name, tensor in shared.weights.items()}
    return ExportedSae(shared._replace(weights=copied), device)


def is_transcoder_set(job: JobConfig) -> bool:
    """Return whether a job trains one transcoder for each of several MLPs."""
    axes = [axis for axis in job.sweep if len(axis.values) > 1]
    hooks = axes[0].values if len(axes) == 1 and axes[0].path == HOOK else ()
    return bool(hooks) and all(map(is_of_transcoder, hooks))


def _levels(learner: Learner) -> Levels | None:
    """Return the values of k that an SAE is trained for, with a function that encodes rows once for all of them."""
    sae = learner.sae
    if not isinstance(sae, HierarchicalTopK):
        return None

    def reconstruct(x: Tensor, y: Tensor) -> tuple[Acts, list[Tensor]]:
        acts, _ = _reconstruct(learner, x, y)
        return acts, [sae.raw(x_hat) for x_hat in sae.prefixes(acts, x * sae.x_scale).unbind(1)]

    return Levels(sae.settings.ks, reconstruct)


def _refinement(learner: Learner, n_steps: int) -> Refinement | None:
    sae = learner.sae

    def refine(x: Tensor, acts: Acts) -> tuple[Acts, Tensor]:
        better, x_hat = refined_output(sae, x * sae.x_scale, acts, n_steps)
        return better, sae.raw(x_hat)

    return Refinement(n_steps, refine) if n_steps else None


def _probe(dense: DenseProbes, learner: Learner) -> Probing:
    with torch.inference_mode():
        return probe(dense, lambda rows: acts_of(learner, rows).dense())


class _Texts(NamedTuple):
    """A folder of rows with their tokens; for a crosscoder, the first part's folder, and the `source` of its rows."""

    folder: Path
    source: IndexedSource | None = None


@contextlib.contextmanager
def _texts(settings: SourceSettings, source: Source, device: torch.device) -> Iterator[_Texts | None]:
    """Yield the rows with their tokens, or None if the data has not exactly one folder for each part.

    For a stream from a language model, reread the beginning of its text, store the rows in a temporary folder, and
    delete this folder afterwards. Raise `UserError` if this fails.
    """
    if not isinstance(settings, ModelSettings):
        folder = folder_of(settings)
        yield _Texts(folder, joined_source(source)) if folder else None
        return
    with tempfile.TemporaryDirectory(prefix="sae-tui-texts-") as temporary:
        folders = _read_again(settings.parts(), Path(temporary), device)
        first, *others = [Shards(path=str(folder)) for folder in folders]
        yield _Texts(folders[0], first.joined(others) if others else None)


def _read_again(parts: Sequence[ModelSettings], output: Path, device: torch.device) -> list[Path]:
    """Store the first rows of each part of a stream; return the part's folders. A model reads the text only once.

    As in training, all models read the same contexts.
    """
    jobs: dict[bytes, ExtractJob] = {}
    folders, n = [], ROWS_READ_AGAIN[device.type]
    hooks = list(dict.fromkeys(ends_of(part.hook)[0] for part in parts))
    for part in parts:
        without_hook = msgspec.json.encode(msgspec.structs.replace(part, hook=""))
        if without_hook not in jobs:
            job = job_of_stream(part, hooks)
            stored = msgspec.structs.replace(job.extract, output=str(output / str(len(jobs))), n_tokens=n)
            jobs[without_hook] = msgspec.structs.replace(job, extract=stored)
        folders.append(jobs[without_hook].folder(ends_of(part.hook)[0]))
    for job, model in zip(jobs.values(), load_alike([*jobs.values()], device), strict=True):
        _store(job, device, model, n)
    return folders


def _store(job: ExtractJob, device: torch.device, model: LanguageModel, n: int) -> None:
    stage(READING, n)
    so_far = 0

    def report(kept: int) -> None:
        nonlocal so_far
        advance(kept - so_far)
        so_far = kept

    extract(job, device, Alone(threading.Event(), report), lambda _: None, model)
