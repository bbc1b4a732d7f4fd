"""The rows used to measure an SAE; every pass yields the same rows."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import Indices, Pair, Source, norms_of, on_device
from trainer.activations.copies import copies_in
from trainer.activations.heavy_dimensions import changed_scales, heavy_dimensions, scales_sentence
from trainer.activations.outliers import Outliers
from trainer.activations.training_data import HALVES, HookRows, in_batches, open_data
from trainer.contract.errors import UserError
from trainer.contract.progress import track
from trainer.contract.runs.crosscoder import Crosscoder, part_names, scales_words
from trainer.contract.runs.report_card import ROWS, EvaluationData, Figures
from trainer.contract.runs.row_sums import MOST_CLUSTERS, RowSums
from trainer.contract.settings.job import JobConfig
from trainer.evaluation.cross_layer import LayerSae
from trainer.evaluation.crosscoder import (
    CrosscoderRows,
    LatentScaling,
    part_scales,
    part_tensors,
    ratios,
    scaling_tensors,
    shares_of,
    with_scaling,
)
from trainer.evaluation.exported import ExportedSae
from trainer.evaluation.figures import Grouped, Levels, Reconstruct, Refinement, by_label, measure
from trainer.parallel.base import Parallel
from trainer.saes.base import Sae
from trainer.saes.layer import Layer
from trainer.training.row_sample import RowSampler

# The number of rows per forward pass of an SAE.
BATCH = 1024
# The number of rows for latent scaling, as in the diffing toolkit. If fewer rows are held out, training rows are added.
SCALING_ROWS = 100_000
# The number of values to hash per row, enough to identify the row. Hashing all values would take seconds.
_HASHED = 32


class StopAsked(UserError):
    """Raised when a stop is requested while an SAE is being measured."""


class EvaluationRows:
    """A run's held-out rows, or about `most` of them, evenly spaced; if none are held out, a sample of all rows.

    Each pass over `batches` leaves out outliers and non-finite rows, and counts them. The pass raises `StopAsked` once
    `stop` is set.
    """

    def __init__(
        self,
        data: HookRows,
        outliers: Outliers,
        job: JobConfig,
        device: torch.device,
        most: int | None = None,
        stop: threading.Event | None = None,
        copies: float | None = None,
        parts: CrosscoderRows | None = None,
        layer: Layer | None = None,
    ) -> None:
        self._copies, self._parts, self._layer = copies, parts, layer
        self.outliers, self._data, self._job, self._device = outliers, data, job, device
        self._stop = stop or threading.Event()
        self.n_held_out = data.n_held_out
        # Take every nth row, because held-out rows are in text order, and the beginning of a text differs from its end.
        self._every = 1 if most is None else max(1, -(-data.n_held_out // most))
        self.n_not_finite = self.n_outliers = self._n_zero = self._n_rows = 0
        # From the last pass over the rows: the label of each row's text or block, and a hash of the rows and labels.
        self._labels: list[Indices] = []
        self._digest = hashlib.sha256()
        self._of = ""
        self.sums: RowSums | None = None
        # How many rows to use for latent scaling. If `most` is given, measuring must be fast.
        self._n_scaling = SCALING_ROWS if most is None else 0
        # The last measured crosscoder's tensors for the features file; {} for other SAEs.
        self.part_tensors: dict[str, Tensor] = {}

    @classmethod
    def of_hooks(cls, source: Source, job: JobConfig, device: torch.device) -> list[EvaluationRows]:
        """Return the evaluation rows for each hook of a job's data.

        For a cross-layer transcoder, the inputs at all hooks are joined, and the targets belong to one hook.
        """
        data = open_data(source, job, Parallel(device))
        hooks = [data.of_hook(hook) for hook in range(source.n_hooks)]
        found = [RowSampler(one, device).find_outliers(job) for one in hooks]
        # A training run reports the same estimate at its start, with the same seed.
        copies = [copies_in(one, job.train.seed) for one in hooks]
        if job.n_layers > 1:
            layers = [Layer(number, job.n_layers) for number in range(job.n_layers)]
            return [cls(hooks[0], found[0], job, device, copies=copies[0], layer=layer) for layer in layers]
        every = zip(hooks, found, copies, parts_of_hooks(source, job), strict=True)
        return [cls(one, outliers, job, device, copies=share, parts=parts) for one, outliers, share, parts in every]

    @property
    def input_outliers(self) -> Outliers:
        """The detector for the inputs at an SAE's hook."""
        return self.outliers.of_part(self._layer.number) if self._layer else self.outliers

    def batches(
        self,
        measuring_half: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        stage: str = ROWS,
    ) -> Iterator[Pair]:
        """Yield inputs and targets in fp32 on the device; every call yields the same rows.

        The context manager `measuring_half(half)` is active while the held-out rows in that half are yielded. `stage`
        names the pass in the command's progress.
        """
        self.n_not_finite = self.n_outliers = self._n_zero = self._n_rows = 0
        self._labels, self._digest = [], hashlib.sha256()
        n_batches = -(-self.n_held_out // (BATCH * self._every)) or None
        for x, y, labels in track(self._stored(measuring_half), stage, n_batches):
            if self._stop.is_set():
                raise StopAsked("a stop was requested")
            moved = on_device((x, y), self._device)
            counted, (inputs, targets) = self.outliers.count(*moved), self.outliers.leave_out(*moved)
            ordinary = inputs, self._layer.own(targets) if self._layer else targets
            self.n_not_finite += counted.not_finite
            self.n_outliers += counted.outliers
            self._n_zero += int((norms_of(moved[0]) == 0).sum())
            self._n_rows += len(x)
            self._note(labels, moved, ordinary)
            if len(ordinary[0]):
                yield ordinary

    def _more_rows(self, n: int) -> Iterator[Pair]:
        """Yield about `n` training rows, which the SAE may have been trained on, if rows are held out."""
        for x, y in self._data.training_rows(n, self._job.train.seed, BATCH) if self.n_held_out and n > 0 else ():
            if self._stop.is_set():
                raise StopAsked("a stop was requested")
            ordinary = self.outliers.leave_out(*on_device((x, y), self._device))
            if len(ordinary[0]):
                yield ordinary

    @property
    def digest(self) -> str:
        """A digest of the rows in the last complete pass."""
        return self._digest.hexdigest()[:16]

    def _note(self, labels: Indices, whole: Pair, ordinary: Pair) -> None:
        """Store the measured rows' labels, and hash the rows."""
        if len(ordinary[0]) < len(labels):
            labels = labels[self.outliers.ordinary(*whole).cpu().numpy()]
        self._labels.append(labels)
        self._digest.update(ordinary[1][:, :_HASHED].cpu().numpy().tobytes())

    def measure(
        self,
        sae: Sae | ExportedSae | LayerSae,
        reconstruct: Reconstruct,
        w_dec: Tensor,
        place: str,
        levels: Levels | None = None,
        refinement: Refinement | None = None,
        *,
        is_trained_on: bool = True,
    ) -> tuple[Figures, EvaluationData]:
        """Measure an SAE on the rows, and describe the rows; raise `UserError` if there are no rows."""
        try:
            batches = partial(self.batches, sae.measuring_half)
            scales = sae.dimension_scales
            figures = measure(reconstruct, batches, w_dec, self.grouped, scales, levels, refinement, self._parts)
            if isinstance(sae, LayerSae):
                figures = msgspec.structs.replace(figures, d_in=sae.own.d_in, layer=sae.figures)
        except ValueError as error:
            raise UserError(f"data: {error}") from None
        if figures.crosscoder and self._parts and not isinstance(sae, LayerSae):
            crosscoder = self._by_part(sae, reconstruct, w_dec, self._parts, figures.crosscoder)
            figures = msgspec.structs.replace(figures, crosscoder=crosscoder)
        return figures, self.describe(place, figures.n_tokens, sae.dimension_scales, is_trained_on=is_trained_on)

    @torch.no_grad()
    def _by_part(
        self,
        sae: Sae | ExportedSae,
        reconstruct: Reconstruct,
        w_dec: Tensor,
        parts: CrosscoderRows,
        figures: Crosscoder,
    ) -> Crosscoder:
        """Set `part_tensors`. For two parts, also measure latent scaling, and add its figures to a crosscoder's."""
        scales = torch.ones(w_dec.shape[1], device=w_dec.device)
        scales = scales if sae.dimension_scales is None else sae.dimension_scales
        scaled = w_dec * scales
        shares = shares_of(scaled, parts.widths)
        self.part_tensors = part_tensors(parts.names, shares)
        if len(parts.widths) != 2:
            return figures
        scaling, (bias, scale) = LatentScaling(scaled, parts.widths), _reconstruction(sae)

        def add(rows: Iterator[Pair]) -> None:
            for x, y in rows:
                acts, x_hat = reconstruct(x, y)
                scaling.add(acts, (y - x_hat) * scales, (x_hat - bias) * scales, scale)

        add(self.batches(sae.measuring_half, "latent scaling"))
        fires = scaling.has_fired
        add(self._more_rows(self._n_scaling - scaling.n_rows))
        betas = scaling.betas()
        nu = torch.stack([ratios(one, shares) for one in betas], dim=1)
        self.part_tensors |= scaling_tensors(nu, betas)
        return with_scaling(figures, shares[fires], nu[fires], scaling.n_rows)

    def grouped(self, error: Tensor, spread: Tensor, *others: Tensor) -> Grouped:
        """For each text or block of neighbouring rows, sum the errors, spreads and `others` [n] from the last pass.

        Store the sums in `sums`, so that SAEs measured on the same rows can be compared.
        """
        _, labels = np.unique(np.concatenate(self._labels), return_inverse=True)
        # Renumber the labels from 0 before hashing, so that the hash does not depend on text numbers.
        self._digest.update(labels.astype(np.int64).tobytes())
        by_text = partial(by_label, labels)
        of_texts = Grouped(by_text(error), by_text(spread), self._of, tuple(map(by_text, others)))
        indices = np.arange(len(of_texts.error))
        fewer = indices * MOST_CLUSTERS // max(MOST_CLUSTERS, len(indices))
        few = [by_label(fewer, one).tolist() for one in (of_texts.error, of_texts.spread)]
        self.sums = RowSums(self._digest.hexdigest(), *few)
        return of_texts

    def describe(
        self, place: str, n_measured: int, scales: Tensor | None = None, *, is_trained_on: bool = True
    ) -> EvaluationData:
        """Describe the rows; `scales` [d_out] are the dimension scales used to train the SAE."""
        inputs, targets = _RunningMoments(), _RunningMoments()
        for x, y in self.batches():
            inputs.add(self._layer.own(x) if self._layer else x)
            if y is not x:
                targets.add(y)
        mean, variance = inputs.mean_and_variance()
        of_targets = targets.mean_and_variance()[1] if targets.n_rows else variance
        widths = self._parts.widths if self._parts else ()
        heavy = heavy_dimensions(of_targets if scales is None else of_targets * scales.square(), widths)
        if scales is not None and self.sums is not None:
            # FVUs at different scales cannot be compared, so the rows' identity includes the scales.
            at_scales = hashlib.sha256(scales.cpu().numpy().tobytes()).hexdigest()[:16]
            self.sums = msgspec.structs.replace(self.sums, rows=f"{self.sums.rows} {at_scales}")
        return EvaluationData(
            place=place,
            is_held_out=self.n_held_out > 0,
            n_held_out=self.n_held_out,
            is_trained_on=is_trained_on and not self.n_held_out,
            gamma=float(mean.square().sum() / variance.sum().clamp(min=1e-300)) ** 0.5,
            outlier_fraction=self.n_outliers / max(1, n_measured + self.n_outliers),
            not_finite=self.n_not_finite,
            max_norm=self._job.data.max_norm,
            heavy=heavy.sentence() if heavy else "",
            hold_out=self._data.hold_out if self.n_held_out else "",
            copies=self._copies,
            dimensions="" if scales is None else self._dimensions(scales),
            zero_fraction=self._n_zero / max(1, self._n_rows),
            drops_zero=self._job.data.drop_zero_rows,
            stored_as=self._data.stored_as,
        )

    def _dimensions(self, scales: Tensor) -> str:
        """Return a phrase about the scales of a crosscoder's parts, and about dimensions with other scales."""
        if self._parts is None:
            return scales_sentence(changed_scales(scales), len(scales))
        of_parts = part_scales(scales, self._parts.widths)
        each = zip(scales.split(self._parts.widths), of_parts, strict=True)
        within = torch.cat([part / scale if scale else part for part, scale in each])
        sentences = [scales_words(self._parts.names, of_parts), scales_sentence(changed_scales(within), len(within))]
        return "; ".join(filter(None, sentences))

    def _stored(
        self, measuring_half: Callable[[int], AbstractContextManager[None]]
    ) -> Iterator[tuple[Tensor, Tensor, Indices]]:
        """Yield inputs, targets and the labels of their texts or blocks; yield held-out rows one half at a time."""
        seed = self._job.train.seed
        clusters = self._data.clusters() if self.n_held_out else self._data.clusters_of_sample(seed)
        self._of = clusters.of
        if not self.n_held_out:
            yield from self._labelled(in_batches(*self._data.sample(seed), BATCH), clusters.labels)
            return
        for half in HALVES:
            rows = self._data.held_out(BATCH * self._every, half)
            with measuring_half(half):
                yield from self._labelled(rows, clusters.labels[self._data.of_half(half)])

    def _labelled(self, rows: Iterator[Pair], of_rows: Indices) -> Iterator[tuple[Tensor, Tensor, Indices]]:
        first = 0
        for x, y in rows:
            inputs = x[:: self._every]
            labels = of_rows[first : first + len(x) : self._every]
            first += len(x)
            yield inputs, inputs if y is x else y[:: self._every], labels


class _RunningMoments:
    """Accumulates the mean and variance of each dimension over batches of rows."""

    def __init__(self) -> None:
        self.n_rows = 0
        self._total, self._squares = torch.zeros(()), torch.zeros(())

    def add(self, rows: Tensor) -> None:
        exact = rows.double()
        self.n_rows += len(rows)
        self._total = self._total.to(rows.device) + exact.sum(0)
        self._squares = self._squares.to(rows.device) + exact.square().sum(0)

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        mean = self._total / self.n_rows
        return mean, self._squares / self.n_rows - mean.square()


def parts_of_hooks(source: Source, job: JobConfig) -> list[CrosscoderRows | None]:
    """Return the parts of each hook's rows, or None for rows that are not a crosscoder's."""
    if job.n_layers > 1:
        return [None] * job.n_layers
    found: list[CrosscoderRows | None] = []
    for hook, settings in enumerate(job.hooks.values()):
        widths = tuple(source.of_hook(hook).part_widths)
        found.append(CrosscoderRows(part_names(settings), widths) if widths else None)
    return found


def _reconstruction(sae: Sae | ExportedSae) -> tuple[Tensor, float]:
    """Return an SAE's bias for raw rows [d_out], and the factor from its activations to the units of `raw_decoder`."""
    if isinstance(sae, ExportedSae):
        return sae.b_dec, 1.0
    return sae.raw(sae.b_dec), 1 / float(sae.acts_scale)
