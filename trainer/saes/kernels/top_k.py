"""Finds where the largest values of a matrix are.

Most of the work is saved by looking only at what can be among the largest; the result is the same. On a GPU all shapes
are known beforehand, so that the host never waits: of n columns in groups, the groups with the k largest maxima hold
the k largest; kernels look through many rows, or many values of 16 bits (`triton_top_k`). On a CPU shapes may depend
on the data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from trainer.runtime.triton_kernels import working_kernels

# Rows in the sample that a bound is guessed from, and how many times as many values as are wanted should lie above it:
# a batch's share above a bound differs from that of 64 of its rows by less than a sixth.
SAMPLE_ROWS, MARGIN = 64, 1.5
# Parts of each thread's rows, so that the results of one stay in the cache.
PARTS = 4
# Groups of fewer columns save nothing.
LEAST_GROUP = 6


def of_each(values: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest of each row [n_rows, k], in no order; a NaN counts as larger than all."""
    return largest_of_each(values, k)[0] if values.is_cuda else _by_groups(values, k)


def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the same, and the values there [n_rows, k]."""
    if (triton := triton_for(values)) and triton.fits(values, k):
        found: tuple[Tensor, Tensor] = triton.largest_of_each(values, k)
        return found
    columns = _by_groups(values, k, _topk) if values.is_cuda else _by_groups(values, k)
    return columns, values.gather(1, columns)


def of_all(values: Tensor, n: int) -> Tensor:
    """Return the n largest of all, as ascending indices into the flattened matrix."""
    if (triton := triton_for(values)) and triton.fits_all(values, n):
        chosen: Tensor = triton.largest_of_all(values, n)
        return chosen
    if values.is_cuda:
        found = _by_groups(values.reshape(1, -1), n, _topk)[0]
        # Half as wide they are sorted in half the time.
        return found.int().sort().values.long() if values.numel() < 2**31 else found.sort().values
    candidates = _candidates(values, n)
    is_chosen, _ = are_largest(values.flatten().index_select(0, candidates)[None], n)
    return candidates[is_chosen[0]]


def _candidates(values: Tensor, n: int) -> Tensor:
    """Return ascending indices into the flattened matrix that include its n largest.

    They are seldom all indices, which take more memory than the matrix.
    """
    margin = MARGIN
    while margin * n < values.numel():
        if len(indices := _not_below(values, guessed_bound(values, n, margin))) >= n:
            return indices
        margin *= 2
    return torch.arange(values.numel())


def are_largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tell which values are among the k largest of their row, bool [n_rows, n]; return also the k-th [n_rows]."""
    if not k:
        return torch.zeros_like(values, dtype=torch.bool), values.new_full((len(values),), math.inf)
    if (triton := triton_for(values)) and triton.fits_whole(values, k):
        found: tuple[Tensor, Tensor] = triton.are_largest(values, k)
        return found
    if values.is_cuda:
        largest, columns = values.topk(k, dim=1, sorted=False)
        return _mask_of(values, columns), largest.amin(dim=1)
    smallest = kth(values, k)
    # Negated so that it is true of a NaN.
    is_chosen = ~(values < smallest[:, None])
    # Of several that are equal any may be chosen, but no more than k.
    tied = (is_chosen.sum(dim=1) != k).nonzero().flatten()
    is_chosen[tied] = _mask_of(values[tied], _topk(values[tied], k))
    return is_chosen, smallest


def strongest(values: Tensor, k: int) -> Tensor:
    """Return the k largest of each row where they are positive or NaN, in place of all others 0: [n_rows, n]."""
    if (triton := triton_for(values)) and triton.fits_whole(values, k):
        found: Tensor = triton.strongest(values, k)
        return found
    return values.relu() * are_largest(values, k)[0]


def triton_for(values: Tensor) -> ModuleType | None:
    """Return the Triton kernels where they work, on a GPU; else None."""
    return _working_triton(values.device) if values.is_cuda else None


def _working_triton(device: torch.device) -> ModuleType | None:
    return working_kernels("trainer.saes.kernels.triton_top_k", device)


