"""Finds how often and how strongly each latent fires, and the texts in which it fires most strongly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import normalize

from trainer.activations.base import IndexedSource, Source
from trainer.activations.int8_rows import decoded
from trainer.activations.open_source import open_source
from trainer.activations.outliers import Outliers
from trainer.activations.requests import RequestRows
from trainer.checkpoints.atomic_folder import not_written
from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.object_cache import whole
from trainer.contract.runs.features import FEATURES, NO_TOKEN, ActivatingExample, Features, example_of
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.requests import HIDDEN_STATES
from trainer.contract.settings.shards import INT8_MEAN, INT8_ROWS, TENSOR, TOKENS, Shard, inspect_shards
from trainer.contract.settings.tokens_of_data import META, folder_of, shard_tells_tokens, tells_tokens
from trainer.evaluation.rows import EvaluationRows
from trainer.extraction.shard_writer import RowOrigin, order_of_shard
from trainer.saes.sparse_acts import Acts, active_entries
from trainer.sharing.base import Firings
from trainer.training.learner import Learner

# The number of tokens in a context before and after the token on which a latent fires most strongly.
BEFORE, AFTER = 14, 5
WIDTH = BEFORE + 1 + AFTER
# The number of tokens per context when exporting for other tools. It is a multiple of 32 and 64 because these tools
# show 32 or 64 tokens at a time.
CACHE_CONTEXT = 256
# The maximum number of rows to read, starting with the first shard.
MOST_ROWS = 2**18
N_BINS = 16
N_NEAREST = 5
_AT_ONCE = 1024


class TokenRows(NamedTuple):
    """Rows x [n, d_in] in text order, with each row's token, position and document."""

    x: Tensor
    origin: RowOrigin


class ActivationEntries(NamedTuple):
    """All nonzero activations, as tensors [n] sorted by latent and then by row, and the number of rows."""

    latents: Tensor
    rows: Tensor
    values: Tensor
    n_rows: int


def acts_of(learner: Learner, x: Tensor) -> Acts:
    """Return the activations for raw rows x [n, d_in], at the scale used in training."""
    sae = learner.sae
    scaled = x.to(sae.W_dec.device) * sae.x_scale
    acts = learner.forward(scaled, scaled.new_zeros(len(x), sae.d_out)).acts
    sae.written_later = None
    return acts


def texts_of(place: Path, most: int = MOST_ROWS, source: IndexedSource | None = None) -> Iterator[TokenRows]:
    """Yield up to `most` rows of a folder's shards in text order; stop at the first shard that records no tokens.

    If `source` is given, its rows are yielded instead; `place` is the folder of the first part that it joins.
    """
    meta, left, begin = read_json(place / META, dict[str, object]) or {}, most, 0
    # If the data has grown during a run, the source's shards are not sorted by name.
    shards = inspect_shards(place).shards if source is None else source.first_shards()
    for number, shard in enumerate(shards):
        if left <= 0:
            return
        # With `source`, only the columns are read.
        with contextlib.nullcontext() if source else whole(shard.file):
            if (origin := origin_of(shard, number)) is None:
                return
            x = _rows_in(shard.file) if source is None else torch.empty(0)
        first = torch.arange(shard.n_tokens)
        if meta.get("shuffled"):
            if not isinstance(seed := meta.get("seed"), int):
                return
            first = order_of_shard(seed, shard.file.stem, shard.n_tokens).argsort()
        if source is not None:
            # A join leaves out the rows that not all of its folders have.
            rows, numbers = source.of_first_folder(begin, begin + shard.n_tokens)
            x, kept = source.rows(rows), torch.from_numpy(numbers)
            origin = RowOrigin(*(one[kept] for one in origin))
            first = torch.searchsorted(kept, first[torch.isin(first, kept)])
        begin += shard.n_tokens
        first = first[:left]
        left -= len(first)
        yield TokenRows(x[first], RowOrigin(*(one[first] for one in origin)))


