"""k-sparse probing: measures how well a few latents classify texts, compared with a probe on the raw activations.

The definitions follow sae-probes (Kantamneni et al. 2025, "Are sparse autoencoders useful? A case study in sparse
probing"), including its choice of latents and of the logistic regression penalty. Unlike in sae-probes, columns are
standardised, because in some models, a few columns of the raw rows are far larger than all others.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.progress import advance, track
from trainer.contract.runs.evaluation_time import DENSE_PROBES
from trainer.contract.runs.report_card import PART_TITLES, PROBES, Auc, Probing
from trainer.contract.settings.declare import show
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import ContextBatch, Tokenizer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Returns the activations [n, d_sae] of rows [n, d_in].
Encode = Callable[[Tensor], Tensor]

KS = (1, 16)
SEEDS = (0, 1, 2)
TEST_SHARE = 1 / 3
# Candidates for the inverse L2 penalty. The one with the best AUC on the last part of the training texts is used.
_STRENGTHS = np.logspace(1, -5, 7)
_VALIDATION_SHARE, _MOST_VALIDATION = 0.2, 100
_ROWS_AT_ONCE = 1024
# The number of tokens per forward pass of the model.
TOKENS_AT_ONCE = 4096


class LabelledRows(NamedTuple):
    """A model's rows [n, d_in] at a hook for the last token of each text in a data set, labelled 0 or 1."""

    name: str
    rows: Tensor
    labels: list[int]


class DenseProbes(NamedTuple):
    """The rows of several data sets, and the AUCs [n_sets, n_seeds] of probes on the raw rows, without an SAE."""

    sets: list[LabelledRows]
    aucs: Floats


def probe_rows(sets: Sequence[LabelledRows]) -> DenseProbes:
    """For each data set and seed, train a probe on the raw rows."""
    with _one_thread():
        aucs = [
            [_auc_of(one.rows.double().numpy(), _split(one.labels, seed)) for seed in SEEDS]
            for one in track(sets, DENSE_PROBES)
        ]
    return DenseProbes(list(sets), np.array(aucs))


def probe(dense: DenseProbes, encode: Encode) -> Probing:
    """For each data set, seed and k, train a probe on an SAE's latents."""
    with _one_thread():
        aucs = np.array([_of_latents(one, encode) for one in track(dense.sets, PART_TITLES[PROBES])])
    names = [one.name for one in dense.sets]
    return Probing(
        n_sets=len(names),
        n_seeds=len(SEEDS),
        n_texts=sum(len(one.labels) for one in dense.sets),
        k={str(k): _summary(names, aucs[:, :, at]) for at, k in enumerate(KS)},
        dense=_summary(names, dense.aucs),
    )


def _one_thread() -> Any:
    """Limit BLAS to one thread, because fitting a small data set takes five times as long with two threads."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, "blas")


def _of_latents(one: LabelledRows, encode: Encode) -> list[list[float]]:
    """Return an SAE's AUCs [n_seeds, n_ks] on a data set."""
    acts = _sparse(one.rows, encode)
    aucs = []
    for seed in SEEDS:
        split = _split(one.labels, seed)
        order = by_difference(acts[split.train], split.y_train)
        aucs.append([_auc_of(acts[:, order[:k]].toarray(), split) for k in KS])
    return aucs


def _sparse(rows: Tensor, encode: Encode) -> Any:
    """Return activations as a sparse matrix [n, d_sae], because a dense matrix could take too much memory."""
    from scipy import sparse

    parts = [sparse.csr_matrix(encode(some).double().cpu().numpy()) for some in rows.split(_ROWS_AT_ONCE)]
    return sparse.vstack(parts, format="csr")


def by_difference(acts: Any, labels: Ints) -> Ints:
    """Return the latents ordered by the absolute difference between their class means, largest first.

    `acts` is a sparse matrix [n, d_sae]. A latent's difference is divided by the mean of its nonzero activations,
    because a latent's scale is arbitrary.
    """
    size = np.asarray(abs(acts).sum(0)).ravel() / (acts.getnnz(axis=0) + 1e-6)
    means = [np.asarray(acts[labels == label].mean(0)).ravel() for label in (0, 1)]
    order: Ints = np.argsort(-np.abs(means[1] - means[0]) / (size + 1e-6), kind="stable")
    return order


class ProbeSplit(NamedTuple):
    """Indices and labels for a probe's training rows (in random order) and test rows."""

    train: Ints
    test: Ints
    y_train: Ints
    y_test: Ints


