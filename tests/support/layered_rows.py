"""Rows at the MLPs of three layers, for cross-layer transcoders: features of earlier layers also affect later ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

LAYERS, D, N_ROWS = (2, 3, 4), 16, 3_000
# The norms of the targets differ between layers, as in language models.
SCALES = (1.0, 4.0, 20.0)


def write_layers(folder: Path, outlier: int | None = None) -> None:
    """Write inputs and targets for three layers. The input of the last layer is far larger in the row `outlier`."""
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(N_ROWS, dtype=torch.int32)
    origin = {"token_ids": number % 48, "positions": number % 50, "document": number // 50}
    read, written = [], [torch.zeros(N_ROWS, D) for _ in LAYERS]
    for layer in range(len(LAYERS)):
        acts = (torch.rand(N_ROWS, 24, generator=generator) < 0.08) * torch.rand(N_ROWS, 24, generator=generator)
        read.append(acts @ _directions(24, generator) + 0.3)
        for target in range(layer, len(LAYERS)):
            written[target] += acts @ _directions(24, generator)
    if outlier is not None:
        read[-1][outlier] *= 1000
    for layer, x, y, scale in zip(LAYERS, read, written, SCALES, strict=True):
        for site, rows in (("mlp_in", x), ("mlp_out", scale * y + scale)):
            place = folder / f"{site}.{layer}"
            place.mkdir(parents=True)
            save_file({"activations": rows.contiguous(), **origin}, place / "shard-00000.safetensors")


def write_two_steps(folder: Path) -> None:
    """Write the rows of a computation in two steps: the first MLP ANDs pairs of bits, the second MLP ANDs its results.

    The second MLP reads the results of the first one in the residual stream. The first MLP writes nothing else.
    """
    generator = torch.Generator().manual_seed(0)
    bits = (torch.rand(N_ROWS, 8, generator=generator) < 0.4).float()
    first = bits[:, ::2] * bits[:, 1::2]
    second = first[:, [0, 2, 0, 1]] * first[:, [1, 3, 2, 3]]
    number = torch.arange(N_ROWS, dtype=torch.int32)
    origin = {"token_ids": number % 50, "positions": number % 50, "document": number // 50}
    read, written = bits @ _directions(8, generator), first @ _directions(4, generator)
    rows = {"mlp_in.0": read, "mlp_out.0": written, "mlp_in.1": read + written}
    rows["mlp_out.1"] = second @ _directions(4, generator)
    for hook, clean in rows.items():
        noise = 0.01 * torch.randn(N_ROWS, D, generator=generator)
        (folder / hook).mkdir(parents=True)
        save_file({"activations": (clean + noise).contiguous(), **origin}, folder / hook / "shard-00000.safetensors")


def _directions(n: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(n, D, generator=generator), dim=1)
