"""The largest pre-activations of several ranks together, exactly, by exchanging candidates.

A rank sends its largest values only. Where all of a rank's candidates turn out to be chosen, more of its values might
have been: then all that could be chosen are exchanged. Everybody sees the same values, so all ranks decide alike.
Alone, it is the choice itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.parallel.group import Group
from trainer.saes.acts import Places
from trainer.saes.kernels import choose
from trainer.saes.kernels.choose import Chosen
from trainer.saes.kernels.pre_acts import PreActs

# Candidates of a rank for each value that is chosen from it on average: per token, and of a whole batch, where chance
# matters less.
MARGIN_PER_TOKEN, MARGIN_PER_BATCH = 4, 1.5


def k_per_token(pre_acts: PreActs, k: int, group: Group) -> Chosen:
    """The k largest of each token over all ranks, of those this rank's, from its latents' [n_tokens, n_own]."""
    if group.size == 1:
        return choose.k_per_token(pre_acts, k)
    n_sent = min(k, -(-MARGIN_PER_TOKEN * k // group.size))
    columns, values, is_chosen = among_largest(pre_acts, k, group, n_sent)
    counts = is_chosen.sum(dim=1)
    tokens, places = is_chosen.nonzero(as_tuple=True)
    return Places(columns[tokens, places], tokens, counts.cumsum(0) - counts), values[tokens, places]


def among_largest(pre_acts: PreActs, k: int, group: Group, n_sent: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of this rank's largest for each token, their values, and which are among the k of all ranks.

    All are [n_tokens, n]. `n_sent` candidates of each rank are enough in most cases; without it there are k.
    """
    n_sent = n_sent or k
    columns, values = pre_acts.largest(min(n_sent, pre_acts.shape[1]))
    if group.size == 1:
        return columns, values, torch.ones_like(columns, dtype=torch.bool)
    is_chosen = _are_largest(values, n_sent, k, group)
    if n_sent < k and is_chosen.all(dim=2).any():
        return among_largest(pre_acts, k, group)
    return columns, values, is_chosen[:, group.index, : columns.shape[1]]


def k_per_batch(pre_acts: PreActs, k: float, n_tokens: int, group: Group) -> Chosen:
    """The k · n_tokens largest of all tokens of all ranks together; of those this rank's."""
    if group.size == 1:
        return choose.k_per_batch(pre_acts, k)
    n = round(k * n_tokens)
    for n_sent in (min(n, int(MARGIN_PER_BATCH * n / group.size) + 1), n):
        flat, values = pre_acts.largest_of_all(min(n_sent, pre_acts.shape.numel()))
        is_chosen = _are_largest(values[None], n_sent, n, group)[0]
        if n_sent == n or not is_chosen.all(dim=1).any():
            break
    own = is_chosen[group.index, : len(flat)].nonzero().flatten()
    return choose.places_of(flat[own], *pre_acts.shape), values[own]


def nth_largest(values: Tensor, n: int, group: Group) -> Tensor:
    """The n-th largest of everybody's values, 0-dim."""
    own = values.flatten().topk(min(n, values.numel()), sorted=False).values
    everybodys = group.gather(F.pad(own, (0, n - len(own)), value=-torch.inf))
    return everybodys.flatten().topk(n, sorted=False).values.amin()


def _are_largest(values: Tensor, n_sent: int, k: int, group: Group) -> Tensor:
    """Which of everybody's candidates are among the k largest, bool [n_rows, n_ranks, n_sent], from own [n_rows, ≤]."""
    sent = F.pad(values, (0, n_sent - values.shape[1]), value=-torch.inf)
    everybodys = group.gather(sent).transpose(0, 1).flatten(1)
    chosen = everybodys.topk(min(k, everybodys.shape[1]), dim=1, sorted=False).indices
    is_chosen = torch.zeros_like(everybodys, dtype=torch.bool).scatter_(1, chosen, True)
    return is_chosen.view(len(values), group.size, n_sent)