def _split(labels: Sequence[int], seed: int) -> ProbeSplit:
    """Split a balanced data set into balanced training and test rows."""
    generator, y = np.random.default_rng(seed), np.array(labels)
    of_classes = [generator.permutation(np.flatnonzero(y == label)) for label in (0, 1)]
    n_test = round(len(of_classes[0]) * TEST_SHARE)
    train = generator.permutation(np.concatenate([one[n_test:] for one in of_classes]))
    test = np.concatenate([one[:n_test] for one in of_classes])
    return ProbeSplit(train, test, y[train], y[test])


def _auc_of(x: Floats, split: ProbeSplit) -> float:
    return auc_of_probe(x[split.train], split.y_train, x[split.test], split.y_test)


def auc_of_probe(x_train: Floats, y_train: Ints, x_test: Floats, y_test: Ints) -> float:
    """Train a logistic regression on rows in random order, and return its AUC on the test rows."""
    n = len(x_train) - min(int(_VALIDATION_SHARE * len(x_train)), _MOST_VALIDATION)
    aucs = [_fitted_auc(c, x_train[:n], y_train[:n], x_train[n:], y_train[n:]) for c in _STRENGTHS]
    return _fitted_auc(_STRENGTHS[int(np.argmax(aucs))], x_train, y_train, x_test, y_test)


def _fitted_auc(strength: float, x_train: Floats, y_train: Ints, x_test: Floats, y_test: Ints) -> float:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        # With a weak penalty and separable classes, the fit may not converge, but it still ranks the texts.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(x_train, y_train)
    return float(roc_auc_score(y_test, model.decision_function(x_test)))


def _summary(names: list[str], aucs: Floats) -> Auc:
    """Return the mean of the AUCs [n_sets, n_seeds] and its standard errors."""
    of_sets = aucs.mean(1)
    return Auc(
        auc=float(of_sets.mean()),
        seed_error=float(np.sqrt(aucs.var(1, ddof=1).sum() / aucs.shape[1])) / len(names),
        set_error=float(of_sets.std(ddof=1)) / len(names) ** 0.5 if len(names) > 1 else None,
        of_sets=dict(zip(names, of_sets.tolist(), strict=True)),
    )


def last_rows(model: LanguageModel, texts: Sequence[str], context: int, hook: int = 0) -> Tensor:
    """Return the rows [n, d] for the texts' last tokens at one of the model's hooks, in fp32 on the CPU.

    The tokenizer's special tokens surround each text, but the row belongs to the last token of the text itself. If a
    text has more than `context` tokens, its beginning is cut off.
    """
    pieces, indices = _pieces(model.tokenizer, texts, context)
    # Batches of equally long texts need no padding, which would change the rows of some models.
    groups = list(_of_one_length(pieces))
    rows: dict[int, Tensor] = {}
    for numbers in groups:
        batch = _batch([pieces[number] for number in numbers])
        length = batch.ids.shape[1]
        flat = torch.tensor([at * length + indices[number] for at, number in enumerate(numbers)])
        rows |= dict(zip(numbers, model.rows(batch, flat)[hook].float().cpu(), strict=True))
        advance(len(numbers))
    return torch.stack([rows[number] for number in range(len(texts))])


def _pieces(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> tuple[list[list[int]], list[int]]:
    """Return each text's tokens, and the index of the last token of the text itself."""
    pieces, indices = [], []
    for text, (ids, before, after) in zip(texts, tokenizer.tokens(texts), strict=True):
        if not ids:
            raise UserError(
                f"--probe: the model's tokenizer produces no tokens for the text {show(text)}; use fewer --sets"
            )
        kept = ids[-(context - len(before) - len(after)) :]
        pieces.append(before + kept + after)
        indices.append(len(before) + len(kept) - 1)
    return pieces, indices


def _of_one_length(pieces: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield batches of indices; a batch's pieces have the same length and are read in one forward pass."""
    by_length = sorted(range(len(pieces)), key=lambda number: len(pieces[number]))
    for length, numbers in itertools.groupby(by_length, key=lambda number: len(pieces[number])):
        remaining = iter(numbers)
        while some := list(itertools.islice(remaining, max(1, TOKENS_AT_ONCE // length))):
            yield some


def _batch(pieces: list[list[int]]) -> ContextBatch:
    ids = np.array(pieces, np.int64)
    positions = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    return ContextBatch(ids, positions, np.zeros_like(ids))
