"""Finds the positions of the largest values in a matrix.

To save time, the search reads only values that can be among the largest; the result is still exact. If columns are
grouped, the k groups with the largest maxima contain the k largest values. On a GPU, all shapes are therefore known in
advance, and the host never waits. Kernels in `triton_top_k` handle many rows, or many 16-bit values. On a CPU, shapes
may depend on the data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trainer.runtime.triton_kernels import LATENT_SELECTIONS

# The number of rows sampled to guess a bound, and the target number of values above the bound relative to the number
# requested. The fraction of a batch's values that exceed a bound differs by less than a sixth from the fraction in 64
# of its rows.
SAMPLE_ROWS, MARGIN = 64, 1.5
# The number of chunks per thread, chosen so that a chunk's results stay in the cache.
PARTS = 4
# The smallest group size; smaller groups save no time.
LEAST_GROUP = 6


def of_each(values: Tensor, k: int) -> Tensor:
    """Return the columns [n_rows, k] of the k largest values of each row, unordered; NaN is the largest value."""
    return largest_of_each(values, k)[0] if values.is_cuda else _by_groups(values, k)


def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns and values of each row's k largest elements, unordered, both [n_rows, k]."""
    if (triton := LATENT_SELECTIONS.on(values)) and triton.fits(values, k):
        found: tuple[Tensor, Tensor] = triton.largest_of_each(values, k)
        return found
    columns = _by_groups(values, k, _topk) if values.is_cuda else _by_groups(values, k)
    return columns, values.gather(1, columns)


def of_all(values: Tensor, n: int) -> Tensor:
    """Return the indices of the n largest values in the flattened matrix, ascending."""
    if (triton := LATENT_SELECTIONS.on(values)) and triton.fits_all(values, n):
        chosen: Tensor = triton.largest_of_all(values, n)
        return chosen
    if values.is_cuda:
        found = _by_groups(values.reshape(1, -1), n, _topk)[0]
        # Sorting 32-bit indices takes half as long as sorting 64-bit indices.
        return found.int().sort().values.long() if values.numel() < 2**31 else found.sort().values
    candidates = _candidates(values, n)
    is_chosen, _ = are_largest(values.flatten().index_select(0, candidates)[None], n)
    return candidates[is_chosen[0]]


def _candidates(values: Tensor, n: int) -> Tensor:
    """Return ascending indices into the flattened matrix that include those for its n largest values.

    All indices would take more memory than the matrix, so they are returned only if no bound rules out enough values.
    """
    margin = MARGIN
    while margin * n < values.numel():
        if len(indices := _not_below(values, guessed_bound(values, n, margin))) >= n:
            return indices
        margin *= 2
    return torch.arange(values.numel())


def are_largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return a mask [n_rows, n] of the k largest values of each row, and the k-th largest values [n_rows]."""
    if not k:
        return torch.zeros_like(values, dtype=torch.bool), values.new_full((len(values),), math.inf)
    if (triton := LATENT_SELECTIONS.on(values)) and triton.fits_whole(values, k):
        found: tuple[Tensor, Tensor] = triton.are_largest(values, k)
        return found
    if values.is_cuda:
        largest, columns = values.topk(k, dim=1, sorted=False)
        return _mask_of(values, columns), largest.amin(dim=1)
    smallest = kth(values, k)
    # The negated comparison is True for NaN.
    is_chosen = ~(values < smallest[:, None])
    # Any of several equal values may be chosen, but no more than k values in total.
    tied = (is_chosen.sum(dim=1) != k).nonzero().flatten()
    is_chosen[tied] = _mask_of(values[tied], _topk(values[tied], k))
    return is_chosen, smallest


def strongest(values: Tensor, k: int) -> Tensor:
    """Keep the k largest values of each row [n_rows, n] that are positive or NaN; replace all others by 0."""
    if (triton := LATENT_SELECTIONS.on(values)) and triton.fits_whole(values, k):
        found: Tensor = triton.strongest(values, k)
        return found
    return values.relu() * are_largest(values, k)[0]


def _mask_of(values: Tensor, columns: Tensor) -> Tensor:
    """Return a bool mask [n_rows, n] marking the given columns [n_rows, k] in each row."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, columns, True)


