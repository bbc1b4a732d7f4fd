"""Reads a checkpoint folder without torch: validates its files and returns its step, tokens and held-out FVU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.files import open_plain
from trainer.contract.json_file import load_json
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.store.rows import Count

MANIFEST, TENSORS, RANDOM, STATE = "manifest.json", "tensors.safetensors", "random.safetensors", "state.json"
FILES = (MANIFEST, STATE, RANDOM, TENSORS)
FORMAT = 2
# A smaller relative increase in held-out FVU is considered noise, regardless of the number of rows.
LEAST_RISE = 0.01
F = TypeVar("F")


class Position(msgspec.Struct, frozen=True):
    """A run's position; `tokens`, the total over all ranks, is also the position in the ordered data."""

    step: Count
    tokens: Count


class StreamPlace(msgspec.Struct, frozen=True):
    """A rank's position in its shard of a stream: `skip` rows after the position given by `state`."""

    state: Any
    skip: Count


class BufferPlace(msgspec.Struct, frozen=True):
    """The position in a shuffle buffer: `n_gone` rows of block `block`, which starts at `begin`, have been used."""

    block: Count
    n_gone: Count
    begin: StreamPlace


class Best(msgspec.Struct, frozen=True):
    """A run's lowest held-out FVU, the step at which it was measured, and the number of held-out rows.

    `lr_share` is the learning rate at that step as a share of the peak rate, or None for an optimizer without decay.
    """

    step: Count
    fvu: float
    lr_share: float | None = None
    n_rows: Count = 0

    def is_clearly_below(self, fvu: float, lr_share: float | None) -> bool:
        """Return whether a later FVU on the same rows is higher by more than the noise.

        Return False if the learning rate has increased since the lowest FVU was measured, because a higher rate also
        raises the FVU. Due to noise, the FVUs of two SAEs from one run on the same rows differ by 1 % or one standard
        error.
        """
        noise = max(LEAST_RISE, max(1, self.n_rows) ** -0.5)
        has_cooled = self.lr_share is None or lr_share is None or lr_share <= self.lr_share
        return has_cooled and fvu > (1 + noise) * self.fvu


class Halved(msgspec.Struct, frozen=True):
    """The number of comparisons made by `train.halving`, and the step after which each dropped SAE was dropped."""

    n_rungs: Count = 0
    dropped: dict[str, Count] = {}


NONE_HALVED = Halved()


