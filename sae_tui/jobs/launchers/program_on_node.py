"""Runs a command's program on a cluster's node, as the first process of its batch job.

`python -P -m sae_tui.jobs.launchers.program_on_node SPEC` runs the program as the local backend does: it has its own
session and a capped log, and is stopped together with all its descendants. The supervisor may be on another host: it
reads how the program ended from files in the run folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.program import ProgramAttempt
from sae_tui.jobs.launchers.slurm_program import AT_ONCE, OF_SLURM, SUBMITTED
from sae_tui.jobs.program_environment import ProgramEnvironment
from sae_tui.jobs.supervisor_log import note, tolerate_disk
from trainer.contract.errors import UserError, sentence
from trainer.contract.files import write_whole
from trainer.contract.json_file import write_json
from trainer.contract.paths import RunPaths, umask_of
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.prctl import become_subreaper
from trainer.contract.runs import lock
from trainer.contract.runs.rank_spec import EXIT_FAILED, RankSpec, read_own_spec
from trainer.contract.runs.remote_rank_status import RankMark, write_mark
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.job_file import load_any
from trainer.contract.settings.toml import read_own_text
from trainer.contract.store.states import JobState

TICK_S = 0.25
_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
SHARE = "put the data folder (--data-dir) on a file system that all nodes share"


class ProgramOnNode(ProgramAttempt):
    """An attempt whose environment also contains the variables set by SLURM and this node."""

    def _stored(self) -> ProgramEnvironment:
        return with_variables_of_node(super()._stored(), os.environb)


class StopRequest:
    """A request to stop the program: the stop file, or a signal sent to this process only.

    `scancel` without options sends SIGTERM to the program too, so SIGTERM alone is no reason to signal it again.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._is_signalled, self._must_look = file, False, True
        for name in _SIGNALS:
            signal.signal(signal.Signals[f"SIG{name}"], self._take)

    def _take(self, number: int, _: object) -> None:
        self._must_look, self._is_signalled = True, self._is_signalled or number != signal.SIGTERM

    def is_made(self) -> bool:
        """Return whether the program must stop; if only a signal says so, write the stop file for the supervisor."""
        if self._must_look:
            self._must_look = False
            # A network file system looks for new files when their folder is opened.
            with contextlib.suppress(OSError):
                os.listdir(self._file.parent)
        is_there = self._file.exists()
        if self._is_signalled and not is_there:
            with tolerate_disk(f"writing {self._file}"):
                write_whole(self._file, b"")
        return is_there or self._is_signalled

    def is_urgent(self) -> bool:
        """Return whether the program must be ended without its stop signal and grace time."""
        try:
            return self.is_made() and self._file.read_bytes() == AT_ONCE
        except OSError:
            return False


def run(spec: RankSpec) -> int:
    """Run an attempt's program, record how it ended, and return its exit code, or 128 + N if signal N ended it."""
    paths = RunPaths(spec.run_dir)
    request = StopRequest(paths.stop_file(spec.attempt))
    become_subreaper()
    lock.hold(paths.lock_file)
    attempt = ProgramOnNode(_setup(spec, paths))
    if request.is_made():
        return EXIT_FAILED
    attempt.start()
    mark = RankMark(socket.gethostname(), attempt.ranks[0].ref)
    mark_file = paths.rank_mark(spec.attempt, 0)
    _record(mark_file, mark)
    while attempt.alive:
        attempt.wait(TICK_S)
        if request.is_urgent():
            attempt.end()
        elif request.is_made():
            attempt.ask_to_stop()
    code = attempt.ranks[0].code or 0
    if notes := attempt.notes():
        with tolerate_disk("writing its notes"):
            write_json(paths.rank_exit(spec.attempt, 0), {"notes": "\n".join(notes)})
    _record_ending(attempt, paths.attempt(spec.attempt), is_stopped=request.is_made())
    how = {"exit_code": None if code < 0 else code, "exit_signal": -code if code < 0 else None}
    _record(mark_file, msgspec.structs.replace(mark, **how))
    return 128 - code if code < 0 else code


def _setup(spec: RankSpec, paths: RunPaths) -> AttemptSetup:
    """Return the attempt's setup, with the GPUs that SLURM gave this job."""
    vendor, gpus = gpus_given(os.environ)
    if spec.device == "cuda" and not gpus:
        raise UserError(f"SLURM gave the job no GPUs on {socket.gethostname()}; see `scontrol show job`")
    given = {"gpu_vendor": vendor, "gpu_uuids": gpus} if spec.device == "cuda" else {"gpu_vendor": "", "gpu_uuids": ()}
    job = load_any(paths.job_file, read=read_own_text)
    assert isinstance(job, CommandJob)
    if not os.path.isdir(job.command.folder):
        where = f"{job.command.folder} does not exist on {socket.gethostname()}"
        raise UserError(f"command.folder: {where}; use a folder on a file system that all nodes share")
    return AttemptSetup(spec.job_id or 0, job, paths, msgspec.structs.replace(spec, **given))


def gpus_given(environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the vendor and the names of the GPUs that SLURM made visible, or "" and () if there are none.

    SLURM sets the variables of all vendors, so choose the vendor whose driver the node has.
    """
    named = [(vendor, environ[entry.variable]) for vendor, entry in VENDORS.items() if environ.get(entry.variable)]
    vendor, gpus = next((pair for pair in named if VENDORS[pair[0]].is_here), named[0] if named else ("", ""))
    return vendor, tuple(name.strip() for name in gpus.split(",") if name.strip())


def with_variables_of_node(stored: ProgramEnvironment, here: Mapping[bytes, bytes]) -> ProgramEnvironment:
    """Return the stored environment with the variables that SLURM and the node's prolog have set.

    Variables from the SLURM job in which the command was launched describe other nodes, so they are left out.
    """
    ours, of_slurm = {os.fsencode(name) for name in SUBMITTED}, tuple(map(os.fsencode, OF_SLURM))
    variables = {name: value for name, value in stored.variables if not name.startswith(of_slurm)}
    variables |= {name: value for name, value in here.items() if name not in ours}
    return msgspec.structs.replace(stored, variables=[*variables.items()])


def _record(file: Path, mark: RankMark) -> None:
    """Write the mark; ignore disk errors, because a full disk must not end the program."""
    with tolerate_disk(f"writing {file}"):
        write_mark(file, mark)


def _record_ending(attempt: ProgramAttempt, folder: Path, *, is_stopped: bool) -> None:
    """Record how the attempt ended, in case its supervisor has died."""
    failed = attempt.has_failed
    state = JobState.STOPPED if is_stopped else JobState.FAILED if failed else JobState.FINISHED
    error = attempt.cause() if failed and not is_stopped else None
    first = attempt.first_failed
    with tolerate_disk("writing how the attempt ended"):
        write_ending(folder / "exit.json", JobEnding(state, time.time(), error, None, attempt.endings(), first))


def main(arguments: Sequence[str]) -> int:
    """Run the program of the attempt that the spec file describes; if it cannot be started, record why."""
    file = Path(arguments[0])
    try:
        spec = read_own_spec(file)
    except FileNotFoundError:
        note(f"{file} does not exist on {socket.gethostname()}; {SHARE}")
        return EXIT_FAILED
    os.umask(umask_of(spec.run_dir))
    try:
        return run(spec)
    except (UserError, OSError) as error:
        note(sentence(error))
        with tolerate_disk("writing why it failed"):
            write_json(RunPaths(spec.run_dir).rank_exit(spec.attempt, 0), {"error": sentence(error)})
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
