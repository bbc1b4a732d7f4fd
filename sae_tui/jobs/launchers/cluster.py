"""Submits, polls and cancels a SLURM job with SLURM's own commands; slurmdbd is not required."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.supervisor_log import note
from trainer.contract.json_file import read_json, write_json
from trainer.contract.locks import FileLock
from trainer.contract.settings.declare import show
from trainer.contract.trust import open_own

LOOK_EVERY_S = 1.5
# The time limit for SLURM commands. A busy controller responds late, and a controller that is down does not respond
# at all.
TIMEOUT_S = 15.0
# A job is presumed to have ended if SLURM reports it as unknown this many times in a row.
# SLURM forgets ended jobs after MinJobAge, but a restarted controller may also briefly be unaware of a running job.
TIMES_UNKNOWN = 3
_OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT", "UNKNOWN"),
}


class Seen(msgspec.Struct, frozen=True):
    """A job as shown by squeue: its state (`PENDING`), the reason for the state (`Resources`), and nodes (`n[1-2]`)."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


class SlurmError(OSError):
    """Raised when SLURM reports an error; contains SLURM's own message."""


class _Look(msgspec.Struct):
    """An answer of squeue, and when it was given, in seconds since the epoch."""

    at: float
    answer: str


class SharedLooks:
    """The last answer of squeue about all tasks of an array, shared by the supervisors of the array's jobs.

    Otherwise, the supervisors of 100 jobs would ask the controller 67 times per second.
    """

    def __init__(self, folder: Path, array_id: str) -> None:
        self._file = folder / f"slurm-{array_id}.json"
        # The supervisor that holds this lock asks squeue.
        self.lock = FileLock(folder / f"slurm-{array_id}.lock")

    def recent(self) -> str | None:
        """Return the last answer, or None if it is too old."""
        look = read_json(self._file, _Look)
        return look.answer if look and 0 <= time.time() - look.at < LOOK_EVERY_S else None

    def write(self, answer: str) -> None:
        if answer.strip():
            with contextlib.suppress(OSError):
                write_json(self._file, _Look(time.time(), answer))


