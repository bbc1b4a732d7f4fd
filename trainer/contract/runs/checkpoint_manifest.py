"""What a checkpoint folder says of itself, read without torch: is it whole, where in the run, how good."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.files import open_plain
from trainer.contract.json_file import load_json
from trainer.contract.store.rows import Count

MANIFEST, TENSORS, RANDOM, STATE = "manifest.json", "tensors.safetensors", "random.safetensors", "state.json"
FILES = (MANIFEST, STATE, RANDOM, TENSORS)
FORMAT = 2


class Position(msgspec.Struct, frozen=True):
    """Where a run is; `tokens` over all ranks is also the place in the order of the data."""

    step: Count
    tokens: Count


class State(msgspec.Struct, frozen=True):
    """What a checkpoint knows beside its tensors; `d_out` is a transcoder's, `origin` where its data is from."""

    position: Position
    heldout_fvu: float | None = None
    d_out: Count | None = None
    origin: dict[str, Any] = {}


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints `step-<number>` in a folder; a link to one elsewhere is none."""
    numbers = {found: found.name.removeprefix("step-") for found in folder.glob("step-*") if not found.is_symlink()}
    # By number: beyond 8 digits the names no longer sort like it.
    return sorted((found for found in numbers if numbers[found].isdecimal()), key=lambda found: -int(numbers[found]))


def newest_whole(path: Path) -> Path:
    """A checkpoint itself, or the newest undamaged one of a folder of them; raises `UserError` without one."""
    candidates = newest_first(path) or [path]
    reasons = {}
    for folder in candidates:
        reasons[folder] = damage(folder)
        if reasons[folder] is None:
            return folder
    newest = candidates[0]
    raise UserError(f"the checkpoint {newest} cannot be used: {reasons[newest]}; resume from another one")


def best_first(folders: Iterable[Path]) -> list[Path]:
    """Those with a held-out FVU, the lowest first."""
    fvu = {folder: measured for folder in folders if (measured := _heldout_fvu(folder)) is not None}
    return sorted(fvu, key=fvu.__getitem__)


def read_state(folder: Path) -> State:
    """Raise `UserError` where a folder is no checkpoint."""
    try:
        return load_json(folder / STATE, State)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no checkpoint: its {STATE} cannot be read ({error})") from None


def position_of(path: Path) -> Position:
    """Where a run is that resumes from `path`, a checkpoint or a folder of them; raises `UserError` without one."""
    return read_state(path if (path / STATE).exists() else newest_whole(path)).position


def _heldout_fvu(folder: Path) -> float | None:
    try:
        return read_state(folder).heldout_fvu
    except UserError:
        return None


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint by its manifest; None where it is whole."""
    try:
        manifest = load_json(folder / MANIFEST, dict[str, Any])
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, and this version reads format {FORMAT}"
        if set(manifest["files"]) != {*FILES} - {MANIFEST}:
            return f"its {MANIFEST} does not name the files of a checkpoint"
        for name, file in manifest["files"].items():
            # The size first: what is of another one need not be read.
            if (folder / name).stat().st_size != file["bytes"] or _describe(folder / name) != file:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {MANIFEST} or a file in it cannot be read ({error})"
    return None


def manifest_of(folder: Path) -> dict[str, Any]:
    """Sizes and sums of all files in a folder."""
    return {"format": FORMAT, "files": {file.name: _describe(file) for file in sorted(folder.iterdir())}}


def _describe(file: Path) -> dict[str, Any]:
    with open_plain(file) as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
