"""The figures of a crosscoder: its parts, and in which of them each latent writes.

A latent has a decoder row in each part. Its norms are the norms of these rows, with the parts scaled as in training.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from trainer.contract.printable import printable
from trainer.contract.settings.sources import SourceSettings
from trainer.contract.wording import join_words

# A latent is only in one part if the part's share of its norms exceeds `ONLY`. It is shared if every part's share
# exceeds `LEAST_SHARED` times an equal share, which is 0.4 for two parts. Minder et al. 2025 (arXiv 2504.02922) use
# 0.1, 0.4, 0.6 and 0.9. Their relative norm divides the difference by the larger norm, so here, "only" is stricter.
ONLY, LEAST_SHARED = 0.9, 0.8
# A latent that is only in one part is confirmed if its ratios of latent scaling are below these values, as in Minder
# et al.
MOST_NU_ERROR, MOST_NU_RECONSTRUCTION = 0.2, 0.5
NORM_BINS = 20
SHARED, OTHER = "shared", "other"
# The settings that can differ between the parts, in the order in which they are named.
_NAMED = ("model", "revision", "path", "hook")


class CrosscoderPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a crosscoder's rows: its name, width, scale and FVU, and the latents that are only in this part.

    `scale` is the part's scale in training as a multiple of the largest one. Of the latents that are only in this part,
    `n_only` fire on the measured rows, and `n_only_dead` do not. Latent scaling has confirmed `n_confirmed` of those
    that fire; None if it was not measured.
    """

    name: str
    width: int
    scale: float = 1.0
    fvu: float = math.nan
    fvu_error: float = math.nan
    n_only: int = 0
    n_only_dead: int = 0
    n_confirmed: int | None = None


class Crosscoder(msgspec.Struct, frozen=True, kw_only=True):
    """A crosscoder's parts, and the number of latents that are not only in one part.

    `n_shared` and `n_other` fire on the measured rows, and `n_shared_dead` and `n_other_dead` do not. `norms` is a
    histogram of the latents that fire, in `NORM_BINS` bins of their relative norm from 0 to 1: the second part's share
    for two parts, otherwise the largest share. `n_rows` is the number of rows used for latent scaling, or 0 if it was
    not measured.
    """

    parts: Annotated[tuple[CrosscoderPart, ...], msgspec.Meta(min_length=2)]
    n_shared: int = 0
    n_shared_dead: int = 0
    n_other: int = 0
    n_other_dead: int = 0
    norms: list[int] = []
    n_rows: int = 0


def letter(part: int) -> str:
    """Return the short name of a part: A, B, …"""
    return chr(ord("A") + part) if part < 26 else str(part + 1)


def relative_norm(shares: Sequence[float]) -> float:
    """Return the second of two parts' share of a latent's norms or, for more parts, the largest share."""
    return shares[1] if len(shares) == 2 else max(shares)


def kind_of(shares: Sequence[float]) -> str:
    """Return the letter of the only part in which a latent writes, or `SHARED`, or `OTHER`."""
    most = max(range(len(shares)), key=shares.__getitem__)
    if shares[most] > ONLY:
        return letter(most)
    return SHARED if min(shares) > LEAST_SHARED / len(shares) else OTHER


def is_confirmed(shares: Sequence[float], nu_error: float, nu_reconstruction: float) -> bool:
    """Return whether a latent is only in one part according to its norms and to latent scaling."""
    return max(shares) > ONLY and nu_error < MOST_NU_ERROR and nu_reconstruction < MOST_NU_RECONSTRUCTION


def part_names(settings: SourceSettings) -> tuple[str, ...]:
    """Return the names of the parts that a crosscoder's rows are joined from: what differs between them; () if none."""
    parts = settings.parts()
    values = [[str(getattr(part, name, None) or "") for part in parts] for name in _NAMED]
    differing = [_without_common(of_parts) for of_parts in values if len({*of_parts}) > 1]
    return tuple(map(" ".join, zip(*differing, strict=True)))


def _without_common(paths: Sequence[str]) -> list[str]:
    """Return short names that differ: the last folders in which the paths differ or, if needed, more of the paths."""
    split = [path.rstrip(os.sep).split(os.sep) for path in paths]
    rest = [path[_n_common(split) :] for path in split]
    n_after = max(0, min(_n_common([path[::-1] for path in rest]), min(map(len, rest)) - 1))
    rest = [path[: len(path) - n_after] or [os.curdir] for path in rest]
    last = [path[-1] for path in rest]
    return last if len({*last}) == len(last) else [os.sep.join(path) for path in rest]


def _n_common(paths: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False)))


def part_facts(one: Crosscoder) -> Iterator[tuple[str, str]]:
    """Yield the figures as pairs (title, text): a line for each part, and lines about the latents."""
    for number, part in enumerate(one.parts):
        error = f" ± {part.fvu_error:.4f}" if math.isfinite(part.fvu_error) else ""
        fvu = f"{part.fvu:.4f}{error}" if math.isfinite(part.fvu) else "unknown"
        yield (
            f"part {letter(number)}",
            f"{printable(part.name)}: FVU {fvu}, {part.width:,} dimensions, scale {part.scale:.3g}",
        )
    counts = _counts([part.n_only for part in one.parts], one.n_shared, one.n_other)
    yield "latents by part", f"{counts}; by each part's share of their norms ({_limits(len(one.parts))})"
    yield from part_remarks(one)


def part_remarks(one: Crosscoder) -> Iterator[tuple[str, str]]:
    """Yield the figures that are not listed one by one on the screen."""
    yield "did not fire", _counts([part.n_only_dead for part in one.parts], one.n_shared_dead, one.n_other_dead)
    if scaling := scaling_words(one):
        yield "latent scaling", scaling


def _counts(only: Sequence[int], shared: int, other: int) -> str:
    of_parts = [f"{n:,} only in {letter(number)}" for number, n in enumerate(only)]
    return ", ".join([*of_parts, f"{shared:,} shared, {other:,} other"])


def _limits(n_parts: int) -> str:
    least = LEAST_SHARED / n_parts
    return f"only: > {ONLY}, shared: {f'{least:g} to {1 - least:g}' if n_parts == 2 else f'all > {least:.2g}'}"


def scaling_words(one: Crosscoder) -> str:
    """Return how many latents latent scaling has confirmed, or "" if it was not measured."""
    if not one.n_rows:
        return ""
    known = [
        f"{part.n_confirmed:,} of {part.n_only:,} only in {letter(number)}"
        for number, part in enumerate(one.parts)
        if part.n_confirmed is not None
    ]
    limits = f"ν error < {MOST_NU_ERROR}, ν reconstruction < {MOST_NU_RECONSTRUCTION}"
    return f"confirms {join_words(known)} ({limits}; {one.n_rows:,} rows)" if known else ""


def scales_words(names: Sequence[str], scales: Sequence[float]) -> str:
    """Return a clause like `parts scaled by 1 (resid_post.8) and 0.152 (resid_post.12)`."""
    return f"parts scaled by {join_words([f'{scale:.3g} ({name})' for name, scale in zip(names, scales, strict=True)])}"