class CheckpointState(msgspec.Struct, frozen=True):
    """A checkpoint's contents, except for its tensors.

    `d_out` is set only for a transcoder. `origin` describes the data source. If the data is a stream, `stream` contains
    the position of each rank that reads separate tokens. If SAEs at several hooks are trained, `origins` maps each
    SAE's label to its data source. `data` records the shards, `n_train_rows` is the number of training rows, and
    `held_out` identifies the rows on which `heldout_fvu` was measured; checkpoints from older versions lack these three
    fields. `cool_down` is set if the user requested an early finish. `best` is set once held-out rows have been
    evaluated for the first time. `halved` lists the SAEs that have been dropped; the checkpoint has no tensors for
    them.
    """

    position: Position
    heldout_fvu: float | None = None
    d_out: Count | None = None
    origin: dict[str, Any] = {}
    stream: list[BufferPlace] | msgspec.UnsetType = msgspec.UNSET
    origins: dict[str, dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    data: DataRecord | msgspec.UnsetType = msgspec.UNSET
    held_out: str | msgspec.UnsetType = msgspec.UNSET
    n_train_rows: Count | None = None
    cool_down: CoolDown | msgspec.UnsetType = msgspec.UNSET
    best: Best | msgspec.UnsetType = msgspec.UNSET
    halved: Halved = NONE_HALVED

    def cool_down_of(self, planned: int) -> CoolDown | None:
        """Return the cool-down for a run of `planned` steps, or None if there is none or its length has changed."""
        return self.cool_down if self.cool_down and self.cool_down.planned == planned else None

    @property
    def data_before(self) -> DataRecord | None:
        """The shards used for training, or None if the checkpoint does not record the shards."""
        return self.data or None

    def origin_of(self, label: str) -> dict[str, Any]:
        """Return the data source for the SAE with this label."""
        return self.origins.get(label, self.origin) if self.origins else self.origin


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints `step-<number>` in a folder, latest first; ignore symbolic links."""
    numbers = {path: path.name.removeprefix("step-") for path in folder.glob("step-*") if not path.is_symlink()}
    # Step numbers are padded to 8 digits; longer numbers would not sort correctly as text.
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: -int(numbers[path]))


def newest_whole(path: Path) -> Path:
    """Return `path` if it is an intact checkpoint, otherwise the latest intact checkpoint in the folder `path`.

    Raise `UserError` if there is no intact checkpoint.
    """
    candidates = newest_first(path) or [path]
    reasons = {}
    for folder in candidates:
        reasons[folder] = damage(folder)
        if reasons[folder] is None:
            return folder
    newest = candidates[0]
    raise UserError(f"the checkpoint {newest} cannot be used: {reasons[newest]}; resume from another one")


def best_first(folders: Iterable[Path]) -> list[Path]:
    """Return the checkpoints of the same SAEs as the latest one, evaluated on the same rows, lowest FVU first."""
    return best_of({folder: state for folder in folders if (state := _measured_state(folder))})


def best_of(states: Mapping[F, CheckpointState]) -> list[F]:
    """Return the checkpoints of the same SAEs as the latest one, evaluated on the same rows, lowest FVU first."""
    states = {folder: state for folder, state in states.items() if state.heldout_fvu is not None}
    if not states:
        return []
    newest = max(states.values(), key=lambda state: state.position.step)
    terms = newest.held_out, newest.halved.dropped
    alike = [folder for folder, state in states.items() if (state.held_out, state.halved.dropped) == terms]
    return sorted(alike, key=lambda folder: states[folder].heldout_fvu or 0.0)


def read_state(folder: Path) -> CheckpointState:
    """Read a checkpoint's state; raise `UserError` if the folder is not a checkpoint."""
    try:
        return load_json(folder / STATE, CheckpointState)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a checkpoint: its {STATE} cannot be read ({error})") from None


def resumed_state(path: Path) -> CheckpointState:
    """Return the state of the checkpoint that a run resumes from.

    `path` is a checkpoint or a folder of checkpoints. Raise `UserError` if no checkpoint is usable.
    """
    return read_state(path if (path / STATE).exists() else newest_whole(path))


def position_of(path: Path) -> Position:
    """Return the position at which a run resumes; see `resumed_state`."""
    return resumed_state(path).position


def _measured_state(folder: Path) -> CheckpointState | None:
    """Return a checkpoint's state, or None if it cannot be read or has no held-out FVU."""
    try:
        state = read_state(folder)
    except UserError:
        return None
    return None if state.heldout_fvu is None else state


def damage(folder: Path) -> str | None:
    """Check a checkpoint against its manifest; return a description of the damage, or None if it is intact."""
    try:
        manifest = load_json(folder / MANIFEST, dict[str, Any])
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, but this version reads only format {FORMAT}"
        if set(manifest["files"]) != {*FILES} - {MANIFEST}:
            return f"its {MANIFEST} does not list the files of a checkpoint"
        for name, file in manifest["files"].items():
            # Compare the sizes first: a file whose size differs need not be read.
            if (folder / name).stat().st_size != file["bytes"] or file_facts(folder / name) != file:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {MANIFEST} or a file in it cannot be read ({error})"
    return None


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest for a folder, with the size and SHA-256 of each file."""
    return {"format": FORMAT, "files": {file.name: file_facts(file) for file in sorted(folder.iterdir())}}


def file_facts(file: Path) -> dict[str, Any]:
    """Return a file's size and SHA-256, as in a manifest."""
    # A list of jobs reads manifests, but never hashes a file, and loading OpenSSL takes 2 ms.
    import hashlib

    with open_plain(file) as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
