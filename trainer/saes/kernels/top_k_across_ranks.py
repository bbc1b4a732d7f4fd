"""Finds the largest pre-activations over several ranks, exactly, by exchanging candidates.

A rank sends only some of its largest values, plus a ceiling that none of its other values exceeds. If a ceiling is
above a token's smallest chosen value, an unsent value might belong to the result; a second round then exchanges all
possible candidates for such tokens. Either each rank decides for its shard of the tokens, or all ranks see the same
values and decide identically. With only one rank, nothing is exchanged. If a rounded product finds the candidates,
ranks first exchange bounds on their values, so that each rank computes exact values only for candidates that can be
among the largest over all ranks.

Both the need for a second round and the number of values chosen from a rank depend on the data. With a GPU, the host
would have to wait for both results. Therefore, a rank with a GPU sends all possible candidates in one round, and keeps
an entry for each of its candidates, although only the chosen entries are valid. The candidates take little memory
compared with the reconstructions and gradients that are also exchanged, and the products read only valid entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.contract.planning import first_look
from trainer.contract.planning.activation_memory import MARGIN_PER_TOKEN
from trainer.parallel.group import Group
from trainer.runtime.triton_kernels import SELECTIONS_ACROSS_RANKS
from trainer.saes.kernels import select, top_k
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.rounded_top_k import Candidates
from trainer.saes.kernels.select import Chosen
from trainer.saes.sparse_acts import Filled, SparseIndices

# Like `MARGIN_PER_TOKEN`, but for an entire batch's largest values, whose distribution over ranks varies less.
MARGIN_PER_BATCH = 1.5


def k_per_token(pre_acts: PreActs, k: int, group: Group, *, may_wait: bool = True) -> Chosen:
    """Choose the k largest pre-activations for each token over all ranks; return this rank's share of them.

    If `may_wait` is False, the host does not wait for the GPU, and the result ends with padding.
    """
    if group.size == 1:
        return select.k_per_token(pre_acts, k)
    if not may_wait:
        columns, values, is_chosen = _among_largest(pre_acts, k, group)
        tokens = torch.arange(len(columns), device=columns.device).repeat_interleave(columns.shape[1])
        entries = _Entries(columns.flatten(), tokens, values.flatten(), is_chosen.flatten())
        return entries.chosen_first(len(columns), len(tokens) // group.size)
    (columns, values, ceiling), n_sent = _candidates(pre_acts, k, group)
    sent = torch.cat([_pad(values, n_sent), ceiling[:, None]], dim=1)
    selected = group.from_owners(_selected(group.to_owners(sent), k), len(sent))
    local = _LocalChoice(columns, values, selected[:, : columns.shape[1]])
    if len(rows := selected[:, -1].nonzero().flatten()):
        local = local.with_rows(rows, _LocalChoice(*_among_largest(pre_acts.of(rows), k, group)))
    return local.chosen()


def _candidates(pre_acts: PreActs, k: int, group: Group) -> tuple[Candidates, int]:
    """Return this rank's candidates for each token's k largest values, and the number of candidates each rank sends.

    Ranks on the same host exchange the bounds from a rounded product before they compute exact values. All of these
    ranks take part in the exchange, even a rank with too few latents for a rounded product.
    """
    n_sent = min(k, -(-MARGIN_PER_TOKEN * k // group.size))
    n_seen = max(n_sent, first_look.n_seen(k, group.size))
    tells = pre_acts.may_be_rounded and group.is_on_one_machine
    n_sent = n_seen if tells else n_sent
    n_own = min(n_sent, pre_acts.shape[1])
    looked = pre_acts.look(n_own, n_seen)
    if not tells:
        return looked.exact(looked.lower.new_full((len(looked.lower),), -torch.inf)).largest(n_own), n_sent
    gathered = group.to_owners(_pad(looked.lower, n_sent)).movedim(0, 1).flatten(1)
    least = group.from_owners(top_k.kth(gathered, k).expand(group.size, -1), len(looked.lower))
    return looked.exact(least), n_sent


def _selected(gathered: Tensor, k: int) -> Tensor:
    """Return a mask [n_ranks, n_tokens, n + 1] of the candidates that are among the k largest for their token.

    `gathered` [n_ranks, n_tokens, n + 1] contains n candidates followed by their ceiling. The last column of the result
    marks tokens whose result is not final yet, since an unsent value might be among their k largest values.
    """
    candidates, ceilings = gathered[:, :, :-1].movedim(0, 1), gathered[:, :, -1]
    is_chosen, smallest = _are_largest(candidates, k)
    # The negated comparison is True for NaN.
    is_open = ~(ceilings <= smallest).all(dim=0)
    return torch.cat([is_chosen.movedim(0, 1), is_open.expand(len(ceilings), -1)[:, :, None]], dim=2)


class _LocalChoice(NamedTuple):
    """This rank's candidates: columns [n_tokens, n], values, and a mask of the chosen candidates."""

    columns: Tensor
    values: Tensor
    is_chosen: Tensor

    def with_rows(self, rows: Tensor, others: _LocalChoice) -> _LocalChoice:
        """Replace the rows of the given tokens with `others`."""
        width = max(self.columns.shape[1], others.columns.shape[1])
        pairs = zip(self, others, strict=True)
        return _LocalChoice(*(_pad(own, width).index_copy(0, rows, _pad(other, width)) for own, other in pairs))

    def chosen(self) -> Chosen:
        flat, tokens, starts = top_k.marked(self.is_chosen)
        latents = self.columns.flatten().index_select(0, flat)
        return SparseIndices(latents, tokens, starts), self.values.flatten().index_select(0, flat)


