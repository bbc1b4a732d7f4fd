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

# As many numbers as numpy sorts at once, without partitioning: on one core it finds the 64 largest of 512 in 0.4 µs,
# and of 768 in 2.5 µs.
AT_ONCE = 512
# Where the columns of the chosen groups are more than that: the most columns in a group, as a share of the number that
# leaves the fewest maxima and columns together. It is below 1 since columns of chosen groups have to be fetched.
SHARE_OF_BEST = 0.6
# Bytes of the rows that are looked through at a time.
PART_BYTES = 2**22


def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns of each row's k largest bf16 numbers, and these as floats, the smallest first: [n_rows, k].

    Positive bf16 numbers are ordered as the integers of the same bits. Of a row with fewer than k of them all are
    returned, and beside them any that are not positive.
    """
    levels = _levels(values.view(torch.int16), k)
    kind, shift = (np.int32, 16) if values.shape[1] <= 2**16 else (np.int64, 32)
    n_parts = max(1, values.nbytes // PART_BYTES)
    among = functools.partial(_among_levels, k=k, kind=kind, shift=shift)
    keys = torch.from_numpy(top_k.by_rows(among, *(level.numpy() for level in levels), n_parts=n_parts))
    largest = (keys >> shift).to(torch.int16).view(torch.bfloat16).float()
    return (keys & ((1 << shift) - 1)).long(), largest


def _levels(bits: Tensor, k: int) -> list[Tensor]:
    """Return rows [n_rows, n], maxima of groups of their columns, maxima of groups of those, and so on."""
    levels = [bits]
    while (size := _group_size(bits.shape[1], k)) > 1:
        # Of groups of every (n / size)th column; numpy takes three times as long for them.
        bits = bits.view(len(bits), size, bits.shape[1] // size).amax(dim=1)
        levels.append(bits)
    return levels


def _group_size(n: int, k: int) -> int:
    """Return the columns in a group, of which only the maximum is looked at first; 1 where grouping saves nothing.

    Such sizes lead to at most `AT_ONCE` maxima in a few steps: of 2,048 rows of 16,384 columns 64 are found in 19 ms,
    and in 33 where groups are not grouped again.
    """
    if (ratio := n / AT_ONCE) <= 1:
        return 1
    most = min(n // (2 * k), max(AT_ONCE // k, int(SHARE_OF_BEST * math.sqrt(n / k))))
    sizes = [size for size in range(2, most + 1) if n % size == 0]
    least = ratio if ratio <= 4 else math.sqrt(ratio)
    return next((size for size in sizes if size >= least), max(sizes, default=1))


def _among_levels(*levels: np.ndarray, k: int, kind: type, shift: int) -> np.ndarray:
    """Return the keys of the k largest of each row of the first level, the smallest first.

    Of each level only the k groups with the largest maxima are looked at.
    """
    *lower, top = levels
    found = _largest_of(_keys(top, np.arange(top.shape[1], dtype=kind), kind, shift), k)
    for bits in reversed(lower):
        groups = found & kind((1 << shift) - 1)
        flat, places = bits.reshape(-1), groups + np.arange(0, bits.size, bits.shape[1])[:, None]
        starts = range(0, bits.shape[1], top.shape[1])
        # All places are within bounds; with "clip" numpy does not check them once more.
        fetched = (_keys(flat[start:].take(places, mode="clip"), groups + kind(start), kind, shift) for start in starts)
        found, top = _largest_of(np.concatenate(list(fetched), axis=1), k), bits
    return found


def _keys(bits: np.ndarray, columns: np.ndarray, kind: type, shift: int) -> np.ndarray:
    keys: np.ndarray = bits.astype(kind)
    keys <<= shift
    keys |= columns
    return keys


def _largest_of(keys: np.ndarray, k: int) -> np.ndarray:
    rest = keys.shape[1] - k
    keys.partition(rest, axis=1)
    return keys[:, rest:]
