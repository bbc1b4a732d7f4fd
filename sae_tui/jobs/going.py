"""Stores each running evaluation's progress in a small file in the data folder's `evaluations` subfolder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from trainer.contract.files import write_own
from trainer.contract.json_file import read_json
from trainer.contract.paths import DataDir, private_folder
from trainer.contract.printable import printable
from trainer.contract.process import ProcessRef, boot_id
from trainer.contract.progress import Reached
from trainer.contract.runs.lock import is_held
from trainer.contract.store.rows import JobId, Time

# The kinds of events about an evaluation, and the kinds that end it.
STARTED, DONE, FAILED, STOPPED = "evaluating", "evaluated", "not-evaluated", "evaluation-stopped"
ENDS = (DONE, FAILED, STOPPED)
# A running evaluation's file is written at least this often.
HEARTBEAT_S = 5.0
# An evaluation on another machine is presumed to have ended if it has written nothing for this long.
_SILENT_S = 60.0
_LONGEST_WAIT = 200


class Going(msgspec.Struct, frozen=True, kw_only=True):
    """A job's running evaluation: its parts, start time, device, progress, and the reason why it is waiting, if any."""

    job_id: JobId
    process: ProcessRef
    host: str
    parts: tuple[str, ...]
    began: Time
    device: Literal["cuda", "cpu"] = "cpu"
    gpu_index: int | None = None
    waits_for: str = ""
    reached: Reached = Reached()

    @property
    def where(self) -> str:
        return "the CPU" if self.gpu_index is None else f"GPU {self.gpu_index}"

    @property
    def words(self) -> str:
        """The progress as text, such as `evaluating 41 % · 3 min left · rows`, or why the evaluation is waiting."""
        if self.waits_for:
            return f"evaluation waits: {self.waits_for}"
        share, left, stage = self.reached.words_apart
        return " · ".join(filter(None, [" ".join(filter(None, ["evaluating", share])), left, stage]))


def write(data: DataDir, going: Going) -> None:
    """Write an evaluation's progress; raise `OSError` or `UserError` if it cannot be written."""
    private_folder(data.evaluations)
    write_own(_file(data, going.job_id), msgspec.json.encode(going), durable=False)


def remove(data: DataDir, job_id: int) -> bool:
    """Remove an evaluation's file; return False if it does not exist or cannot be removed."""
    try:
        _file(data, job_id).unlink()
    except OSError:
        return False
    return True


def _file(data: DataDir, job_id: int) -> Path:
    return data.evaluations / f"{job_id}.json"


class Evaluations:
    """Tracks the evaluations in a data folder; `going` maps job ids to running evaluations."""

    def __init__(self, data: DataDir) -> None:
        self.going: Mapping[int, Going] = {}
        self._folder = data.evaluations

    def poll(self) -> bool:
        """Read the files and return whether an evaluation has changed; never raise.

        If there are no evaluations, a call takes only microseconds.
        """
        going = {one.job_id: _shown(one) for entry, one in _files(self._folder) if _is_going(entry, one)}
        changed, self.going = going != self.going, going
        return changed


def left_behind(data: DataDir) -> list[int]:
    """Return the ids of jobs whose evaluation on this machine has ended without recording an outcome."""
    return [one.job_id for entry, one in _files(data.evaluations) if _has_ended(data, entry, one)]


def _has_ended(data: DataDir, entry: os.DirEntry[str], going: Going) -> bool:
    """Return whether an evaluation on this machine has ended; if it ran in another container, check the run's lock."""
    if going.process.is_elsewhere:
        return not _is_going(entry, going) and is_held(data.run(going.job_id).evaluation_lock) is False
    return _is_here(going) and not going.process.is_alive()


def _files(folder: Path) -> list[tuple[os.DirEntry[str], Going]]:
    """Return each evaluation that has a file, with its directory entry; ignore invalid files and symbolic links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        plain = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        read = [(entry, read_json(entry.path, Going)) for entry in plain]
        # A killed process may have left a temporary file behind, so check that the file has the evaluation's name.
        return [(entry, one) for entry, one in read if one and entry.name == f"{one.job_id}.json"]
    return []


def _is_going(entry: os.DirEntry[str], going: Going) -> bool:
    """Return whether an evaluation's process is alive or, if it runs on another machine, has written recently."""
    if _is_here(going):
        return going.process.is_alive()
    with contextlib.suppress(OSError):
        return time.time() - entry.stat(follow_symlinks=False).st_mtime <= _SILENT_S
    return False


def _is_here(going: Going) -> bool:
    """Return whether an evaluation runs on this machine, judging by boot id, or by host name and PID namespace."""
    is_of_this_boot = going.process.boot_id == boot_id()
    return is_of_this_boot or (going.host == socket.gethostname() and not going.process.is_elsewhere)


def _shown(going: Going) -> Going:
    """Return the evaluation with its text made printable and truncated for display."""
    return msgspec.structs.replace(
        going,
        waits_for=printable(going.waits_for[:_LONGEST_WAIT]),
        reached=msgspec.structs.replace(going.reached, stage=printable(going.reached.stage[:_LONGEST_WAIT])),
    )
