"""Runs a command's program on a node chosen by SLURM.

The batch job's first process is `program_on_node`, which runs the program as the local backend does. It reads the
stored environment from the run folder, which it shares with the supervisor, so that no secret is in the batch script,
on a command line or in SLURM's own records.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.remote import RemoteRank
from sae_tui.jobs.launchers.sbatch import program_script, submission
from sae_tui.jobs.launchers.slurm import SlurmAttempt
from sae_tui.jobs.supervisor_log import tolerate_disk
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.settings.command import CommandJob

# How long before its time limit the program is asked to stop, in addition to its grace time: SLURM checks limits only
# every 30 s.
SPARE_S = 60.0
# The node kills the program after its grace time. If the node is late by more than this time, the job is cancelled.
NODE_LATE_S = 30.0
# The node kills the program 5 s after being asked to end it. If the program has not ended within this time, the job is
# cancelled.
ENDED_WITHIN_S = 10.0
# The content of the stop file if the program must be ended without its stop signal and grace time.
AT_ONCE = b"at once"
# A shell's exit code for a program that could not be started.
NOT_STARTED = 127
# The batch job's initial variables, which its Python interpreter needs. All others are in the run folder.
SUBMITTED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONHOME", "PYTHONPATH", "SHELL", "TZ", "USER")
OF_SLURM = ("SLURM_", "SBATCH_", "SLURMD_")


class RemoteProgram(RemoteRank):
    """A command's program; every exit code except 0 means failure, unlike for a rank."""

    @property
    def name(self) -> str:
        return f"its program on {self.mark.host}" if self.mark else "its program"

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0)

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; if no end is recorded, the program was killed with its SLURM job."""
        if self.ended is None or self.never_ran:
            return super().code
        if self.mark is None:
            return NOT_STARTED
        return super().code if self.mark.has_ended else -signal.SIGKILL


class SlurmProgram(SlurmAttempt):
    """An attempt of a command as a SLURM job."""

    _processes, _what = "its program", "its program is"
    _near_limit = "its program is asked to stop"
    # If the batch job receives the stop signal before its Python process handles signals, the signal ends the job.
    _stopped_states = ("CANCELLED", "FAILED", "UNKNOWN")

    def __init__(self, setup: AttemptSetup) -> None:
        assert isinstance(setup.config, CommandJob)
        spec = msgspec.structs.replace(setup.spec, as_one_process=True)
        super().__init__(msgspec.structs.replace(setup, spec=spec, command=_on_node))
        self._settings = setup.config.command
        self._stopping_since: float | None = None
        self._ending_since: float | None = None

    def _script(self, argv: Sequence[str]) -> str:
        return program_script(self._spec, argv)

    def _submission(self, batch: Path, avoid: Sequence[str]) -> list[str]:
        save_s = self._settings.grace_s + SPARE_S
        return submission(self._spec, self._job.launch, self._job.name, self._log, batch, save_s, avoid)

    def _environment(self) -> Mapping[str, str]:
        return submitted(os.environ)

    def _new_ranks(self) -> list[RemoteRank]:
        return [RemoteProgram(0, self._paths, self._spec.attempt, self._log)]

    def ask_to_stop(self) -> None:
        """Have the node send the program its stop signal, and kill it after its grace time.

        The stop file is the request; the signal only makes the node read it at once. Later calls cancel the job if the
        node is late.
        """
        super().ask_to_stop()
        if not self._asked_to_stop or self._slurm is None:
            return
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            if self._has_run:
                self._slurm.cancel("--batch", f"--signal={self._settings.stop_signal}")
        elif time.monotonic() - self._stopping_since > self._settings.grace_s + NODE_LATE_S:
            self.end()

    def end(self) -> None:
        """Have the node ask all the program's processes to exit, and kill them 5 s later; then cancel the job."""
        if self._slurm is None or self._over_since or not self.alive:
            return
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._mark_ended_by_us()
            with tolerate_disk("asking the node to end the program"):
                write_whole(self._paths.stop_file(self._spec.attempt), AT_ONCE)
            if self._has_run and self._slurm.cancel("--batch", f"--signal={self._settings.stop_signal}"):
                return
        if not self._has_run or time.monotonic() - self._ending_since > ENDED_WITHIN_S:
            super().end()

    def ask_to_finish(self) -> None:
        """Do nothing: a program has no training to cool down."""

    @property
    def _is_near_its_limit(self) -> bool:
        return self._ending_since is None and super()._is_near_its_limit

    @property
    def was_cut_short(self) -> str:
        return "was asked to stop because its SLURM time limit was near" if self._is_near_its_limit else ""

    def how(self) -> str:
        """Return how the program ended, as a predicate like `ended with exit code 2`."""
        return self.ranks[0].how()

    def notes(self) -> list[str]:
        """Return what a user should know about an attempt that has ended."""
        words = read_json(self._paths.rank_exit(self._spec.attempt, 0), dict[str, str | None]) or {}
        return (words.get("notes") or "").splitlines()


def submitted(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the batch job's initial variables."""
    return {name: value for name, value in environ.items() if name in SUBMITTED or name.startswith(OF_SLURM)}


def _on_node(spec_file: Path) -> Sequence[str]:
    """Return the command line that runs an attempt's program on its node."""
    return [sys.executable, "-P", "-m", "sae_tui.jobs.launchers.program_on_node", str(spec_file)]
