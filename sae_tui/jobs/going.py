"""Which evaluations are going on, and how far they are: a small file of each in the data folder's `evaluations`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainer.contract.files import write_own
from trainer.contract.json_file import read_json
from trainer.contract.paths import DataDir, private_folder
from trainer.contract.printable import printable
from trainer.contract.process import ProcessRef
from trainer.contract.progress import Reached
from trainer.contract.store.rows import JobId, Time

# The kinds of the events on an evaluation.
STARTED, DONE, FAILED, STOPPED = "evaluating", "evaluated", "not-evaluated", "evaluation-stopped"
# Seconds. The file of an evaluation that goes on is written again at least so often, whatever it does.
HEARTBEAT_S = 5.0
# One that cannot be seen from here is taken to have ended after so long.
_SILENT_S = 60.0
_LONGEST_WAIT = 200


class Going(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a job: which parts, since when, on what, how far, and what it waits for, in words."""

    job_id: JobId
    process: ProcessRef
    host: str
    parts: tuple[str, ...]
    began: Time
    device: str = "cpu"
    gpu_index: int | None = None
    gpu_uuid: str = ""
    waits_for: str = ""
    reached: Reached = Reached()

    @property
    def where(self) -> str:
        return "the CPU" if self.gpu_index is None else f"GPU {self.gpu_index}"

    @property
    def words(self) -> str:
        """Write it as `evaluating 41 % · 3 min left · rows`, or what it waits for."""
        if self.waits_for:
            return f"evaluation waits: {self.waits_for}"
        share, left, stage = self.reached.words_apart
        return " · ".join(filter(None, [" ".join(filter(None, ["evaluating", share])), left, stage]))


def write(data: DataDir, going: Going) -> None:
    """Write how far an evaluation is; raise `OSError` or `UserError` where the disk does not take it."""
    private_folder(data.evaluations)
    write_own(_file(data, going.job_id), msgspec.json.encode(going), durable=False)


def remove(data: DataDir, job_id: int) -> None:
    with contextlib.suppress(OSError):
        _file(data, job_id).unlink(missing_ok=True)


def _file(data: DataDir, job_id: int) -> Path:
    return data.evaluations / f"{job_id}.json"


class Evaluations:
    """Follows the evaluations of a data folder; `going` has them by the id of their job."""

    def __init__(self, data: DataDir) -> None:
        self.going: Mapping[int, Going] = {}
        self._folder = data.evaluations

    def poll(self) -> bool:
        """Read what is new and tell whether anything changed; never raise, and cost microseconds while none goes on."""
        going = {one.job_id: one for entry in self._entries() if (one := _read(entry))}
        changed, self.going = going != self.going, going
        return changed

    def _entries(self) -> list[os.DirEntry[str]]:
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            return [entry for entry in entries if entry.name.endswith(".json") and not entry.name.startswith(".")]
        return []


def _read(entry: os.DirEntry[str]) -> Going | None:
    """Return the evaluation of a file; None where its process has gone, as after `kill -9`."""
    going = read_json(entry.path, Going)
    if going is None or entry.name != f"{going.job_id}.json":
        return None
    is_here = going.host == socket.gethostname() and not going.process.is_elsewhere
    if is_here and not going.process.is_alive():
        return None
    with contextlib.suppress(OSError):
        if not is_here and time.time() - entry.stat(follow_symlinks=False).st_mtime > _SILENT_S:
            return None
    return msgspec.structs.replace(
        going,
        waits_for=printable(going.waits_for[:_LONGEST_WAIT]),
        reached=msgspec.structs.replace(going.reached, stage=printable(going.reached.stage[:_LONGEST_WAIT])),
    )


def left_behind(data: DataDir) -> list[int]:
    """Return the jobs whose evaluation on this machine has ended without a record of how."""
    ended = []
    with contextlib.suppress(OSError), os.scandir(data.evaluations) as entries:
        for entry in entries:
            going = read_json(entry.path, Going)
            is_here = going and going.host == socket.gethostname() and not going.process.is_elsewhere
            if going and is_here and not going.process.is_alive():
                ended.append(going.job_id)
    return ended
