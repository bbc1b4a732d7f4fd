"""Where the largest values of a matrix are.

On a GPU all shapes are known beforehand, so that the host never waits. On a CPU asking is free, and most of the work
is spared by looking only at what can be among the largest; the result is the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# Rows in the sample that a bound is guessed from, and how many times as many as are wanted should lie above it: a
# batch's share above a bound differs from that of 64 of its rows by less than a sixth.
SAMPLE_ROWS, MARGIN = 64, 1.5
# Of a thread's rows, so that what is made of one stays in the cache.
PARTS = 4
# Columns taken together below this save nothing.
LEAST_GROUP = 6


def of_each(values: Tensor, k: int) -> Tensor:
    """The columns of the k largest of each row [n_rows, k], in no order; a NaN counts as larger than all."""
    return _topk(values, k) if values.is_cuda else _by_groups(values, k)


def of_all(values: Tensor, n: int) -> Tensor:
    """The n largest of all, as ascending numbers in the flattened matrix."""
    if values.is_cuda:
        return _topk(values.flatten(), n).sort().values
    candidates = _candidates(values, n)
    is_chosen, _ = are_largest(values.flatten().index_select(0, candidates)[None], n)
    return candidates[is_chosen[0]]


def _candidates(values: Tensor, n: int) -> Tensor:
    """Numbers in the flattened matrix, ascending, among which its n largest are: seldom all of them, which take more
    memory than the matrix."""
    margin = MARGIN
    while margin * n < values.numel():
        if len(found := _not_below(values, guessed_bound(values, n, margin))) >= n:
            return found
        margin *= 2
    return torch.arange(values.numel())


def are_largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Which are among the k largest of their row [n_rows, n], bool, and the smallest of these [n_rows]."""
    if not k:
        return torch.zeros_like(values, dtype=torch.bool), values.new_full((len(values),), math.inf)
    if values.is_cuda:
        found, chosen = values.topk(k, dim=1, sorted=False)
        return _marked(values, chosen), found.amin(dim=1)
    smallest = _kth(values, k)
    # Said so that it is true of a NaN.
    is_chosen = ~(values < smallest[:, None])
    # Of several that are equal any may be chosen, but no more than k.
    tied = (is_chosen.sum(dim=1) != k).nonzero().flatten()
    is_chosen[tied] = _marked(values[tied], _topk(values[tied], k))
    return is_chosen, smallest


def _marked(values: Tensor, columns: Tensor) -> Tensor:
    """Where some columns [n_rows, k] of rows [n_rows, n] are, bool."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, columns, True)


def guessed_bound(values: Tensor, n: int, margin: float = MARGIN) -> float:
    """A value that probably more than n, but not many more, lie above."""
    sample = values[:: max(1, len(values) // SAMPLE_ROWS)].flatten()
    rank = min(math.ceil(margin * n * len(sample) / max(values.numel(), 1)), len(sample))
    return float(sample.topk(rank, sorted=False).values.min()) if rank else math.inf


def by_rows(work: Callable[..., np.ndarray], *arrays: np.ndarray, n_parts: int = 0) -> np.ndarray:
    """What numpy makes of the rows of arrays [n, ...], on as many threads as torch uses: alone it takes one."""
    n_threads = torch.get_num_threads()
    parts = [np.array_split(array, max(PARTS * n_threads, n_parts)) for array in arrays]
    found = map(work, *parts) if n_threads == 1 else _pool(n_threads).map(work, *parts)
    return np.concatenate(list(found))


def numbers(test: Callable[..., np.ndarray], rows: np.ndarray, *beside: np.ndarray) -> Tensor:
    """Where a test of rows [n, d] holds, as ascending numbers in the flattened matrix."""
    starts = np.arange(0, rows.size, rows.shape[1])

    def found(starts: np.ndarray, *part: np.ndarray) -> np.ndarray:
        return np.flatnonzero(test(*part)) + starts[:1]

    return torch.from_numpy(by_rows(found, starts, rows, *beside))


@functools.cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, "numpy")


def _topk(values: Tensor, k: int) -> Tensor:
    return values.topk(k, dim=-1, sorted=False).indices


def _partitioned(values: Tensor, k: int) -> Tensor:
    """As `_topk` of [n_rows, n]: for 4,096 rows of 1,024 on two cores 6 ms instead of 17."""
    n = values.shape[1]
    if k == n:
        return torch.arange(n).expand(len(values), n)
    return torch.from_numpy(by_rows(lambda part: np.argpartition(part, n - k, axis=1)[:, n - k :], _numpy(values)))


def _kth(values: Tensor, k: int) -> Tensor:
    """The k-th largest of each row [n_rows]: of 4,096 rows of 64 on one core in 0.6 ms, where `_topk` takes 2.7."""
    place = values.shape[1] - k
    found = by_rows(lambda part: np.partition(part, place, axis=1)[:, place], _numpy(values))
    return torch.from_numpy(found).to(values.dtype)


def _numpy(values: Tensor) -> np.ndarray:
    """numpy has no bf16, and is fast at no fp16."""
    return values.numpy() if values.dtype in (torch.float32, torch.float64) else values.float().numpy()


def _group_size(n: int, k: int) -> int:
    """The divisor of n that makes n / size group maxima and k · size columns fewest together."""
    return next(size for size in range(math.isqrt(n // k), -1, -1) if size <= 1 or n % size == 0)


def _by_groups(values: Tensor, k: int) -> Tensor:
    """The same as `_partitioned`, but only among the k groups with the largest maxima.

    A column of another group is at most its group's maximum, and k maxima are at least as large. A group takes
    every (n / size)th column, which lets the maxima be taken in vectors. Maxima and columns are sought through in
    the same way.
    """
    n_rows, n = values.shape
    if (size := _group_size(n, k)) < LEAST_GROUP:
        return _partitioned(values, k)
    n_groups = n // size
    grouped = values.view(n_rows, size, n_groups)
    groups = _by_groups(grouped.amax(dim=1), k)
    found = grouped.gather(2, groups[:, None].expand(-1, size, -1)).view(n_rows, size * k)
    places = _by_groups(found, k)
    return groups.gather(1, places % k) + places // k * n_groups


def _not_below(values: Tensor, bound: float) -> Tensor:
    """Where the flattened values are above the bound or NaN, ascending."""
    return numbers(lambda rows: ~(rows <= bound), _numpy(values))