def _mask_of(values: Tensor, columns: Tensor) -> Tensor:
    """Mark some columns [n_rows, k] of rows [n_rows, n] in a bool of the rows' shape."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, columns, True)


def guessed_bound(values: Tensor, n: int, margin: float = MARGIN) -> float:
    """Guess from a sample a bound that probably more than n values, but not many more, exceed."""
    sample = values[:: max(1, len(values) // SAMPLE_ROWS)].flatten()
    rank = min(math.ceil(margin * n * len(sample) / max(values.numel(), 1)), len(sample))
    return float(sample.topk(rank, sorted=False).values.min()) if rank else math.inf


def by_rows(work: Callable[..., np.ndarray], *arrays: np.ndarray, n_parts: int = 0) -> np.ndarray:
    """Call `work` on parts of the rows of arrays [n, ...] and return the results joined.

    It takes as many threads as torch uses; numpy alone takes one.
    """
    n_threads = torch.get_num_threads()
    parts = [np.array_split(array, max(PARTS * n_threads, n_parts)) for array in arrays]
    results = map(work, *parts) if n_threads == 1 else _pool(n_threads).map(work, *parts)
    return np.concatenate(list(results))


def numbers(test: Callable[..., np.ndarray], rows: np.ndarray, *beside: np.ndarray) -> Tensor:
    """Find where a test of rows [n, d] holds: ascending indices into the flattened matrix."""
    starts = np.arange(0, rows.size, rows.shape[1])

    def passing(starts: np.ndarray, *part: np.ndarray) -> np.ndarray:
        places: np.ndarray = np.flatnonzero(test(*part)) + starts[:1]
        return places

    return torch.from_numpy(by_rows(passing, starts, rows, *beside))


@functools.cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, "numpy")


def _topk(values: Tensor, k: int) -> Tensor:
    return values.topk(k, dim=-1, sorted=False).indices


def _partition(values: Tensor, k: int) -> Tensor:
    """Return the same as `_topk` for [n_rows, n]: of 4,096 rows of 1,024 on two cores in 6 ms instead of 17."""
    n = values.shape[1]
    if k == n:
        return torch.arange(n).expand(len(values), n)
    return torch.from_numpy(by_rows(lambda part: np.argpartition(part, n - k, axis=1)[:, n - k :], _numpy(values)))


def kth(values: Tensor, k: int) -> Tensor:
    """Return the k-th largest of each row [n_rows]: of 4,096 rows of 64 on one core in 0.6 ms; `_topk` takes 2.7."""
    place = values.shape[1] - k
    smallest = by_rows(lambda part: np.partition(part, place, axis=1)[:, place], _numpy(values))
    return torch.from_numpy(smallest).to(values.dtype)


def _numpy(values: Tensor) -> np.ndarray:
    """Convert to numpy, narrow types as fp32: numpy has no bf16 and is slow at fp16."""
    return values.numpy() if values.dtype in (torch.float32, torch.float64) else values.float().numpy()


def _group_size(n: int, k: int) -> int:
    """Return the divisor of n for which n / size group maxima and k · size columns are fewest together."""
    return next(size for size in range(math.isqrt(n // max(k, 1)), -1, -1) if size <= 1 or n % size == 0)


def _by_groups(values: Tensor, k: int, search: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
    """Return the same as `_partition`, but look only at the k groups with the largest maxima.

    A column of another group is at most its group's maximum, and k maxima are at least as large. A group takes
    every (n / size)th column, which lets the maxima be taken in vectors. The maxima and the chosen groups' columns are
    searched by `search`, where there is none by groups again.
    """
    n_rows, n = values.shape
    if (size := _group_size(n, k)) < LEAST_GROUP or not k:
        return (search or _partition)(values, k)
    search = search or _by_groups
    n_groups = n // size
    grouped = values.view(n_rows, size, n_groups)
    groups = search(grouped.amax(dim=1), k)
    members = grouped.gather(2, groups[:, None].expand(-1, size, -1)).view(n_rows, size * k)
    places = search(members, k)
    return groups.gather(1, places % k) + places // k * n_groups


def _not_below(values: Tensor, bound: float) -> Tensor:
    """Return the indices of flattened values that are above the bound or NaN, ascending."""
    return numbers(lambda rows: ~(rows <= bound), _numpy(values))
