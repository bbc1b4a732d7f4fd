"""Writes report cards for a finished run's SAEs; a failure is reported, but does not fail the run."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from trainer.activations.base import Source, StreamSource
from trainer.activations.outliers import Outliers
from trainer.activations.training_data import TrainingData, open_data
from trainer.contract.errors import first_line
from trainer.contract.runs.features import ACTS_SCALE, STABILITY
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.report_card import FIRES_ON, STABLE_COSINE, TWINS, Card, quality_words, summary
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.series import CRITERION, error_of, held_out
from trainer.contract.settings.tokens_of_data import folder_of, tells_tokens
from trainer.contract.store.metrics_store import FINISHED, JUDGING, MetricRow
from trainer.evaluation.card import timer, write_card
from trainer.evaluation.contexts import Contexts, contexts_of, joined_source, texts_of
from trainer.evaluation.cross_layer import LayerSae, StoredLayers
from trainer.evaluation.evaluate_folder import card_of
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.evaluation.rows import BATCH, EvaluationRows, StopAsked, parts_of_hooks
from trainer.evaluation.stability import write_stability
from trainer.evaluation.twins import write_twins
from trainer.extraction.token_bytes import read_tokens
from trainer.parallel.base import Parallel
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress
from trainer.saes.sparse_acts import Acts, DenseActs
from trainer.training.loop import Trainer

ERROR_NAME = error_of(held_out(CRITERION))
# The maximum number of rows on which to measure an SAE; this is also the default maximum number of held-out rows.
MOST_ROWS = 32_768
# The minimum number of training tokens per measured row. Measuring a row takes a third as long as training on it.
SHARE_OF_TOKENS = 20
# The number of texts to keep for each latent. This is half as many as `eval` keeps, because fewer rows are read.
N_CONTEXTS = 10


class Cards:
    """Writes a finished run's report cards; every rank creates a `Cards` object and makes the same calls."""

    def __init__(
        self,
        trainer: Trainer,
        job: JobConfig,
        source: Source,
        parallel: Parallel,
        progress: RunProgress,
        stop: threading.Event,
    ) -> None:
        self._trainer, self._job, self._source = trainer, job, source
        self._parallel, self._progress, self._stop = parallel, progress, stop
        self._at = trainer.position

    def write(self) -> None:
        """Write a report card for every SAE that this rank has exported, and report the results; never raise.

        Ranks that only contribute tokens or latents to another rank's SAEs write no report card.
        """
        if not (self._job.train.report_card and self._trainer.data.n_held_out):
            return
        self._progress.heartbeat(JUDGING, self._at.step, self._at.tokens)
        # Store all metrics first: from now on, the run counts as finished even if it is killed.
        self._progress.settle()
        try:
            results = self._parallel.all_gather(self._own())
        except Exception as error:
            results = {"": ("warning", f"no report cards: {first_line(error)}", None)}
        if self._parallel.is_main:
            results |= self._compared()
        for place, (label, (level, message, fvu_error)) in enumerate(results.items()):
            self._progress.event("card", message, level)
            if fvu_error is not None:
                names = {f"{ERROR_NAME}@{label}" if label else ERROR_NAME, *([] if place else [ERROR_NAME])}
                self._progress.rows([MetricRow(name, self._at.step, fvu_error) for name in sorted(names)])
        self._progress.heartbeat(FINISHED, self._at.step, self._at.tokens)

    def _compared(self) -> dict[str, tuple[str, str, None]]:
        """Compare the SAEs that differ only in the seed, and SAEs with their random twins; return events to report."""
        of_saes = {label: self._trainer.output / label for label in members(self._job)}
        # SAEs are not exported if their training was abandoned.
        folders = {label: folder for label, folder in of_saes.items() if exported_tokens(folder) == self._at.tokens}
        # Comparing each latent with all others takes as long as reading `d_sae` rows.
        most = max(BATCH, self._at.tokens // (SHARE_OF_TOKENS * max(1, len(folders))))
        return self._stability(folders, most) | _twins(folders)

    def _stability(self, folders: Mapping[str, Path], most: int) -> dict[str, tuple[str, str, None]]:
        try:
            cards, lack = write_stability(folders, self._rows_of, self._parallel.device, most)
        except Exception as error:
            level = "info" if isinstance(error, StopAsked) else "warning"
            message = f"stability across seeds was not fully measured: {first_line(error)}; `sae-train eval` adds it"
            return {STABILITY: (level, message, None)}
        if lack:
            message = f"stability across seeds was not measured: {lack}; `sae-train eval` adds it"
            return {STABILITY: ("info", message, None)}
        shares = [f"{label} {card.stability.share:.1%}" for label, card in cards.items() if card.stability]
        message = f"latents with a decoder cosine above {STABLE_COSINE} across seeds: {', '.join(shares)}"
        return {STABILITY: ("info", message, None)} if shares else {}

    def _own(self) -> dict[str, tuple[str, str, float | None]]:
        """Evaluate this rank's SAEs; return, by label, an event's level and message, and the FVU's standard error."""
        results: dict[str, tuple[str, str, float | None]] = {}
        if self._parallel.data.index or self._parallel.latents.index:
            return results
        for label in self._trainer.learners:
            folder = self._trainer.output / label if label else self._trainer.output
            # SAEs are not exported if their training was abandoned.
            if exported_tokens(folder) == self._at.tokens:
                results[label] = self._try_one(folder, label)
                rank_log.say(results[label][1])
        return results

    def _try_one(self, folder: Path, label: str) -> tuple[str, str, float | None]:
        of_label = f" of {label}" if label else ""
        try:
            card = self._write_one(folder, label)
            return "info", f"report card{of_label}: {summary(card)}", error_of_all(card)
        except Exception as error:
            level = "info" if isinstance(error, StopAsked) else "warning"
            return level, f"no report card{of_label}: {first_line(error)}; `sae-train eval` writes it", None

    def _write_one(self, folder: Path, label: str) -> Card:
        learner, sae = self._trainer.learners[label], read_exported(folder, self._parallel.device)
        rows, layer, source = self._rows_of(label), None, self._source.of_hook(learner.hook)
        if place := learner.layer:
            layer = LayerSae(self._layers.upto(place.number), place.number)
            source = source.of_part(place.number)
        card = card_of(sae, folder, rows, source, layer, name=self._job.name, label=label, step=self._at.step)
        tensors = rows.part_tensors
        try:
            timed = timer(self._at.step, self._parallel.device)
            data = folder_of([*self._job.hooks.values()][place.number if place else learner.hook])
            if data and (contexts := self._contexts(label, sae, data, rows.input_outliers)):
                scale = self._trainer.learners[label].sae.acts_scale.reshape(1).cpu().float()
                tensors = contexts.tensors(sae.directions, read_tokens(data)) | tensors | {ACTS_SCALE: scale}
                part = timed(contexts.n_rows, "rows", text=str(data), settings={"contexts": N_CONTEXTS})
                return write_card(folder, msgspec.structs.replace(card, parts=card.parts | {FIRES_ON: part}), tensors)
        except Exception as error:
            rank_log.say(f"no max-activating examples for {folder}: {first_line(error)}")
        return write_card(folder, card, rows.part_tensors)

    def _rows_of(self, label: str) -> EvaluationRows:
        hook = self._job.hook_number(members(self._job)[label])
        own, outliers, copies = self._held_out().of_hook(hook), self._trainer.outliers[hook], self._trainer.copies[hook]
        most = most_rows(self._at.tokens, self._parallel.world_size)
        parts = parts_of_hooks(self._source, self._job)[hook]
        on, layer = self._parallel.device, self._trainer.learners[label].layer
        return EvaluationRows(own, outliers, self._job, on, most, self._stop, copies, parts, layer)

    @functools.cached_property
    def _layers(self) -> StoredLayers:
        """The exported layers of a cross-layer transcoder."""
        folders = {label: self._trainer.output / label for label in members(self._job)}
        return StoredLayers(folders, self._parallel.device)

    def _contexts(self, label: str, sae: ExportedSae, data: Path, outliers: Outliers) -> Contexts | None:
        """Find the texts in which each latent fires most strongly, reading as many rows as the SAE is measured on.

        Return None if the rows' tokens are unknown, or if the SAE has too many latents for its training time: comparing
        each latent with all others takes as long as reading `d_sae` rows.
        """
        learner, most = self._trainer.learners[label], most_rows(self._at.tokens, self._parallel.world_size)
        if not tells_tokens(data) or sae.d_sae > max(BATCH, self._at.tokens // SHARE_OF_TOKENS):
            return None

        def acts_of(x: Tensor) -> Acts:
            if self._stop.is_set():
                raise StopAsked("a stop was requested")
            # Use the same scale as in training, as the `eval` command does.
            return DenseActs(sae.encode(x.to(sae.W_dec.device)).values * learner.sae.acts_scale)

        # A layer of a cross-layer transcoder fires on the rows at its own hook.
        source = None if learner.layer else joined_source(self._source.of_hook(learner.hook))
        return contexts_of(acts_of, texts_of(data, most, source), outliers, sae.d_sae, N_CONTEXTS)

    def _held_out(self) -> TrainingData:
        """Return the data with the held-out rows of all ranks or, for a stream, of this rank."""
        if isinstance(self._source, StreamSource):
            return self._trainer.data
        return open_data(self._source, self._job, Parallel(self._parallel.device))


def _twins(folders: Mapping[str, Path]) -> dict[str, tuple[str, str, None]]:
    """Compare SAEs with their random twins; return the event that reports the result, or {} if there are no twins."""
    try:
        cards = write_twins(folders)
    except Exception as error:
        return {TWINS: ("warning", f"no comparison with random twins: {first_line(error)}", None)}
    words = [f"{label or 'the SAE'}: {quality_words(card)}" for label, card in cards.items()]
    return {TWINS: ("info", f"compared with random twins: {'; '.join(words)}", None)} if words else {}


def most_rows(tokens: int, world_size: int) -> int:
    """Return how many rows to measure on so that measuring takes only a small share of the run's time."""
    return min(MOST_ROWS, max(BATCH, tokens // (SHARE_OF_TOKENS * world_size)))


def error_of_all(card: Card) -> float | None:
    """Return the standard error of the FVU, or None if it is unknown.

    With all held-out rows, the standard error would be only slightly smaller, because these rows come from the same
    texts.
    """
    error = card.figures.fvu_error
    return error if math.isfinite(error) else None
