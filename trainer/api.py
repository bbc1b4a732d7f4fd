"""Trains an SAE in the current process on an iterable of tensors, without a job file, a run folder or a store.

from trainer.api import train

# `batches` yields tensors [n_tokens, d_in], or pairs of tensors for a transcoder.
fitted = train(batches, d_sae=3072, k=32, n_steps=500, held_out=rows)
print(fitted.values["heldout_fvu"], fitted.encode(x).shape)  # "fvu" is measured on the last training batches
fitted.save("my-sae")  # SAELens' format

With `parts=(768, 768)`, the rows are joined from two hooks or models, and the SAE is a crosscoder.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trainer.activations.base import are_finite
from trainer.activations.batches import Batch
from trainer.activations.outliers import LeftOut, Outliers
from trainer.activations.split import BLOCK, halves_of
from trainer.activations.training_data import SAMPLE_TOKENS
from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.sections import section_settings
from trainer.contract.settings.sources import DataShape, SourceSettings
from trainer.contract.wording import plural
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.parallel.base import Parallel
from trainer.runtime.precision import resolve_precision, set_deterministic, set_matmul_precision
from trainer.saes.base import Output
from trainer.saes.refinement import refined_output, refuse_transcoder
from trainer.sharing.saelens import export_sae
from trainer.training.bad_rows import CURE, too_many
from trainer.training.evaluate import evaluate
from trainer.training.held_out import HeldOut
from trainer.training.learner import Learner, StepState
from trainer.training.skipped_steps import is_hopeless
from trainer.training.step import take_step

Rows = Tensor | tuple[Tensor, Tensor]


class Fitted:
    """A trained SAE. `values` contains the metrics for the last log interval."""

    def __init__(self, learner: Learner, values: Mapping[str, float]) -> None:
        self.sae, self.values = learner.sae, dict(values)
        self._learner = learner

    @torch.no_grad()
    def encode(self, x: Tensor, *, refine: int = 0) -> Tensor:
        """Return the latent activations [n_tokens, d_sae] of raw data [n_tokens, d_in], in the data's units.

        With `refine`, that many further steps look for activations that reconstruct x better. A token then gets no more
        active latents than before, but some of them are other latents. Other tools do not do this.
        """
        return self._run(x, refine).acts.dense() / self.sae.acts_scale

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, refine: int = 0) -> Tensor:
        """Return the reconstruction [n_tokens, d_out] of raw data [n_tokens, d_in]; `encode` explains `refine`."""
        return self.sae.raw(self._run(x, refine).x_hat)

    def save(self, folder: str | Path, **metadata: Any) -> None:
        """Write the SAE in SAELens' format (a TopK transcoder in sparsify's); replace existing files.

        For a crosscoder, `crosscoder_parts` may be a list with a dict for each part: its `name`, `model_name` and
        `hook_name`. Widths and scales are added.
        """
        with self._learner.evaluating():
            export_sae(self.sae, Path(folder), {"training_architecture": self._learner.architecture, **metadata})

    def _run(self, x: Tensor, refine: int = 0) -> Output:
        sae, x = self.sae, x.to(self.sae.W_enc.device).float() * self.sae.x_scale
        if not isinstance(refine, int) or refine < 0:
            raise UserError(f"refine: must be a number of steps, 0 or more, not {refine!r}")
        if refine:
            refuse_transcoder("refine", is_transcoder=sae.is_transcoder)
        with self._learner.evaluating():
            output: Output = sae(x, x.new_zeros(len(x), sae.d_out))
            if not refine:
                return output
            acts, x_hat = refined_output(sae, x, output.acts, refine)
            return output._replace(acts=acts, x_hat=x_hat)


class Loaded:
    """An exported SAE, read by `load`. Activations are in the units of the data."""

    def __init__(self, sae: ExportedSae) -> None:
        self._sae = sae
        self.d_in, self.d_sae, self.metadata = sae.d_in, sae.d_sae, dict(sae.metadata)
        self.W_dec, self.b_dec = sae.W_dec, sae.b_dec

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return the latent activations [n_tokens, d_sae] of raw data [n_tokens, d_in]."""
        return self._sae.encode(self._rows(x)).values

    @torch.no_grad()
    def reconstruct(self, x: Tensor) -> Tensor:
        """Return the reconstruction [n_tokens, d_out] of raw data [n_tokens, d_in]."""
        return self._sae.reconstruct(self._rows(x))[1]

    def _rows(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.d_in:
            raise UserError(f"x: must have {self.d_in} columns, not {x.shape[-1]}")
        return x.to(self.W_dec.device).float()


def load(folder: str | Path, *, device: str = "cpu") -> Loaded:
    """Load an exported SAE in any supported format; raise `UserError` if the folder contains none.

    >>> load("my-sae").encode(torch.randn(3, 384)).shape  # doctest: +SKIP
    torch.Size([3, 3072])
    """
    return Loaded(read_exported(Path(folder), torch.device(device)))


def train(
    data: Iterable[Rows],
    *,
    n_steps: int,
    device: str | torch.device | None = None,
    held_out: Rows | None = None,
    parts: Sequence[int] = (),
    on_log: Callable[[int, Mapping[str, float]], None] | None = None,
    **settings: Any,
) -> Fitted:
    """Train on `n_steps` batches of raw activations and return the SAE.

    If `data` is exhausted before `n_steps`, it is iterated again, unless it can be iterated only once. `settings`
    accepts the settings in a job file's `[sae]` and `[train]` sections. Raise `JobFileError` if a setting is unknown or
    invalid, and `UserError` if training on the data is impossible; warn if there is too little data.
    `on_log(step, values)` is called every `log_every` steps; `values` contains the metric means over the steps since
    the last call. `held_out` contains rows that are not in `data`. With `held_out`, the result's `values` include
    `heldout_fvu` and `heldout_l0`, and a BatchTopK or Matryoshka SAE gets a threshold that makes L0 = k on these rows.
    `parts` contains the widths of the parts of a crosscoder's rows [n_tokens, Σ parts]; every part has its own scale,
    so that all parts count the same.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    batches = _pairs(data)
    first = list(_until(batches, SAMPLE_TOKENS))
    if not first:
        raise UserError("data: contains no batches; pass an iterable of tensors [n_tokens, d_in]")
    _refuse_parts(parts, first)
    job = _job(settings, n_steps, len(first[0][0]), parts)
    rows = None if held_out is None else _UnseenRows(held_out, first[0])
    set_matmul_precision(resolve_precision(job.train.precision, device))
    if job.train.deterministic:
        set_deterministic(True)
    parallel = Parallel(device)
    learner, outliers = _new_learner(job, first, parallel)
    if rows:
        _refuse_too_few(HeldOut(rows, [outliers], device))
    values, step = {}, 0
    for step, (x, y) in enumerate(tqdm(_first_steps(first, batches, n_steps), total=n_steps, disable=None), start=1):
        moved = x.to(device).float()
        target = moved if y is x else y.to(device).float()
        outliers.note(len(moved))
        moved, target = outliers.replace(moved, target)
        take_step([learner], parallel, step - 1, [Batch([(moved, target)], len(moved))])
        if learner.is_resampled_after(step):
            learner.forget(learner.resample(step, moved, target))
        if step % job.train.log_every == 0 or step == n_steps:
            _refuse_bad_rows(LeftOut.of(outliers.counts))
            values = _interval(learner)
            if on_log:
                on_log(step, values)
    found = LeftOut.of(outliers.counts)
    if n_bad := found.not_finite + found.outliers:
        warnings.warn(
            f"data: {plural(n_bad, 'row')} left out because of values that are not finite or too large for fp32",
            stacklevel=2,
        )
    if step < n_steps:
        ends = f"data: ended after {step} of {n_steps} steps, before the learning rate was fully decayed"
        warnings.warn(f"{ends}; pass a list, or an object that can be iterated again", stacklevel=2)
    values = _interval(learner) if step % job.train.log_every and step < n_steps else values
    if rows:
        values |= evaluate({"": learner}, HeldOut(rows, [outliers], device), parallel, len(first[0][0]))[""]
    return Fitted(learner, values)


_NOT_HERE = {
    "n_tokens": "pass n_steps; a step is a batch of data",
    "batch_size": "a step is a batch of data of any size",
    "accumulate": "a step is a batch of data of any size",
    "eval_every": "the rows of held_out are measured at the end",
    "report_card": "the rows of held_out are measured at the end",
    "halving": "only one SAE is trained",
    "watch_latents": "only runs of job files store snapshots",
    **{
        name: "fitted.save writes all files"
        for name in ("checkpoint_every", "checkpoint_every_tokens", "checkpoint_every_minutes", "keep_checkpoints")
    },
    **dict.fromkeys(("mirror_checkpoints", "mirror_every_minutes"), "no checkpoints are saved"),
}


class _JoinedTensors(SourceSettings, frozen=True):
    """The settings for a crosscoder's rows that are passed as tensors."""

    widths: tuple[int, ...]

    def shape(self) -> DataShape:
        return DataShape(sum(self.widths), None, None, self.widths)

    def parts(self) -> list[SourceSettings]:
        return [self] * len(self.widths)


def _refuse_parts(parts: Sequence[int], batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise `UserError` if the widths of a crosscoder's parts do not fit the batches."""
    x, y = batches[0]
    if isinstance(parts, Sequence) and not len(parts):
        return
    if x is not y:
        raise UserError("parts: cannot be combined with targets, since a crosscoder reconstructs its input")
    are_widths = isinstance(parts, Sequence) and all(type(one) is int and one > 0 for one in parts)
    if not are_widths or len(parts) < 2 or sum(parts) != x.shape[1]:
        asked = f"must be the widths of at least two parts, whose sum is the width of the rows, {x.shape[1]}"
        raise UserError(f"parts: {asked}, not {parts!r}")


def _job(settings: Mapping[str, Any], n_steps: int, batch_size: int, parts: Sequence[int]) -> JobConfig:
    train = {"n_steps": n_steps, "batch_size": batch_size}
    # A placeholder: a job requires a [data] section, but here the data is passed as tensors.
    table: dict[str, Any] = {"data": {"path": "tensors"}, "sae": {}, "train": train}
    for name, value in settings.items():
        if name in _NOT_HERE:
            raise JobFileError([Problem(name, f"has no meaning here: {_NOT_HERE[name]}")])
        table[_section_of(name, settings)][name] = value
    job, problems = parse_job(table)
    if job is None:
        raise JobFileError(problems)
    if job.sweep:
        raise JobFileError([Problem(job.sweep[0].path, "accepts only one value here; call train once for each value")])
    if parts:
        data = msgspec.structs.replace(job.data, settings=_JoinedTensors(tuple(parts)))
        job = msgspec.structs.replace(job, data=data)
    return job


def _section_of(name: str, settings: Mapping[str, Any]) -> str:
    chosen_entries = (
        ("sae", "architecture", catalog.ARCHITECTURES),
        ("train", "optimizer", catalog.OPTIMIZERS),
    )
    for section, choice, registry in chosen_entries:
        chosen = settings.get(choice)
        if chosen is not None:
            catalog.entry(registry, chosen, choice)
        if any(setting.name == name for setting in section_settings(section, chosen)):
            return section
    raise JobFileError([Problem(name, "is not a setting of [sae] or [train] in a job file")])


class _UnseenRows:
    """Held-out rows, which are not used for training."""

    def __init__(self, rows: Rows, first: tuple[Tensor, Tensor]) -> None:
        x, y = self._pair = (rows, rows) if isinstance(rows, Tensor) else _pair(rows)
        is_like = [part.ndim == 2 and part.shape[1] == own.shape[1] for part, own in zip((x, y), first, strict=True)]
        if not all(is_like) or len(x) != len(y) or not len(x) or (x is y) != (first[0] is first[1]):
            raise UserError(
                f"held_out: must be shaped like the batches of data, {_shapes(*first)}, not {_shapes(x, y)}"
            )

    def of_hook(self, hook: int) -> _UnseenRows:
        return self

    def held_out(self, batch_size: int, half: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._pair
        if half is not None:
            # Text boundaries are unknown, so keep neighbouring rows in the same half.
            own = torch.from_numpy(halves_of(np.arange(len(x)) // BLOCK) == half)
            x, y = (x[own], x[own]) if y is x else (x[own], y[own])
        for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
            yield inputs, inputs if y is x else targets


def _refuse_too_few(held_out: HeldOut) -> None:
    if sum(len(x) for x, _ in held_out.batches(0, SAMPLE_TOKENS)) < 2:
        raise UserError("held_out: fewer than 2 rows are finite in fp32; pass more rows")


def _refuse_bad_rows(found: LeftOut) -> None:
    if too_many(found.not_finite, found.n_seen):
        share = f"{found.not_finite:,} of {plural(found.n_seen, 'row')}"
        raise UserError(f"data: {share} contain NaN or infinite values; {CURE}")


def _new_learner(job: JobConfig, first: list[tuple[Tensor, Tensor]], parallel: Parallel) -> tuple[Learner, Outliers]:
    """Return an initialised learner, and the detector for rows with values too large for fp32."""
    x, y = (torch.cat(parts)[:SAMPLE_TOKENS].float() for parts in zip(*first, strict=True))
    finite = are_finite(x, y)
    if not finite.any():
        raise UserError("data: every row of the first batches contains NaN or infinite values; extract them again")
    is_transcoder = any(x is not y for x, y in first)
    learner = Learner(job, x.shape[1], y.shape[1] if is_transcoder else None, parallel)
    inputs, targets = x[finite].to(parallel.device), y[finite].to(parallel.device)
    outliers = Outliers(inputs, targets, 0.0, parts=job.data.part_widths)
    learner.initialise(*outliers.leave_out(inputs, targets))
    return learner, outliers


def _interval(learner: Learner) -> dict[str, float]:
    state = StepState.of(learner.take_state())
    if is_hopeless(state.skipped_in_a_row, learner):
        in_a_row = state.skipped_in_a_row
        raise UserError(f"data or lr: the gradient was not finite {in_a_row} steps in a row; check both")
    return learner.values(learner.sums(), state)


def _pairs(data: Iterable[Rows]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets; repeat `data` endlessly if it can be iterated more than once."""
    shapes = None
    while True:
        n_batches = 0
        for batch in data:
            n_batches += 1
            x, y = (batch, batch) if isinstance(batch, Tensor) else _pair(batch)
            shapes = shapes or (x.shape[1:], y.shape[1:])
            if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or (x.shape[1:], y.shape[1:]) != shapes:
                raise UserError(f"data: {_ASKED}; batch {n_batches} is {_shapes(x, y)}")
            yield x, y
        if iter(data) is data or not n_batches:
            return


_ASKED = "every batch must be a tensor [n_tokens, d_in], or a pair of such tensors, always with the same widths"


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, Sequence) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise UserError(f"data: {_ASKED}, not a {type(batch).__name__}")
    return batch[0], batch[1]


def _shapes(x: Tensor, y: Tensor) -> str:
    return str(list(x.shape)) if x is y else f"{list(x.shape)} and {list(y.shape)}"


def _until(batches: Iterator[tuple[Tensor, Tensor]], n_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches until they contain at least `n_tokens` tokens in total or the data is exhausted."""
    n_so_far = 0
    while n_so_far < n_tokens and (pair := next(batches, None)) is not None:
        n_so_far += len(pair[0])
        yield pair


def _first_steps(
    first: list[tuple[Tensor, Tensor]], rest: Iterator[tuple[Tensor, Tensor]], n_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    yield from itertools.islice(itertools.chain(first, rest), n_steps)
