"""Copies of a run's checkpoints on object storage, so that another machine can resume the run.

Below the URL, `run.json` identifies the run, `step-00000500/` has a checkpoint with the run's job file, plan and
metrics, and `sae/` has the finished SAE. A folder counts only if it has `mirrored.json`, the list of its files with
their checksums, which is uploaded last and removed first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.json_file import LARGEST, decode_as, read_json
from trainer.contract.object_store import ObjectStore
from trainer.contract.printable import printable
from trainer.contract.runs.checkpoint_manifest import STATE, CheckpointState, best_of, file_facts
from trainer.contract.store.rows import Count, Device, Time, WorldSize
from trainer.contract.wording import duration

FIELD = "train.mirror_checkpoints"
RUN, LIST, SAE = "run.json", "mirrored.json", "sae"
JOB, PLAN, METRICS = "job.toml", "plan.json", "metrics.db"
FORMAT = 1
# The file in the run folder with the state of its mirror.
STATUS = "mirrored.json"
_STEP = re.compile(r"step-([0-9]{8,18})")
T = TypeVar("T")
_RunId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class Owner(msgspec.Struct, frozen=True):
    """The run that a mirror belongs to, and its attempt that writes there: the one that started last."""

    run: _RunId
    writer: str
    name: str = ""
    format: int = FORMAT


class MirroredFile(msgspec.Struct, frozen=True):
    """The size and checksum of a file in a mirror."""

    bytes: Count
    sha256: str


class MirroredFolder(msgspec.Struct, frozen=True):
    """A complete folder in a mirror, and the part of the run's spec that another machine needs to resume it."""

    run: _RunId
    step: Count
    files: dict[str, MirroredFile]
    world_size: WorldSize = 1
    model_gpus: Count = 0
    device: Device = "cpu"
    as_one_process: bool = False
    format: int = FORMAT

    @property
    def n_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class Mirrored(msgspec.Struct, frozen=True):
    """The state of a run's mirror, in the run folder: where it is, and what was uploaded when.

    `step` is None before the first upload. `problem` is why the latest upload failed, or "".
    """

    url: str
    run: _RunId
    step: Count | None = None
    time: Time | None = None
    has_sae: bool = False
    problem: str = ""

    def words(self, now: float) -> str:
        """Describe the mirror, like `step 5,000, 3 min ago, to hf://ada/saes`."""
        if self.step is None or self.time is None:
            when = "nothing yet"
        else:
            when = f"step {self.step:,}{' and the SAE' * self.has_sae}, {duration(max(0.0, now - self.time))} ago"
        later = f"; not since then: {self.problem}" if self.problem else ""
        return printable(f"{when}, to {self.url}{later}")


class MirrorTaken(UserError):
    """Raised if a mirror belongs to another run, or if another attempt of the run has taken it over."""


class MirrorDamaged(UserError):
    """Raised if a file in a mirror is incomplete or was changed."""


def read_mirrored(run_dir: Path) -> Mirrored | None:
    """Return the state of a run's mirror, or None if it has none; `url` is "" before a downloaded run has started."""
    return read_json(run_dir / STATUS, Mirrored)


def steps_in(listed: Iterable[str]) -> list[str]:
    """Return the folders of the complete checkpoints among these objects, latest first."""
    folders = {name.partition("/")[0] for name in listed if name.count("/") == 1 and name.endswith(f"/{LIST}")}
    return sorted((one for one in folders if _STEP.fullmatch(one)), key=step_of, reverse=True)


def step_of(folder: str) -> int:
    return int(folder.removeprefix("step-"))


def described(files: Mapping[str, Path]) -> dict[str, MirroredFile]:
    """Return the sizes and checksums of files."""
    return {name: MirroredFile(**file_facts(file)) for name, file in files.items()}