class SlurmJob:
    """A submitted SLURM job; `seen` is its last known state, or None before the controller has responded."""

    def __init__(self, slurm_id: str) -> None:
        self.id = slurm_id
        self.seen: Seen | None = None
        self._look: subprocess.Popen[str] | None = None
        self._begun, self._unknown = 0.0, 0
        self._shared: SharedLooks | None = None

    @classmethod
    def submit(cls, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> SlurmJob:
        """Submit a job with an sbatch command; raise `SlurmError` if SLURM refuses it.

        SLURM stores `environment` (by default, this process's environment) and starts the job with it.
        """
        try:
            answer = run_slurm(argv, environment)
        except SlurmError as error:
            raise SlurmError(f"SLURM refused the job: {error}") from None
        slurm_id = answer.partition(";")[0].strip()
        if not _is_id(slurm_id):
            raise SlurmError(f"sbatch printed {show(answer.strip())}, not a job id; see squeue for the job")
        return cls(slurm_id)

    @classmethod
    def read(cls, file: Path) -> SlurmJob:
        """Return the job whose number is stored in a file.

        Raise `UserError` if other users can write to the file: they could have the wrong job cancelled. Raise
        `SlurmError` if the file contains no number, and `OSError` if it is missing.
        """
        with open_own(file) as stream:
            slurm_id = stream.read(100).decode(errors="replace").strip()
        if not _is_id(slurm_id):
            raise SlurmError(f"{file} contains no SLURM job id; cancel the job that squeue shows, then remove the file")
        return cls(slurm_id)

    def share_looks(self, folder: Path) -> None:
        """If this is a task of an array, share squeue's answers with the other tasks through files in `folder`."""
        if "_" in self.id:
            self._shared = SharedLooks(folder, self.id.partition("_")[0])

    def look(self) -> bool:
        """Query the job's state without waiting for the controller; return whether the state has changed."""
        now = time.monotonic()
        if self._look is None:
            if now - self._begun < LOOK_EVERY_S or (self.seen and self.seen.is_over):
                return False
            if self._shared and (answer := self._shared.recent()) is not None:
                self._begun = now
                return self._take(line_of(answer, self.id), "")
            if self._shared and not self._shared.lock.acquire():
                return False
            self._begun = now
            with contextlib.suppress(OSError):
                self._look = _popen(self._question())
        if self._look is None:
            return self._answered()
        if self._look.poll() is None:
            if now - self._begun > TIMEOUT_S:
                self._look.kill()
            return False
        answer, failure = self._look.communicate()
        self._look = None
        if self._shared:
            self._answered(answer)
            answer = line_of(answer, self.id)
        return self._take(answer, failure)

    def _question(self) -> list[str]:
        """Return the squeue command, which for a task asks about all tasks of its array."""
        whole, is_task, _ = self.id.partition("_") if self._shared else (self.id, "", "")
        return [
            "squeue",
            "-h",
            "-t",
            "all",
            "-j",
            whole,
            *(["-r", "-o", "%i|%T|%r|%N"] if is_task else ["-o", "%T|%r|%N"]),
        ]

    def _answered(self, answer: str = "") -> bool:
        """Share squeue's answer, if there is one, and let another task ask next; return False."""
        if self._shared:
            self._shared.write(answer)
            self._shared.lock.release()
        return False

    def _take(self, answer: str, failure: str) -> bool:
        if not answer.strip():
            is_known = bool(failure) and "Invalid job id" not in failure
            self._unknown = 0 if is_known else self._unknown + 1
            latest = Seen("UNKNOWN") if self._unknown >= TIMES_UNKNOWN else self.seen
        else:
            self._unknown = 0
            latest = Seen(*answer.splitlines()[0].strip().split("|", 2))
        news, self.seen = latest != self.seen, latest
        return news

    def cancel(self, *options: str) -> bool:
        """Cancel the job with these scancel options; return False if the controller does not accept the request."""
        if "_" in self.id and (self.seen is None or self.seen.state == "PENDING"):
            # With options, such as --state=PENDING, scancel would cancel all pending tasks of the array.
            options = ()
        try:
            run_slurm(["scancel", *options, self.id])
        except SlurmError as error:
            note(f"scancel {self.id}: {error}")
            return False
        return True

    def is_gone(self) -> bool:
        """Return whether the job has ended, or is unknown to SLURM; wait for SLURM's response."""
        try:
            state = run_slurm(["squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T"]).strip()
        except SlurmError as error:
            return "Invalid job id" in str(error)
        return not state or state in _OVER

    def was_preempted(self) -> bool:
        """Return whether SLURM has chosen the job for preemption; if it saved in time, its final state is COMPLETED."""
        try:
            when = run_slurm(["squeue", "-h", "-t", "all", "-j", self.id, "-O", "PreemptTime:30"]).strip()
        except SlurmError:
            return False
        return when[:1].isdigit()

    def close(self) -> None:
        """Give up a query that has no answer yet, so that another task of the array can ask."""
        if self._look:
            self._look.kill()
            self._look.communicate()
            self._look = None
        self._answered()


def _is_id(word: str) -> bool:
    """Return whether a string is the number of a job or of an array's task, such as `123_4`.

    scancel could interpret other strings as options or as other jobs.
    """
    return re.fullmatch("[0-9]+(_[0-9]+)?", word) is not None


def line_of(answer: str, task: str) -> str:
    """Return the state of a task like `123_4` from squeue's lines for all tasks, or "" if there is none."""
    lines = (line.partition("|") for line in answer.splitlines())
    return next((rest for name, _, rest in lines if name.strip() == task), "")


def hosts_in(nodes: str) -> list[str]:
    """Return the names in a list of nodes like `n[1-2],m7`, or an empty list if SLURM does not respond."""
    try:
        return run_slurm(["scontrol", "show", "hostnames", nodes]).split() if nodes else []
    except SlurmError:
        return []


def down_nodes(nodes: str) -> list[str]:
    """Return which nodes in a list like `n[1-2]` are down, failing, or (marked by `*`) not responding."""
    try:
        lines = run_slurm(["sinfo", "-h", "-N", "-n", nodes, "-o", "%N|%T"]).splitlines() if nodes else []
    except SlurmError:
        return []
    states = dict(line.strip().split("|", 1) for line in lines if "|" in line)
    return [node for node, state in states.items() if state.startswith(("down", "fail")) or state.endswith("*")]


def run_slurm(
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    within_s: float = TIMEOUT_S,
    with_errors: bool = False,
) -> str:
    """Run one of SLURM's commands and return its output, and with `with_errors` also its messages.

    Raise `SlurmError` with the last line of its messages if it fails.
    """
    try:
        process = _popen(argv, environment)
    except OSError as error:
        raise SlurmError(f"{argv[0]} cannot be started: {error.strerror}") from None
    try:
        answer, errors = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise SlurmError(f"{argv[0]} received no response within {within_s:g} s") from None
    if process.returncode == 0:
        return answer + errors if with_errors else answer
    lines = [line for line in errors.splitlines() if line.strip()]
    raise SlurmError(lines[-1] if lines else f"{argv[0]} exited with code {process.returncode}")


def _popen(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment
    )
