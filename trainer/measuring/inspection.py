"""Inspects stored activations before a training run: reports their size, statistics and problems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import are_finite
from trainer.activations.copies import copies_in
from trainer.activations.heavy_dimensions import HeavyDimensions, heavy_dimensions, moments
from trainer.activations.open_source import use_window
from trainer.activations.outliers import Outliers
from trainer.activations.shards import Shards
from trainer.activations.training_data import HowHeldOut, IndexedData
from trainer.contract.progress import stage
from trainer.contract.runs.report_card import copies_sentence, held_out_words
from trainer.contract.settings.job import MAX_NORM, DataSettings
from trainer.contract.settings.shards import inspect_shards
from trainer.contract.settings.sources import ShardSettings
from trainer.contract.wording import DROP_ZERO_ROWS, MANY_ZERO, gibibytes, join_words, plural, zero_rows
from trainer.parallel.group import Group
from trainer.saes.initial_weights import LARGEST_SPREAD, SMALLEST_VALUE
from trainer.training.bad_rows import CURE, MOST_BAD_ROWS

# The maximum number of rows to inspect; with d_in = 4096, these rows take 1 GiB in fp32.
SAMPLE_ROWS = 65_536
# With a larger gamma, the learnt features lose precision if the mean is not subtracted.
LARGE_GAMMA = 3.0
# The largest fraction of repeated rows that short texts can explain.
MANY_DUPLICATES = 0.01
# If a larger fraction of the values is subnormal, the values are too small for their dtype.
MANY_SUBNORMAL = 0.5
# The smallest normal fp16 value; smaller values are subnormal and have fewer than 11 significant bits.
_SMALLEST_FP16 = 2.0**-14
_ROWS_AT_ONCE = 4096


class InspectionFinding(msgspec.Struct, frozen=True):
    """A fact about the data, or a problem with its remedy; the remedy is "" if nothing needs to be done."""

    severity: Literal["ok", "note", "warning", "error"]
    sentence: str
    remedy: str = ""


class Inspection(msgspec.Struct, frozen=True):
    """Statistics of stored activations, measured on a sample of `n_looked_at` rows.

    `gamma` is ‖mean‖/‖std‖ and `scale` is ‖std‖, both over finite rows that are not outliers. `outliers` is the number
    of rows with more than `data.max_norm` times the median norm. `duplicates` does not include zero rows.
    `heavy_dimensions` are a few dimensions that together account for more than half of the variance; `heavy_share` is
    the fraction of the variance in these dimensions. `subnormal` is the fraction of fp16 values too small for full
    precision. By default, a training run holds out `n_held_out` rows with the method `hold_out`, from `n_texts` texts
    if the number of texts is known. `copies` is the fraction of checked held-out rows that are also training rows.
    """

    n_tokens: int
    d_in: int
    dtype: str
    n_bytes: int
    n_looked_at: int
    gamma: float
    scale: float
    median_norm: float
    largest_norm: float
    outliers: int
    not_finite: int
    zero_rows: int
    constant_dimensions: int
    duplicates: int
    heavy_dimensions: list[int] = []
    heavy_share: float = 0.0
    subnormal: float = 0.0
    hold_out: str = ""
    n_held_out: int = 0
    n_texts: int = 0
    copies: float | None = None
    findings: list[InspectionFinding] = []


def inspect_data(path: Path, max_norm: float = MAX_NORM, seed: int = 0) -> Inspection:
    """Inspect a folder or file of shards; raise a `JobFileError` for data.path if the shards cannot be read."""
    shard_set, source = inspect_shards(path), Shards(path=str(path))
    if source.caches:
        # Look at the first shards only, because downloading all may take hours.
        use_window(source, 1)
    stage("reading rows")
    rows = _sample(source, seed)
    usable = are_finite(rows, rows)
    # If all rows are too large for fp32, measure the finite rows, so that the findings can report their magnitude.
    ordinary = finite = rows[usable] if usable.any() else rows[rows.isfinite().all(dim=1)]
    norms = _norms(finite)
    lengths = norms[norms > 0]
    if usable.any():
        ordinary, _ = Outliers(finite, finite, max_norm).leave_out(finite, finite)
    mean, variance = moments(ordinary)
    heavy = heavy_dimensions(variance)
    scale = float(variance.sum().sqrt())
    settings = ShardSettings(str(path))
    wanted, how = DataSettings(settings).held_out(source.n_tokens), HowHeldOut(settings.usual_hold_out(), 0)
    data = IndexedData(source, wanted, seed, Group(), how)
    facts = Inspection(
        n_tokens=source.n_tokens,
        d_in=source.d_in,
        dtype=join_words(sorted({shard.dtype for shard in shard_set.shards})),
        n_bytes=sum(file.stat().st_size for file in {shard.file for shard in shard_set.shards}),
        n_looked_at=len(rows),
        gamma=float(mean.norm()) / scale if scale else 0.0,
        scale=scale,
        median_norm=float(lengths.median()) if len(lengths) else 0.0,
        largest_norm=float(norms.max()) if len(norms) else 0.0,
        outliers=len(finite) - len(ordinary),
        not_finite=len(rows) - len(finite),
        zero_rows=len(norms) - len(lengths),
        constant_dimensions=int((variance == 0).sum()),
        duplicates=_duplicates(rows),
        heavy_dimensions=heavy.numbers if heavy else [],
        heavy_share=heavy.share if heavy else 0.0,
        subnormal=_subnormal(rows),
        hold_out=data.hold_out,
        n_held_out=data.n_held_out,
        n_texts=data.n_texts,
        copies=copies_in(data.of_hook(0), seed),
    )
    notes = [InspectionFinding("note", note) for note in shard_set.notes]
    if source.stored_as:
        notes.append(InspectionFinding("note", f"the rows are stored as {source.stored_as}"))
    return msgspec.structs.replace(facts, findings=[*_findings(facts, max_norm), *notes])


def table(facts: Inspection) -> str:
    """Return an inspection as text: the size and statistics of the data, then one line per finding."""
    looked = "all" if facts.n_looked_at == facts.n_tokens else f"{facts.n_looked_at:,} of them checked"
    lines = [
        f"{facts.n_tokens:,} rows ({looked}), d_in {facts.d_in}, {facts.dtype}, {gibibytes(facts.n_bytes)}",
        f"median norm {facts.median_norm:.4g}, largest norm {facts.largest_norm:.4g}; "
        f"distance from the mean {facts.scale:.4g}, gamma {facts.gamma:.2f}",
    ]
    if facts.n_held_out:
        lines.append(held_out_words(facts.n_held_out, facts.hold_out, facts.n_texts))
    for finding in facts.findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.severity:8}{finding.sentence}{remedy}")
    return "\n".join(lines if facts.findings else [*lines, "no problems found"])


def _findings(facts: Inspection, times: float) -> Iterator[InspectionFinding]:
    """Yield the findings about the data, except the notes on its shards."""
    of_rows = f"of {plural(facts.n_looked_at, 'row')}"
    are_all_the_same = facts.constant_dimensions == facts.d_in
    if facts.not_finite:
        sentence = f"{facts.not_finite:,} {of_rows} contain a NaN, an infinity or values too large for fp32"
        is_accident = facts.not_finite <= MOST_BAD_ROWS * facts.n_looked_at
        left_out = f"training leaves out such rows if they make up at most {MOST_BAD_ROWS:.0%} of all rows"
        remedy = f"{left_out}; {CURE}" if is_accident else CURE
        yield InspectionFinding("warning" if is_accident else "error", sentence, remedy)
    yield from _of_size(facts)
    if facts.zero_rows > MANY_ZERO * facts.n_looked_at:
        sentence = zero_rows(facts.zero_rows / facts.n_looked_at, plural(facts.n_looked_at, "row"))
        yield InspectionFinding("warning", sentence, f"set {DROP_ZERO_ROWS} to leave them out")
    if facts.outliers:
        ratio = facts.largest_norm / facts.median_norm
        sentence = f"{facts.outliers:,} {of_rows} have more than {times:g} × the median norm, up to {ratio:.0f} ×"
        yield InspectionFinding("warning", sentence, "these rows are left out of training unless data.max_norm is 0")
    if are_all_the_same:
        yield InspectionFinding("error", "all rows are the same", "extract them again")
    elif facts.constant_dimensions:
        are = "is" if facts.constant_dimensions == 1 else "are"
        sentence = f"{plural(facts.constant_dimensions, 'dimension')} of {facts.d_in} {are} the same in every row"
        yield InspectionFinding("warning", sentence, "check that the rows are from the right hook")
    if facts.heavy_dimensions:
        heavy = HeavyDimensions(facts.heavy_dimensions, facts.d_in, facts.heavy_share)
        yield InspectionFinding("warning", heavy.sentence(), heavy.remedy)
    if facts.duplicates > MANY_DUPLICATES * facts.n_looked_at and not are_all_the_same:
        sentence = f"{facts.duplicates:,} {of_rows} occur more than once"
        yield InspectionFinding(
            "warning", sentence, "remove repeated texts, or the first token of each text, which is always the same"
        )
    if (sentence := copies_sentence(facts.copies)) and not are_all_the_same:
        remedy = "remove repeated texts or files, so that no held-out row is a training row"
        yield InspectionFinding("warning", sentence, remedy)
    if facts.gamma > LARGE_GAMMA:
        sentence = f"the norm of the mean is {facts.gamma:.1f} times the rows' distance from the mean"
        remedy = 'keep the defaults of sae.b_dec_init (not "zeros") and sae.normalize, which subtract the mean'
        yield InspectionFinding("note", sentence, remedy)
    if facts.n_tokens < 20 * facts.d_in:
        sentence = f"{facts.n_tokens:,} rows are too few for d_in {facts.d_in}: an SAE would memorise them"
        yield InspectionFinding("warning", sentence, "extract more rows")


def _of_size(facts: Inspection) -> Iterator[InspectionFinding]:
    """Yield problems with the magnitude of the values.

    Training rescales the values in fp32, so it can neither handle rows outside the fp32 range nor restore lost
    precision.
    """
    remedy = "multiply the rows by a constant before storing them"
    distance = f"the rows' distance from their mean is {facts.scale:.2g}"
    if facts.scale > LARGEST_SPREAD:
        yield InspectionFinding("error", f"{distance}, which is too large for fp32", remedy)
    elif 0 < facts.scale < SMALLEST_VALUE * facts.d_in**0.5:
        yield InspectionFinding("error", f"{distance}, which is too small for fp32", remedy)
    if facts.subnormal > MANY_SUBNORMAL:
        sentence = f"{facts.subnormal:.0%} of the nonzero values are below 6e-05, where fp16 loses precision"
        yield InspectionFinding("warning", sentence, "extract them again in bf16 or fp32")


def _duplicates(rows: Tensor) -> int:
    """Return the number of non-zero rows that repeat an earlier row."""
    n_zero = sum(int((part == 0).all(dim=1).sum()) for part in rows.split(_ROWS_AT_ONCE))
    n_all = len(rows) - len({row.tobytes() for row in rows.view(torch.uint8).numpy()})
    return max(0, n_all - max(0, n_zero - 1))


def _norms(rows: Tensor) -> Tensor:
    """Return each row's norm, computed in float64 because squares of large values would overflow in fp32."""
    parts = [torch.linalg.vector_norm(part.double(), dim=1) for part in rows.split(_ROWS_AT_ONCE)]
    return torch.cat(parts)


def _subnormal(rows: Tensor) -> float:
    """Return the fraction of nonzero fp16 values that are subnormal; 0 for other dtypes."""
    if rows.dtype != torch.float16:
        return 0.0
    n_set = n_small = 0
    for part in rows.split(_ROWS_AT_ONCE):
        is_set = part != 0
        n_set += int(is_set.sum())
        n_small += int((is_set & (part.abs() < _SMALLEST_FP16)).sum())
    return n_small / max(1, n_set)


def _sample(source: Shards, seed: int) -> Tensor:
    """Return random rows [n, d_in] in their stored dtype and order."""
    n = source.split_sizes[0] if source.shuffle_shards else source.n_tokens
    indices = np.arange(n) if n <= SAMPLE_ROWS else np.random.default_rng(seed).choice(n, SAMPLE_ROWS, replace=False)
    return source.rows(indices)
