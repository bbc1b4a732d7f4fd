"""Checkpoints: a folder `step-00000500` of safetensors and JSON with a manifest of sizes and sums."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.contract.manifest import (
    MANIFEST,
    RANDOM,
    STATE,
    TENSORS,
    Position,
    State,
    best_first,
    manifest_of,
    newest_first,
    newest_whole,
    read_state,
)
from trainer.files import replaced_folder, write_json, write_tensors


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, so that a damaged one does not lose the run, and the best.

    `d_out` and `origin` are what an export from a checkpoint alone has to know of the data.
    """

    def __init__(
        self, folder: Path, keep: int = 2, *, d_out: int | None = None, origin: Mapping[str, Any] | None = None
    ) -> None:
        self._folder, self._keep = folder, keep
        self._d_out, self._origin = d_out, dict(origin or {})

    def folder(self, position: Position) -> Path:
        """Where the checkpoint of this position is, or would be."""
        return self._folder / f"step-{position.step:08d}"

    def save(self, tensors: Mapping[str, Tensor], position: Position, heldout_fvu: float | None = None) -> Path:
        """Writes a checkpoint whole or not at all; raises `UserError` where the disk does not take it."""
        target = self.folder(position)
        # JSON has no NaN.
        measured = heldout_fvu if heldout_fvu is not None and math.isfinite(heldout_fvu) else None
        self._clear_cut_off()
        with replaced_folder(target) as temporary:
            write_tensors(temporary / TENSORS, dict(tensors))
            write_tensors(temporary / RANDOM, _random_state())
            write_json(temporary / STATE, msgspec.to_builtins(State(position, measured, self._d_out, self._origin)))
            write_json(temporary / MANIFEST, manifest_of(temporary))
        self._forget_all_but(target)
        return target

    def _clear_cut_off(self) -> None:
        """What a killed save left behind would otherwise take its gigabytes for ever."""
        for leftover in self._folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _forget_all_but(self, newest: Path) -> None:
        """Those beyond `newest` go too: they are of an attempt that could not be resumed from there."""
        found = newest_first(self._folder)
        upto = found[found.index(newest) :]
        kept = {*upto[: self._keep], *best_first(upto)[:1]}
        for folder in found:
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def load(path: Path) -> tuple[dict[str, Tensor], Position]:
    """A checkpoint, or the newest whole one of a folder of them, and torch's random state put back.

    Raises `UserError` where there is none that can be used.
    """
    folder = newest_whole(path)
    _set_random_state(load_file(folder / RANDOM))
    return load_file(folder / TENSORS), read_state(folder).position


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