class _Entries(NamedTuple):
    """Activation entries: latents, ascending tokens, values, and a mask of the chosen entries, all [n]."""

    latents: Tensor
    tokens: Tensor
    values: Tensor
    is_chosen: Tensor

    def chosen_first(self, n_tokens: int, n_expected: int) -> Chosen:
        """Return all entries, chosen entries first; only the chosen entries are valid.

        `n_expected` is the approximate number of chosen entries.
        """
        if len(self.values) and (triton := SELECTIONS_ACROSS_RANKS.on(self.values)):
            latents, tokens, values, ascending, n = triton.chosen_first(*self, n_tokens)
        else:
            order = self.is_chosen.logical_not().byte().argsort(stable=True)
            ascending, values = self.tokens.where(self.is_chosen, n_tokens), self.values.where(self.is_chosen, 0)
            given = self.latents, self.tokens, values, ascending
            latents, tokens, values, ascending = (one.index_select(0, order) for one in given)
            n = self.is_chosen.sum()
        starts = torch.searchsorted(ascending, torch.arange(n_tokens, device=tokens.device))
        return SparseIndices(latents, tokens, starts, Filled(n, n_expected)), values


def _among_largest(pre_acts: PreActs, k: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns and values of each token's largest pre-activations on this rank, and a mask.

    The mask marks the values that are among the token's k largest over all ranks. All results are [n_tokens, n].
    """
    columns, values = pre_acts.largest(min(k, pre_acts.shape[1]))
    is_chosen, _ = _are_largest(group.to_owners(_pad(values, k)).movedim(0, 1), k)
    return columns, values, group.from_owners(is_chosen.movedim(0, 1), len(values))[:, : columns.shape[1]]


def k_per_batch(pre_acts: PreActs, k: float, n_tokens: int, group: Group, *, may_wait: bool = True) -> Chosen:
    """Choose the k · n_tokens largest values over all tokens and ranks; return this rank's share of them.

    If `may_wait` is False, the host does not wait for the GPU, and the result ends with padding.
    """
    if group.size == 1:
        return select.k_per_batch(pre_acts, k)
    return k_per_batch_of_layers([lambda: pre_acts], k, n_tokens, group, may_wait=may_wait)[0]


def k_per_batch_of_layers(
    layers: Sequence[Callable[[], PreActs]], k: float, n_tokens: int, group: Group, *, may_wait: bool = True
) -> list[Chosen]:
    """Choose the k · n_tokens largest values over all tokens, ranks and layers; return each layer's share on this rank.

    The pre-activations of one layer at a time are in memory, so `layers` contains functions that compute them. If
    `may_wait` is False, the host does not wait for the GPU, and the results end with padding.
    """
    n = round(k * n_tokens)
    n_expected = n // (len(layers) * group.size)
    likely = min(n, int(MARGIN_PER_BATCH * n / (len(layers) * group.size)) + 1)
    for n_sent in [likely, n] if may_wait else [n]:
        candidates, is_chosen = _among_largest_of_all(layers, n, n_sent, group)
        # The values that a layer did not send may be among the largest if all that it sent are.
        if n_sent == n or not is_chosen.all(dim=2).any():
            break
    own = zip(candidates, is_chosen[group.index], strict=True)
    return [one.chosen(mask[: len(one.flat)], n_expected, may_wait=may_wait) for one, mask in own]


class _LargestOfAll(NamedTuple):
    """A layer's largest values [n], their ascending indices in the flattened matrix, and the matrix's shape."""

    flat: Tensor
    values: Tensor
    shape: torch.Size

    def chosen(self, mask: Tensor, n_expected: int, *, may_wait: bool) -> Chosen:
        """Return the values that `mask` marks; there are about `n_expected`."""
        if may_wait:
            kept = mask.nonzero().flatten()
            return select.places_of(self.flat[kept], *self.shape), self.values[kept]
        n_tokens, d_sae = self.shape
        tokens = self.flat // d_sae
        return _Entries(self.flat - tokens * d_sae, tokens, self.values, mask).chosen_first(n_tokens, n_expected)


def _among_largest_of_all(
    layers: Sequence[Callable[[], PreActs]], n: int, n_sent: int, group: Group
) -> tuple[list[_LargestOfAll], Tensor]:
    """Return each layer's `n_sent` largest values on this rank, and a mask of the n largest over all ranks and layers.

    The mask is [n_ranks, n_layers, n_sent].
    """
    candidates = []
    for of_layer in layers:
        pre_acts = of_layer()
        largest = pre_acts.largest_of_all(min(n_sent, pre_acts.shape.numel()))
        candidates.append(_LargestOfAll(*largest, pre_acts.shape))
    sent = group.gather(torch.cat([_pad(one.values[None], n_sent) for one in candidates]))
    is_chosen, _ = _are_largest(sent.flatten()[None, None], n)
    return candidates, is_chosen.view(sent.shape)


def nth_largest(parts: Iterable[Tensor], n: int, group: Group) -> Tensor:
    """Return the n-th largest value over all ranks, 0-dim; only one chunk of the values is in memory at a time."""
    own: Tensor | None = None
    for part in parts:
        values = part.flatten()
        if own is not None:
            # On CPU, `topk` takes 16 bytes per value, so pass only values that can be among the n largest.
            values = torch.cat([own, values[values > own.amin()] if len(own) == n else values])
        own = values.topk(min(n, len(values)), sorted=False).values
    assert own is not None
    gathered = group.gather(F.pad(own, (0, n - len(own)), value=-torch.inf))
    return gathered.flatten().topk(n, sorted=False).values.amin()


def _are_largest(gathered: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return a mask [n_rows, n_ranks, n] of each row's k largest candidates, and the k-th largest [n_rows]."""
    flat = gathered.flatten(1)
    is_chosen, smallest = top_k.are_largest(flat, min(k, flat.shape[1]))
    return is_chosen.view(gathered.shape), smallest


def _pad(rows: Tensor, width: int) -> Tensor:
    """Pad rows to [n_rows, width] with values that are never chosen."""
    missing = width - rows.shape[1]
    return F.pad(rows, (0, missing), value=-torch.inf if rows.is_floating_point() else 0) if missing else rows
