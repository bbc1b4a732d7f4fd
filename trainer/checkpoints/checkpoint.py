"""Writes and loads checkpoints: folders like `step-00000500` with safetensors, JSON and a manifest of checksums."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.checkpoints.atomic_folder import (
    clear_cut_off_folders,
    fill_folder,
    free_bytes,
    not_written,
    temporary_name,
    write_json,
    write_tensors,
)
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import refuse_link
from trainer.contract.runs.checkpoint_manifest import (
    FILES,
    MANIFEST,
    NONE_HALVED,
    RANDOM,
    STATE,
    TENSORS,
    Best,
    BufferPlace,
    CheckpointState,
    Halved,
    Position,
    best_first,
    damage,
    manifest_of,
    newest_first,
    newest_whole,
    read_state,
)
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.wording import distinct_sizes

# Bytes on disk per byte of tensor data; the excess covers tensor names, JSON and file system metadata.
BESIDE_TENSORS = 1.05


class Checkpoints:
    """Manages one run's checkpoints: keeps the best one, and the latest `keep` in case one is damaged.

    `d_out` and `origin` describe the data, so that an export needs only the checkpoint. If the SAEs train on several
    hooks, `origins` maps each SAE's label to its origin. `data` returns the record of the shards, which contain
    `n_train_rows` training rows.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        d_out: int | None = None,
        origin: Mapping[str, Any] | None = None,
        origins: dict[str, dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET,
        data: Callable[[], DataRecord] = list,
        n_train_rows: int | None = None,
    ) -> None:
        self._folder, self._keep, self._data = folder, keep, data
        self._d_out, self._origin, self._origins = d_out, dict(origin or {}), origins
        self._n_train_rows = n_train_rows

    def folder(self, position: Position) -> Path:
        """Return the folder for the checkpoint at a position; the folder need not exist."""
        return self._folder / f"step-{position.step:08d}"

    def best(self) -> CheckpointState | None:
        """Return the state of the checkpoint with the lowest held-out FVU, or None if no checkpoint has an FVU."""
        best = best_first(newest_first(self._folder))
        return read_state(best[0]) if best else None

    def save(
        self,
        tensors: Mapping[str, Tensor],
        position: Position,
        heldout_fvu: float | None = None,
        stream: list[BufferPlace] | msgspec.UnsetType = msgspec.UNSET,
        held_out: str = "",
        cool_down: CoolDown | msgspec.UnsetType = msgspec.UNSET,
        best: Best | msgspec.UnsetType = msgspec.UNSET,
        halved: Halved = NONE_HALVED,
    ) -> Path:
        """Write a checkpoint atomically and return its folder; raise `UserError` if it cannot be written."""
        refuse_link(self._folder)
        target = self.folder(position)
        # JSON cannot represent NaN.
        measured = heldout_fvu if heldout_fvu is not None and math.isfinite(heldout_fvu) else None
        # Remove temporary folders left by killed saves; otherwise, they would occupy gibibytes forever.
        clear_cut_off_folders(self._folder, r"step-\d+")
        self._make_room(target, sum(tensor.nbytes for tensor in tensors.values()))
        with fill_folder(target, last=MANIFEST) as temporary:
            write_tensors(temporary / TENSORS, dict(tensors))
            write_tensors(temporary / RANDOM, _random_state())
            state = CheckpointState(
                position,
                measured,
                self._d_out,
                self._origin,
                stream,
                self._origins,
                self._data(),
                held_out,
                self._n_train_rows,
                cool_down,
                best,
                halved,
            )
            write_json(temporary / STATE, msgspec.to_builtins(state))
            write_json(temporary / MANIFEST, manifest_of(temporary))
        self._forget_all_but(target)
        return target

    def _make_room(self, target: Path, tensor_bytes: int) -> None:
        """Remove checkpoints that this save makes obsolete until the disk has enough space for the new checkpoint.

        Raise `UserError` if removing all of these checkpoints would not free enough space.
        """
        needed, free = int(BESIDE_TENSORS * tensor_bytes), free_bytes(self._folder)
        if free >= needed:
            return
        spare = self._spare(target)
        if free + sum(_size(folder) for folder in spare) < needed:
            reason = "it needs {}, but only {} are free".format(*distinct_sizes(needed, free))
            raise not_written(target, reason, errno.ENOSPC)
        for folder in spare:
            _remove(folder)
            if free_bytes(self._folder) >= needed:
                return

    def _spare(self, target: Path) -> list[Path]:
        """Return the checkpoints that `target` makes obsolete, oldest first.

        The latest undamaged checkpoint is never included, because the save may still fail.
        """
        older = [folder for folder in newest_first(self._folder) if folder != target]
        staying = {*older[: self._keep - 1], *best_first(older)[:1]}
        staying |= set([folder for folder in older if damage(folder) is None][:1])
        return [folder for folder in reversed(older) if folder not in staying]

    def _forget_all_but(self, newest: Path) -> None:
        """Remove all checkpoints except `newest`, the `keep` − 1 before it, and the best one up to `newest`.

        Checkpoints at later steps were written by an earlier attempt and could not be used to resume the run.
        """
        checkpoints = newest_first(self._folder)
        upto = checkpoints[checkpoints.index(newest) :]
        staying = {*upto[: self._keep], *best_first(upto)[:1]}
        for folder in checkpoints:
            if folder not in staying:
                _remove(folder)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for name in FILES if (file := folder / name).exists())


def _remove(folder: Path) -> None:
    """Remove a checkpoint atomically; if its folder contains other files, remove only the checkpoint's files."""
    with contextlib.suppress(OSError):
        if {entry.name for entry in folder.iterdir()} <= {*FILES}:
            shutil.rmtree(folder.rename(temporary_name(folder)))
        else:
            for name in FILES:
                (folder / name).unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], Position]:
    """Load a checkpoint, or the latest undamaged checkpoint in a folder, and restore torch's random state.

    Raise `UserError` if there is no usable checkpoint.
    """
    folder = newest_whole(path)
    with usable(folder, OSError, remedy="; resume from another one"):
        _set_random_state(load_file(folder / RANDOM))
        return load_file(folder / TENSORS), read_state(folder).position


@contextlib.contextmanager
def usable(folder: Path, *also: type[Exception], remedy: str = "") -> Iterator[None]:
    """Convert to `UserError` the errors caused by a checkpoint with intact files but wrong content.

    Exceptions of the types in `also` are converted too; the message ends with `remedy`.
    """
    of_reading: tuple[type[Exception], ...] = (
        SafetensorError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
    )
    try:
        yield
    except (*of_reading, *also) as error:
        raise UserError(f"the checkpoint {folder} cannot be used: {_reason(error)}{remedy}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it contains no {error.args[0]}"
    return sentence(error).strip().partition("\n")[0] or type(error).__name__


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