class CheckpointMirror:
    """A mirror of the run `run`, which is called `name`; methods raise `UserError` if the store fails."""

    def __init__(self, url: str, run: str, name: str, field: str = FIELD) -> None:
        self.store = ObjectStore(url, field)
        self._owner = Owner(run, os.urandom(8).hex(), name)
        self._has_claimed = False
        self._states: dict[str, CheckpointState] = {}

    def claim(self) -> None:
        """Make this attempt the writer; raise `MirrorTaken` if the mirror contains checkpoints of another run.

        This also checks the credentials, and whether this attempt may write. After a failure, call it again: the store
        may have been replaced.
        """
        listed = self.store.list()
        own = [name for name in listed if "/" in name and self._is_own(name.partition("/")[0])]
        there = self.owner() if RUN in listed else None
        if self._has_claimed and there:
            self._refuse_other_writer(there)
            return
        if own and (there is None or there.run != self._owner.run):
            what = f"the run {printable(there.name)}" if there else f"other files, such as {own[0]}"
            resumed = f", or resume that run: `sae-tui resume {self.store.url}`" if there else ""
            raise MirrorTaken(f"{FIELD}: {self.store.url} already contains {what}; choose another folder{resumed}")
        self.store.put(msgspec.json.encode(self._owner), RUN)
        self._has_claimed = True

    def _refuse_other_writer(self, there: Owner) -> None:
        if there.writer != self._owner.writer:
            is_other = there.run != self._owner.run
            attempt = (
                f"the run {printable(there.name)}"
                if is_other
                else "another attempt of this run, maybe on another machine,"
            )
            raise MirrorTaken(f"{FIELD}: {attempt} now mirrors to {self.store.url}; this one no longer does")

    def owner(self) -> Owner:
        """Return the run that the mirror belongs to."""
        return self._decoded(RUN, Owner)

    def put(
        self,
        folder: str,
        files: Mapping[str, Path],
        about: MirroredFolder,
        keep: int = 0,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> str:
        """Upload a folder, whole or not at all, and remove older checkpoints; with `keep` 0, remove none.

        Return why older checkpoints could not be removed, or "".
        """
        self._refuse_other_writer(self.owner())
        listed, last = self.store.list(), f"{folder}/{LIST}"
        if last in listed and self.store.scheme != "hf":
            self.store.remove([last])
        objects: dict[str, Path | bytes] = {f"{folder}/{name}": file for name, file in files.items()}
        objects[last] = msgspec.json.encode(about)
        gone = self._outdated(folder, {*listed, *objects}, keep, files) if keep else []
        # Keys that may write but not delete are common, so a failed removal does not undo the upload.
        removed = gone if self.store.scheme == "hf" else []
        self.store.put_together(objects, last, on_bytes, removed)
        try:
            self.store.remove([] if removed else gone)
        except UserError as error:
            return str(error)
        return ""

    def has(self, folder: str) -> bool:
        """Return whether the mirror contains a complete folder of this name."""
        return f"{folder}/{LIST}" in self.store.list()

    def read_list(self, folder: str) -> MirroredFolder:
        """Return the list of a folder's files."""
        return self._decoded(f"{folder}/{LIST}", MirroredFolder)

    def _is_own(self, folder: str) -> bool:
        return folder == SAE or _STEP.fullmatch(folder) is not None

    def _decoded(self, name: str, kind: type[T]) -> T:
        text = self.store.read(name, 0, LARGEST)
        try:
            decoded = decode_as(text, kind)
        except ValueError as error:
            raise MirrorDamaged(f"{self.store.url}/{name} cannot be read: {printable(str(error))}") from None
        if (found := getattr(decoded, "format", FORMAT)) != FORMAT:
            raise MirrorDamaged(f"{self.store.url}/{name} has format {found}, but this version reads only {FORMAT}")
        return decoded

    def _outdated(self, newest: str, objects: Iterable[str], keep: int, files: Mapping[str, Path]) -> list[str]:
        """Return the objects of checkpoints to remove, each one's list first, as for checkpoints in the run folder.

        Folders without a list were left by uploads that were interrupted.
        """
        whole = [one for one in steps_in(objects) if step_of(one) <= step_of(newest)]
        states = {one: state for one in whole if (state := self._state(one, files if one == newest else None))}
        staying = {newest, *whole[:keep], *best_of(states)[:1]}
        gone = [name for name in objects if _STEP.fullmatch(top := name.partition("/")[0]) and top not in staying]
        return sorted(gone, key=lambda name: (not name.endswith(f"/{LIST}"), name))

    def _state(self, folder: str, files: Mapping[str, Path] | None) -> CheckpointState | None:
        """Return a checkpoint's state, which is read only once; None if it cannot be read."""
        if files and (state := read_json(files[STATE], CheckpointState)):
            self._states[folder] = state
        if folder not in self._states:
            try:
                self._states[folder] = self._decoded(f"{folder}/{STATE}", CheckpointState)
            except UserError:
                return None
        return self._states[folder]
