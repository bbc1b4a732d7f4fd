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

# Candidates of a rank for each value that is chosen from it on average: per token, and of a whole batch, where chance
# matters less.
MARGIN_PER_TOKEN, MARGIN_PER_BATCH = 4, 1.5


def k_per_token(pre_acts: Tensor, k: int, group: Group) -> Places:
    """The k largest of each token over all ranks, of those this rank's, from its latents' [n_tokens, n_own]."""
    if group.size == 1:
        return choose.k_per_token(pre_acts, k)
    columns, is_chosen = among_largest(pre_acts, k, group, min(k, -(-MARGIN_PER_TOKEN * k // group.size)))
    counts = is_chosen.sum(dim=1)
    tokens, places = is_chosen.nonzero(as_tuple=True)
    return Places(columns[tokens, places], tokens, counts.cumsum(0) - counts)


def among_largest(pre_acts: Tensor, k: int, group: Group, n_sent: int | None = None) -> tuple[Tensor, Tensor]:
    """Columns of this rank's largest for each token [n_tokens, n], and which of them are among the k of all ranks.

    `n_sent` candidates of each rank are enough in most cases; without it there are k.
    """
    n_sent = n_sent or k
    columns = choose.largest(pre_acts, min(n_sent, pre_acts.shape[1]))
    if group.size == 1:
        return columns, torch.ones_like(columns, dtype=torch.bool)
    is_chosen = _are_largest(pre_acts.gather(1, columns), n_sent, k, group)
    if n_sent < k and is_chosen.all(dim=2).any():
        return among_largest(pre_acts, k, group)
    return columns, is_chosen[:, group.index, : columns.shape[1]]


def k_per_batch(pre_acts: Tensor, k: float, n_tokens: int, group: Group) -> Places:
    """The k · n_tokens largest of all tokens of all ranks together; of those this rank's."""
    if group.size == 1:
        return choose.k_per_batch(pre_acts, k)
    n = round(k * n_tokens)
    for n_sent in (min(n, int(MARGIN_PER_BATCH * n / group.size) + 1), n):
        flat = choose.largest_of_all(pre_acts, min(n_sent, pre_acts.numel()))
        is_chosen = _are_largest(pre_acts.flatten()[flat][None], n_sent, n, group)[0]
        if n_sent == n or not is_chosen.all(dim=1).any():
            break
    return choose.places_of(flat[is_chosen[group.index, : len(flat)].nonzero().flatten()], pre_acts)


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
