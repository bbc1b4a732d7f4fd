"""The largest of each row of a bf16 matrix on a CPU, by numbers that hold a value's bits and, below them, its column.

numpy partitions such integers in vectors: the 64 largest of each of 4,096 rows of 512 in 3 ms on one core, where it
takes 10 to say which of as many floats they are.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from trainer.saes.kernels import top_k

# Columns in a group, of which only the maximum is looked at first. A size is at most this share of the one that leaves
# the fewest columns to look at, since the columns of the chosen groups have to be fetched: with 4 instead of 8, 48 of
# 1,536 take 10 ms instead of 14 on one core.
SIZES, SHARE_OF_BEST = (8, 6, 5, 4, 3, 2), 0.6
# Bytes of the rows that are looked through at a time.
PART_BYTES = 2**22


def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns [n_rows, k] of each row's k largest bf16 numbers, and the smallest of these, float [n_rows].

    Positive bf16 numbers are ordered as the integers of the same bits. Where one of a row's k largest is not positive,
    the row's columns may be any; the smallest number is then not positive.
    """
    n_rows, n = values.shape
    size = next((size for size in SIZES if n % size == 0 and size <= SHARE_OF_BEST * math.sqrt(n / k)), 1)
    bits = values.view(torch.int16)
    # Maxima of groups of every (n / size)th column; numpy takes three times as long for them.
    maxima = bits.view(n_rows, size, n // size).amax(dim=1).numpy()
    kind, shift = (np.int32, 16) if n <= 2**16 else (np.int64, 32)
    among = functools.partial(_among_groups, k=k, kind=kind, shift=shift)
    n_parts = max(1, values.nbytes // PART_BYTES)
    keys = torch.from_numpy(top_k.by_rows(among, maxima, bits.numpy(), n_parts=n_parts))
    lowest = (keys[:, 0] >> shift).to(torch.int16).view(torch.bfloat16).float()
    return (keys & ((1 << shift) - 1)).long(), lowest


def _among_groups(maxima: np.ndarray, bits: np.ndarray, k: int, kind: type, shift: int) -> np.ndarray:
    """Return the keys of the k largest of each row, the smallest first, among the k groups with the largest maxima."""
    n_groups = maxima.shape[1]
    if n_groups == bits.shape[1]:
        return _largest_of(_keys(maxima, np.arange(n_groups, dtype=kind), kind, shift), k)
    groups = _largest_of(_keys(maxima, np.arange(n_groups, dtype=kind), kind, shift), k) & kind((1 << shift) - 1)
    flat, places = bits.reshape(-1), groups + np.arange(0, bits.size, bits.shape[1])[:, None]
    starts = range(0, bits.shape[1], n_groups)
    # All places are within bounds; with "clip" numpy does not check them once more.
    fetched = (_keys(flat[start:].take(places, mode="clip"), groups + kind(start), kind, shift) for start in starts)
    return _largest_of(np.concatenate(list(fetched), axis=1), k)


def _keys(bits: np.ndarray, columns: np.ndarray, kind: type, shift: int) -> np.ndarray:
    keys: np.ndarray = bits.astype(kind)
    keys <<= shift
    keys |= columns
    return keys


def _largest_of(keys: np.ndarray, k: int) -> np.ndarray:
    rest = keys.shape[1] - k
    keys.partition(rest, axis=1)
    return keys[:, rest:]
