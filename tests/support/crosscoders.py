"""Data for crosscoders: rows of two hooks with planted directions. Some directions occur at only one hook."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

HOOKS = ("resid_post.1", "resid_post.2")
N_ROWS, N_PLANTED, SCALES = 6_000, 48, (1.0, 8.0)
# The directions that occur only at the first hook, or only at the second.
ONLY_A, ONLY_B = slice(32, 40), slice(40, 48)


def plant(folder: Path, widths: tuple[int, int] = (24, 32)) -> Tensor:
    """Write the rows of two hooks with their tokens; return the planted directions [48, Σ widths].

    Token number i is the word of the direction that fires most on a row.
    """
    generator = torch.Generator().manual_seed(0)
    directions = [normalize(torch.randn(N_PLANTED, width, generator=generator), dim=1) for width in widths]
    directions[0][ONLY_B], directions[1][ONLY_A] = 0, 0
    fires = torch.rand(N_ROWS, N_PLANTED, generator=generator) < 0.04
    acts = fires * (0.5 + torch.rand(N_ROWS, N_PLANTED, generator=generator))
    number = torch.arange(N_ROWS, dtype=torch.int32)
    origin = {"token_ids": acts.argmax(1).int(), "positions": number % 50, "document": number // 50}
    for hook, of_hook, scale in zip(HOOKS, directions, SCALES, strict=True):
        (folder / hook).mkdir(parents=True)
        noise = 0.01 * torch.randn(N_ROWS, of_hook.shape[1], generator=generator)
        rows = scale * (acts @ of_hook + noise)
        save_file({"activations": rows, **origin}, folder / hook / "shard-00000.safetensors")
        (folder / hook / "tokens.json").write_text(json.dumps([f" w{word}" for word in range(N_PLANTED)]))
    return torch.cat(directions, dim=1)