def guessed_bound(values: Tensor, n: int, margin: float = MARGIN) -> float:
    """Guess, from a sample of rows, a bound that slightly more than n values probably exceed."""
    sample = values[:: max(1, len(values) // SAMPLE_ROWS)].flatten()
    rank = min(math.ceil(margin * n * len(sample) / max(values.numel(), 1)), len(sample))
    return float(sample.topk(rank, sorted=False).values.min()) if rank else math.inf


def marked(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the marked elements of a mask [n_rows, n] on the CPU: indices into the flattened mask, rows, and starts.

    `starts` [n_rows] is the position of each row's first marked element. numpy needs a third of torch's time.
    """
    flat, counts = np.flatnonzero(mask.numpy()), mask.sum(dim=1)
    rows = np.repeat(np.arange(len(counts)), counts.numpy())
    return torch.from_numpy(flat), torch.from_numpy(rows), counts.cumsum(0) - counts


def by_rows(work: Callable[..., np.ndarray], *arrays: np.ndarray, n_parts: int = 0) -> np.ndarray:
    """Call `work` on row chunks of the arrays [n, ...] and return the concatenated results.

    This uses the same number of threads as torch; numpy by itself would use only one.
    """
    n_threads = torch.get_num_threads()
    parts = [np.array_split(array, max(PARTS * n_threads, n_parts)) for array in arrays]
    results = map(work, *parts) if n_threads == 1 else _pool(n_threads).map(work, *parts)
    return np.concatenate(list(results))


def numbers(test: Callable[..., np.ndarray], rows: np.ndarray, *beside: np.ndarray) -> Tensor:
    """Return ascending indices into the flattened `rows` [n, d] of the elements that pass `test`."""
    starts = np.arange(0, rows.size, rows.shape[1])

    def passing(starts: np.ndarray, *part: np.ndarray) -> np.ndarray:
        indices: np.ndarray = np.flatnonzero(test(*part)) + starts[:1]
        return indices

    return torch.from_numpy(by_rows(passing, starts, rows, *beside))


@functools.cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, "numpy")


def _topk(values: Tensor, k: int) -> Tensor:
    return values.topk(k, dim=-1, sorted=False).indices


def _partition(values: Tensor, k: int) -> Tensor:
    """Like `_topk` for rows [n_rows, n], but faster on CPU.

    On one core, 4,096 rows of 256 take 4 ms instead of 12 ms. With AVX2, numpy's `argpartition` takes 13 ms;
    `partition` uses vector instructions on more CPUs.
    """
    n = values.shape[1]
    if k == n:
        return torch.arange(n).expand(len(values), n)
    return torch.from_numpy(by_rows(functools.partial(_columns_of_largest, k=k), _numpy(values)))


def _columns_of_largest(rows: np.ndarray, k: int) -> np.ndarray:
    """Return the columns [n_rows, k] of the k largest values of each row [n_rows, n], for 0 < k < n."""
    place = rows.shape[1] - k
    # The negated comparison is True for NaN.
    is_large = ~(rows < np.partition(rows, place, axis=1)[:, place, None])
    # Every row has at least k such values, and more if several values equal the k-th largest value.
    if np.count_nonzero(is_large) > len(rows) * k:
        tied = np.flatnonzero(np.count_nonzero(is_large, axis=1) > k)
        is_large[tied] = False
        is_large[tied[:, None], np.argpartition(rows[tied], place, axis=1)[:, place:]] = True
    columns: np.ndarray = (np.flatnonzero(is_large) % rows.shape[1]).reshape(len(rows), k)
    return columns


def kth(values: Tensor, k: int) -> Tensor:
    """Return the k-th largest value of each row, [n_rows].

    For 4,096 rows of 64, this takes 0.6 ms on one core; `_topk` takes 2.7 ms.
    """
    place = values.shape[1] - k
    smallest = by_rows(lambda part: np.partition(part, place, axis=1)[:, place], _numpy(values))
    return torch.from_numpy(smallest).to(values.dtype)


def _numpy(values: Tensor) -> np.ndarray:
    """Convert to numpy, with 16-bit dtypes widened to fp32, since numpy lacks bf16 and is slow with fp16."""
    return values.numpy() if values.dtype in (torch.float32, torch.float64) else values.float().numpy()


def _group_size(n: int, k: int) -> int:
    """Return the divisor `size` of n that minimises n / size + k · size, the number of maxima and columns read."""
    return next(size for size in range(math.isqrt(n // max(k, 1)), -1, -1) if size <= 1 or n % size == 0)


def _by_groups(values: Tensor, k: int, search: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
    """Like `_partition`, but search only the k groups with the largest maxima.

    A value in any other group is at most that group's maximum, and at least k maxima are at least as large. A group
    consists of every (n / size)th column, so that the maxima can be computed with vector instructions. `search` finds
    the largest maxima, and then the largest values of the chosen groups; by default, both searches use groups again.
    """
    n_rows, n = values.shape
    if (size := _group_size(n, k)) < LEAST_GROUP or not k:
        return (search or _partition)(values, k)
    search = search or _by_groups
    n_groups = n // size
    grouped = values.view(n_rows, size, n_groups)
    groups = search(grouped.amax(dim=1), k)
    members = grouped.gather(2, groups[:, None].expand(-1, size, -1)).view(n_rows, size * k)
    indices = search(members, k)
    return groups.gather(1, indices % k) + indices // k * n_groups


def _not_below(values: Tensor, bound: float) -> Tensor:
    """Return ascending indices of the values in the flattened matrix that are above the bound or NaN."""
    return numbers(lambda rows: ~(rows <= bound), _numpy(values))
