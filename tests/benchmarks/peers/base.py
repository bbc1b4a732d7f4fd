"""The interface that every recipe implements, and the settings shared by all recipes in a comparison."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setup:
    """The settings that all recipes in a comparison share."""

    d_in: int
    d_sae: int
    k: int
    batch_size: int
    n_steps: int
    device: str = "cpu"
    bf16: bool = False
    seed: int = 0
    # Whether a trainer may choose its own batch size; such a trainer gets the same tokens in different batches.
    own_steps: bool = False
    # A factor on the default learning rate of recipes whose rate can be tuned.
    rate: float = 1.0

    @property
    def n_tokens(self) -> int:
        return self.batch_size * self.n_steps

    def short(self, n_steps: int) -> int:
        """Cap `n_steps`, a library's default, at a tenth of the run."""
        return max(1, min(n_steps, self.n_steps // 10))

    @property
    def prefix_widths(self) -> list[int]:
        """The widths of the Matryoshka prefixes in our SAE and in the paper: from d_sae / 16 to d_sae."""
        return [self.d_sae // 2**level for level in (4, 3, 2, 1, 0)]


class Seen(NamedTuple):
    """A reconstruction [n_tokens, d_in], and a mask [n_tokens, d_sae] of the active latents."""

    x_hat: Tensor
    active: Tensor


class Recipe(ABC):
    """A trainer in a specific configuration; recipes with the same `kind` are compared."""

    name: str
    kind = "topk"
    package, module = "torch", "torch"
    # Whether this is another tool's trainer rather than our own or a loop written for these benchmarks.
    is_peer = True
    writes_sae = True
    # Whether the recipe uses `Setup.rate`.
    has_rate = False

    @abstractmethod
    def __init__(self, setup: Setup, sample: Tensor) -> None:
        """Build a fresh SAE for inputs like the rows in `sample` [n_tokens, d_in]."""

    def steps_of(self, setup: Setup) -> tuple[int, int]:
        """Return the rows per step and the number of steps."""
        return setup.batch_size, setup.n_steps

    @abstractmethod
    def step(self, x: Tensor) -> None:
        """Take one training step on x [batch_size, d_in]."""

    @abstractmethod
    def reconstruct(self, x: Tensor) -> Seen:
        """Reconstruct x [n_tokens, d_in] as the library's users would at this point in training."""

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        """Reconstruct x with k latents per token on average, even if inference uses a threshold."""
        return self.reconstruct(x)

    def save(self, folder: Path) -> None:
        """If the recipe `writes_sae`, save the SAE to an empty folder as the library does."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Return the requirement that this recipe lacks, or None."""
        return None if importlib.util.find_spec(cls.module) else f"{cls.package} is not installed"

    @classmethod
    def version(cls) -> str:
        """Return the package's name and version; omit the version if it is not installed as a package."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{cls.package} {importlib.metadata.version(cls.package)}"
        return cls.package


def largest(values: Tensor, k: int) -> Tensor:
    """Keep the k largest values of each row and set the others to 0."""
    top = values.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(values).scatter(-1, top.indices, top.values)
