"""Hides the GPUs excluded by CUDA_VISIBLE_DEVICES, or by another vendor's equivalent variable.

Hidden GPUs are sampled and stored, but not shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sae_tui.gpu.base import GpuSample
from trainer.contract.errors import UserError
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor


def visible(
    samples: Iterable[GpuSample], source_name: str, environ: Mapping[str, str] = os.environ
) -> tuple[GpuSample, ...]:
    """Return the samples of the visible GPUs; simulated GPUs are never hidden."""
    samples = tuple(samples)
    gpus = [(sample.index, sample.uuid, sample.vendor or source_name) for sample in samples]
    left = left_by(gpus, lambda vendor: vendor.visible_devices(environ))
    return tuple(sample for sample in samples if sample.index in left)


def left_by(gpus: Iterable[tuple[int, str, str]], variable: Callable[[Vendor], str | None]) -> set[int]:
    """Return the indices of the GPUs that remain visible; each GPU is a tuple of index, UUID and vendor.

    `variable` returns the value of a vendor's variable, in which that vendor's GPUs are numbered from 0. GPUs without a
    known vendor, such as simulated GPUs, remain visible.
    """
    by_vendor: dict[str, list[tuple[int, str]]] = {}
    for index, uuid, name in gpus:
        by_vendor.setdefault(name, []).append((index, uuid))
    left: set[int] = set()
    for name, own in by_vendor.items():
        first = min(index for index, _ in own)
        numbered = [(index - first, uuid) for index, uuid in own]
        vendor = VENDORS.get(name)
        left |= (
            {first + index for index in vendor.visible_indices(variable(vendor), numbered)}
            if vendor
            else {index for index, _ in own}
        )
    return left


def of_these(samples: Iterable[GpuSample], only: Collection[int]) -> tuple[GpuSample, ...]:
    """Return the samples of the GPUs with these indices, or all samples if `only` is empty."""
    return tuple(sample for sample in samples if not only or sample.index in only)


def refuse_missing(only: Iterable[int], samples: Sequence[GpuSample]) -> None:
    """Raise `UserError` if one of these indices does not belong to any GPU."""
    indices = [sample.index for sample in samples]
    if missing := [index for index in only if index not in indices]:
        raise UserError(f"--only: there is no GPU {missing[0]} here; this machine has {ranges(indices)}")


def count_visible(n_visible: int, n_gpus: int, source_name: str, *, n_shown: int | None = None) -> str:
    """Return a string like `2 of 8 GPUs, by CUDA_VISIBLE_DEVICES`, or "" if no GPU is hidden.

    `n_shown` is the number of visible GPUs left after applying `--only`.
    """
    n_shown = n_visible if n_shown is None else n_shown
    causes = [_variables(source_name)] if n_visible < n_gpus else []
    causes += ["--only"] if n_shown < n_visible else []
    return f"{n_shown} of {n_gpus} GPUs, by {' and '.join(causes)}" if causes else ""


def all_hidden(n_gpus: int, source_name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the message to show if all GPUs are hidden, with a remedy."""
    variable = _variables(source_name, environ)
    limit = environ.get(variable)
    value = "" if limit is None else f'="{limit}"'
    return f"{variable}{value} hides all {n_gpus} GPUs; unset it, or list GPUs in it"


def _variables(source_name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the names of all set variables that can hide this source's GPUs, joined by "and".

    For a source with GPUs from several vendors, consider all vendors' variables. If no variable is set, return the
    first vendor's main variable.
    """
    vendors = [VENDORS[source_name]] if source_name in VENDORS else list(VENDORS.values())
    names = dict.fromkeys(name for vendor in vendors for name in vendor.limits(environ))
    return " and ".join(names) or vendors[0].variable


def ranges(numbers: Sequence[int]) -> str:
    """Format GPU indices, like `GPUs 0, 2-7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return f"GPU{'s' * (len(numbers) > 1)} {', '.join(words)}"