def origin_of(shard: Shard, number: int) -> RowOrigin | None:
    """Return the origin of a shard's rows in the file's order, or None if the shard does not record its tokens.

    A file with the hidden states of one request is one text; `number` is the file's number.
    """
    if not shard_tells_tokens(shard.file):
        return None
    with safe_open(shard.file, "pt") as tensors:
        if {*RowOrigin._fields} <= {*tensors.keys()}:
            origin = RowOrigin(*(tensors.get_tensor(name).int() for name in RowOrigin._fields))
        else:
            ids = tensors.get_tensor(TOKENS).int()
            origin = RowOrigin(ids, torch.arange(len(ids), dtype=torch.int32), torch.full_like(ids, number))
    return origin if all(of_rows.shape == (shard.n_tokens,) for of_rows in origin) else None


def _rows_in(file: Path) -> Tensor:
    """Return all rows of a shard in fp32, or in their stored dtype."""
    with safe_open(file, "pt") as tensors:
        names = [*tensors.keys()]
        if INT8_ROWS in names:
            return decoded(tensors.get_tensor(INT8_ROWS), tensors.get_tensor(INT8_MEAN))
        rows: Tensor = tensors.get_tensor(TENSOR if TENSOR in names else HIDDEN_STATES)
        return rows


class Contexts:
    """Collects the contexts in which each latent fires most strongly, text by text, with at most one per document.

    `n_contexts` is the number of contexts to keep for each latent.
    """

    def __init__(self, d_sae: int, n_contexts: int) -> None:
        self._d_sae, self._n_contexts = d_sae, n_contexts
        none = torch.zeros(0, dtype=torch.int32)
        # For each activation: its latent, its value, and its row's token and position.
        self._entries = [(none, torch.zeros(0), none, none)]
        self._best, self._token_ids, self._acts = _no_contexts(d_sae, 0)
        self.n_rows = 0

    def add(self, text: TokenRows, entries: ActivationEntries) -> None:
        """Add a text and the latent activations for its rows."""
        self.n_rows += entries.n_rows
        if not len(entries.values):
            return
        ids, positions = (one[entries.rows].int() for one in (text.origin.token_ids, text.origin.positions))
        self._entries.append((entries.latents.int(), entries.values, ids, positions))
        which, rank = _best_by_document(entries, text.origin.document, self._d_sae, self._n_contexts)
        window_ids, acts = _windows(text.origin, entries, which)
        latents = entries.latents[which]
        best, token_ids, all_acts = _no_contexts(self._d_sae, self._n_contexts)
        best[latents, rank], token_ids[latents, rank], all_acts[latents, rank] = entries.values[which], window_ids, acts
        # Keep the best contexts from the previous texts and this one.
        both = torch.cat([self._best, best], 1).sort(dim=1, descending=True, stable=True)
        self._best, order = (one[:, : self._n_contexts] for one in both)
        wide = order[:, :, None].expand(-1, -1, WIDTH)
        self._token_ids = torch.cat([self._token_ids, token_ids], 1).gather(1, wide)
        self._acts = torch.cat([self._acts, all_acts], 1).gather(1, wide)

    def examples(self, latent: int, tokens: Sequence[bytes]) -> list[ActivatingExample]:
        """Return the contexts of one latent, strongest first; `tokens` contains each token's bytes."""
        found = []
        columns = (one[latent].tolist() for one in (self._best, self._token_ids, self._acts))
        for best, ids, acts in zip(*columns, strict=True):
            places = [place for place, one in enumerate(ids) if one != NO_TOKEN]
            if best > 0:
                texts = [tokens[ids[place]] if 0 <= ids[place] < len(tokens) else b"" for place in places]
                found.append(example_of(texts, [acts[place] for place in places], places.index(BEFORE)))
        return found

    def tensors(self, w_dec: Tensor, tokens: Sequence[bytes], moved: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
        """Return the tensors that `trainer.contract.runs.features` reads.

        `tokens` contains each token's bytes, in token id order. `moved` is the result of `spliced.moved_tokens`, if
        known.
        """
        all_ids = [self._token_ids, *(ids for ids in moved.values() if ids.dtype == torch.int32)]
        of_texts = _texts(torch.cat([ids.flatten() for ids in all_ids]), tokens)
        latents, values, ids, positions = (torch.cat(column) for column in zip(*self._entries, strict=True))
        latents = latents.long()
        n_fired = torch.bincount(latents, minlength=self._d_sae)
        largest = torch.zeros(self._d_sae).scatter_reduce(0, latents, values, "amax")
        sums = torch.zeros(self._d_sae, dtype=torch.float64).index_add(0, latents, values.double())
        bins = (values / largest[latents] * N_BINS).long().clamp(0, N_BINS - 1)
        histogram = torch.bincount(latents * N_BINS + bins, minlength=self._d_sae * N_BINS)
        nearest, cosines = nearest_latents(w_dec)
        return {
            "n_fired": n_fired.int(),
            "largest": largest,
            "mean": (sums / n_fired.clamp(min=1)).float(),
            "histogram": histogram.reshape(self._d_sae, N_BINS).int(),
            "nearest": nearest.int(),
            "cosines": cosines,
            "token_share": most_common_share(latents, ids, self._d_sae),
            "position_share": most_common_share(latents, positions, self._d_sae),
            "token_ids": self._token_ids,
            "acts": self._acts,
            "n_rows": torch.tensor([self.n_rows]),
            "before": torch.tensor([BEFORE]),
            **moved,
            **of_texts,
            **_index(self._token_ids, of_texts["text_ids"]),
        }


def most_common_share(latents: Tensor, kinds: Tensor, d_sae: int) -> Tensor:
    """Return the fraction of each latent's activations that are of its most common kind, [d_sae]; 0 if it never fires.

    `latents` [n] and `kinds` [n] contain each activation's latent and kind; kinds are not negative.
    """
    if not len(latents):
        return torch.zeros(d_sae)
    n_kinds = int(kinds.max()) + 1
    pairs, counts = (latents * n_kinds + kinds).unique(return_counts=True)
    most = torch.zeros(d_sae, dtype=torch.int64).scatter_reduce(0, pairs // n_kinds, counts, "amax")
    return (most / torch.bincount(latents, minlength=d_sae).clamp(min=1)).float()


def contexts_of(
    acts_of: Callable[[Tensor], Acts], texts: Iterable[TokenRows], outliers: Outliers, d_sae: int, n_contexts: int
) -> Contexts | None:
    """Return the contexts in which latents fire most strongly, or None if there are no texts.

    Outliers and non-finite rows are left out.
    """
    contexts = None
    for text in texts:
        contexts = contexts or Contexts(d_sae, n_contexts)
        contexts.add(text, entries_of(acts_of, text.x, outliers))
    return contexts


def _no_contexts(d_sae: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for `n` contexts per latent: largest activations, token ids, and activations per token."""
    ids = torch.full((d_sae, n, WIDTH), NO_TOKEN, dtype=torch.int32)
    return torch.zeros(d_sae, n), ids, torch.zeros(d_sae, n, WIDTH)


@torch.no_grad()
def entries_of(acts_of: Callable[[Tensor], Acts], rows: Tensor, outliers: Outliers) -> ActivationEntries:
    """Return the nonzero activations for rows [n, d_in] of one text, excluding outliers and non-finite rows."""
    parts = [(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0))]
    n_rows = 0
    for first in range(0, len(rows), _AT_ONCE):
        x = rows[first : first + _AT_ONCE].float()
        indices = torch.nonzero(outliers.ordinary(x, x)).flatten()
        n_rows += len(indices)
        if len(indices):
            latents, tokens, values = (one.cpu() for one in active_entries(acts_of(x[indices])))
            parts.append((latents, indices[tokens] + first, values.float()))
    latents, numbers, values = (torch.cat(column) for column in zip(*parts, strict=True))
    order = (latents * len(rows) + numbers).argsort()
    return ActivationEntries(latents[order], numbers[order], values[order], n_rows)


def _best_by_document(entries: ActivationEntries, document: Tensor, d_sae: int, n: int) -> tuple[Tensor, Tensor]:
    """Find each latent's strongest entry in each document, and keep each latent's best `n` entries.

    Return the indices of these entries, and each entry's rank within its latent.
    """
    _, numbered = document.unique(return_inverse=True)
    group = entries.latents * (int(numbered.max()) + 1) + numbered[entries.rows]
    order = entries.values.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    is_first = torch.ones(len(order), dtype=torch.bool)
    is_first[1:] = group[order][1:] != group[order][:-1]
    best = order[is_first]
    best = best[entries.values[best].argsort(descending=True, stable=True)]
    best = best[entries.latents[best].argsort(stable=True)]
    of_latent = entries.latents[best]
    rank = torch.arange(len(best)) - torch.searchsorted(of_latent, torch.arange(d_sae))[of_latent]
    return best[rank < n], rank[rank < n]


def _windows(origin: RowOrigin, entries: ActivationEntries, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens around each entry, [n, WIDTH], and the activation of the entry's latent on each token."""
    n_rows, here = len(origin.token_ids), entries.rows[which][:, None]
    offsets = torch.arange(-BEFORE, AFTER + 1)
    at = (here + offsets).clamp(0, n_rows - 1)
    apart = origin.positions[at] - origin.positions[here]
    # Positions have small gaps where rows were left out. If a position decreases, or increases by more than such a gap,
    # another piece of text has started.
    follows = (apart.sign() == offsets.sign()) & (apart.abs() <= 2 * WIDTH)
    is_same = follows & (origin.document[at] == origin.document[here]) & (at == here + offsets)
    ids = origin.token_ids[at].where(is_same, NO_TOKEN).int()
    keys, wanted = entries.latents * n_rows + entries.rows, entries.latents[which][:, None] * n_rows + at
    place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return ids, entries.values[place].where((keys[place] == wanted) & is_same, 0.0)


def write_features(folder: Path, tensors: Mapping[str, Tensor], weights: str = "") -> None:
    """Atomically write the features file next to an SAE's weights; `weights` is the hash of these weights.

    Raise `UserError` if the disk fails.
    """
    file = folder / FEATURES
    try:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_whole(file, save(whole, {"weights": weights}))
    except OSError as error:
        raise not_written(file, error.strerror or str(error), error.errno) from None


def with_older(tensors: Mapping[str, Tensor], older: Path | None) -> dict[str, Tensor]:
    """Complete `tensors` for `write_features` from an older file for the same weights.

    The tensors and the file may each lack the latents' texts or the promoted tokens. Return {} if neither contains the
    latents' texts. A damaged older file is treated as missing.
    """
    before: dict[str, Tensor] = {}
    if older is not None:
        # If the file is damaged, safetensors or the checks of its tensors raise one of these errors.
        with contextlib.suppress(OSError, UserError, SafetensorError, ValueError):
            Features(older)
            before = load_file(older)
    both = before | dict(tensors)
    if "token_ids" not in both:
        return {}
    if not before:
        return both
    texts = dict(_bytes_of_texts(before)) | dict(_bytes_of_texts(tensors))
    return both | _table_of_texts(texts) | _index(both["token_ids"], torch.tensor(sorted(texts), dtype=torch.int32))


def moved_alone(moved: Mapping[str, Tensor], tokens: Sequence[bytes]) -> dict[str, Tensor]:
    """Return promoted tokens with their texts, to merge with an earlier result of `Contexts.tensors`."""
    ids = [one.flatten() for one in moved.values() if one.dtype == torch.int32]
    return {**moved, **_texts(torch.cat(ids), tokens)} if ids else {}


def _bytes_of_texts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, bytes]]:
    """Yield the id and bytes of each token whose bytes are stored."""
    if "text_ids" in tensors:
        text, begin = bytes(tensors["text"].tolist()), 0
        for token, end in zip(tensors["text_ids"].tolist(), tensors["text_ends"].tolist(), strict=True):
            yield token, text[begin:end]
            begin = end


@torch.no_grad()
def nearest_latents(w_dec: Tensor) -> tuple[Tensor, Tensor]:
    """For each latent, return the n latents with the most similar decoder directions, [d_sae, n], and the cosines."""
    directions = normalize(w_dec.float(), dim=1)
    n = min(N_NEAREST, len(directions) - 1)
    nearest = []
    for some in torch.arange(len(directions), device=directions.device).split(_AT_ONCE):
        cosines = directions[some] @ directions.T
        cosines.scatter_(1, some[:, None], -2.0)
        nearest.append(cosines.topk(n, dim=1))
    values, latents = (torch.cat([one[part] for one in nearest]).cpu() for part in (0, 1))
    return latents, values


def _texts(token_ids: Tensor, tokens: Sequence[bytes]) -> dict[str, Tensor]:
    """Return a table of all tokens in `token_ids`: the ascending ids, the joined bytes, and the end of each token."""
    return _table_of_texts({one: tokens[one] for one in token_ids.unique().tolist() if 0 <= one < len(tokens)})


def _table_of_texts(texts: Mapping[int, bytes]) -> dict[str, Tensor]:
    ids = sorted(texts)
    encoded = [texts[one] for one in ids]
    ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
    return {
        "text_ids": torch.tensor(ids, dtype=torch.int32),
        "text_ends": torch.from_numpy(ends),
        "text": torch.tensor(list(b"".join(encoded)), dtype=torch.uint8),
    }


def _index(token_ids: Tensor, text_ids: Tensor) -> dict[str, Tensor]:
    """Return an index mapping each token in the ascending `text_ids` to the latents with contexts that contain it."""
    d_sae = len(token_ids)
    known = token_ids != NO_TOKEN
    latents = torch.arange(d_sae)[:, None, None].expand_as(token_ids)
    pairs = (token_ids[known].long() * d_sae + latents[known]).unique()
    # Tokens with unknown bytes have the largest ids, so they come after all other tokens.
    ends = torch.searchsorted(pairs, (text_ids.long() + 1) * d_sae)
    return {"index_ends": ends, "index_latents": (pairs[: int(ends[-1]) if len(ends) else 0] % d_sae).int()}


def joined_source(source: Source) -> IndexedSource | None:
    """Return the source of a crosscoder's stored rows, or of requests, for `texts_of`; None for other rows."""
    if isinstance(source, IndexedSource) and (source.part_widths or isinstance(source, RequestRows)):
        return source
    return None


def firings_of(job: JobConfig) -> Callable[[Learner], Firings] | None:
    """Return a function that finds where a learner's latents fire in the data, or None if the data has no tokens."""
    folders = [folder_of(settings) for settings in job.hooks.values()]
    if not all(folder is not None and folder.is_dir() and tells_tokens(folder) for folder in folders):
        return None
    source = open_source(job)
    rows = EvaluationRows.of_hooks(source, job, torch.device("cpu"))

    def firings(learner: Learner) -> Firings:
        number = learner.layer.number if learner.layer else learner.hook
        folder = folders[number]
        assert folder is not None
        joined = None if learner.layer else joined_source(source.of_hook(learner.hook))
        return _firings(texts_of(folder, source=joined), rows[number].input_outliers, learner)

    return firings


def _firings(texts: Iterable[TokenRows], outliers: Outliers, learner: Learner) -> Firings:
    """Split texts into contexts, and find where latents fire in these texts.

    An incomplete context at the end is dropped. Outlier rows have no activations. Activations are returned at the raw
    data's scale.
    """
    tokens, rows, latents, activations, n_rows = [], [], [], [], 0
    for text in texts:
        entries = entries_of(partial(acts_of, learner), text.x, outliers)
        tokens.append(text.origin.token_ids)
        rows.append(entries.rows + n_rows)
        latents.append(entries.latents)
        activations.append(entries.values / learner.sae.acts_scale)
        n_rows += len(text.x)
    length = min(CACHE_CONTEXT, n_rows)
    n_kept = n_rows // length * length
    place = torch.cat(rows)
    indices = torch.stack([place // length, place % length, torch.cat(latents)], 1)
    is_kept = place < n_kept
    return Firings(torch.cat(tokens)[:n_kept].reshape(-1, length), indices[is_kept], torch.cat(activations)[is_kept])
