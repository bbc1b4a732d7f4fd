"""Runs a command's program as a child process of the supervisor, and stops it with all its descendants."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from sae_tui.jobs.launchers.attached import AttachedProgram, OutputCopy
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.capped_log import CappedLog
from sae_tui.jobs.launchers.cgroup import Cgroup
from sae_tui.jobs.launchers.local import RankProcess, dump_stacks, is_halted, odd_state
from sae_tui.jobs.launchers.process_tree import MARK, ProcessTree
from sae_tui.jobs.launchers.ranks import RankStates
from sae_tui.jobs.program_environment import ProgramEnvironment, snapshot
from sae_tui.jobs.program_metrics.collector import ProgramMetrics
from trainer.contract.errors import UserError, sentence
from trainer.contract.files import write_whole
from trainer.contract.paths import open_private, private_folder
from trainer.contract.planning.gpu_vendors import VENDORS, hide_all
from trainer.contract.process import ProcessRef
from trainer.contract.runs.rank_exit import GIVEN_UP_AFTER_S, wait_for_ends
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.command import PLACEHOLDERS, Command, CommandJob
from trainer.contract.store.rows import Rank
from trainer.contract.wording import gibibytes, plural

# After a command's program has ended, or after a request to kill it, the command's other processes have this long to
# exit.
LEFT_BEHIND_S = 5.0
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


class Program(RankProcess):
    """A command's program; every exit code except 0 means failure, unlike for a rank."""

    name = "its program"

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0)


class ProgramAttempt(RankStates["Program | AttachedProgram"]):
    """An attempt of a command: one program and its descendants.

    The program keeps running if the supervisor dies: it writes its own log, and holds the locks on the run and its
    GPUs. The next supervisor attaches to it.
    """

    is_waiting = False
    was_cut_short = ""
    _processes = "its program"

    def __init__(self, setup: AttemptSetup) -> None:
        super().__init__(setup)
        assert isinstance(setup.config, CommandJob)
        self._running, self._is_adopted = setup.running, setup.is_adopted
        self._copy: OutputCopy | None = None
        self._locks, self._settings = setup.locks, setup.config.command
        self._log = CappedLog(self._paths.log(0), self._settings.log_limit_mib * 2**20)
        self._metrics = ProgramMetrics(setup.spec, setup.config, self._paths.log(0), self._measured, setup.gpu_uuids)
        self._cgroup: Cgroup | None = None
        self._tree: ProcessTree | None = None
        # Monotonic times: when the stop sequence began, and when the remaining processes were asked to exit.
        self._stopping_since: float | None = None
        self._ending_since: float | None = None
        self._left_behind = 0

    def start(self) -> None:
        private_folder(self._paths.attempt(self._spec.attempt))
        if self._running:
            self._attach(self._running)
            return
        stored = self._stored()
        values = placeholders(self._spec)
        environment = _environment(self._spec, stored, self._settings, values)
        argv = [fill(word, values) for word in self._settings.argv]
        self._cgroup = Cgroup.create(self._cgroup_name)
        # If this process is killed after this point, it is unknown whether the program has run.
        write_whole(self._paths.begun_file(self._spec.attempt), b"", durable=False)
        process = self._popen(argv, environment, stored)
        self._tree = ProcessTree(process.pid, self._paths.root, self._cgroup)
        exit_file = self._paths.rank_exit(self._spec.attempt, 0)
        self.ranks.append(Program(0, process, exit_file, self._paths.log(0)))
        self._read_metrics()

    def _read_metrics(self) -> None:
        """Start reading the program's metrics, except on a node, which may share files but not the SQLite database."""
        if not self._spec.by_files:
            self._metrics.start()

    def _attach(self, process: ProcessRef) -> None:
        self._cgroup = Cgroup.of(process.pid, self._cgroup_name)
        self._tree = ProcessTree(process.pid, self._paths.root, self._cgroup)
        exit_file = self._paths.rank_exit(self._spec.attempt, 0)
        self.ranks.append(AttachedProgram(process, exit_file, self._paths.log(0)))
        if self._is_adopted:
            offset = self._paths.attempt(self._spec.attempt) / "log.offset"
            self._copy = OutputCopy(process.pid, self._paths.log(0), offset)
        self._read_metrics()

    @property
    def _cgroup_name(self) -> str:
        return f"sae-tui-job-{self._job_id}-{self._spec.attempt}"

    def _stored(self) -> ProgramEnvironment:
        """Return the environment of the shell that launched the job."""
        return ProgramEnvironment.read(self._paths) or snapshot(clean=True)

    def _popen(
        self, argv: list[str], environment: Mapping[bytes, bytes], stored: ProgramEnvironment
    ) -> subprocess.Popen[bytes]:
        log = open_private(self._paths.log(0), os.O_APPEND)

        def before_exec() -> None:
            stored.apply_limits()
            if self._cgroup:
                self._cgroup.enter()
            _reset_signals()

        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._settings.folder,
                env=environment,
                pass_fds=self._locks,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except OSError as error:
            raise UserError(f"{shlex.join(argv)}: {sentence(error)}") from None
        finally:
            os.close(log)

    # The methods below end a program. `ask_to_stop` and `end` are called about four times per second until the attempt
    # has ended.

    def ask_to_stop(self) -> None:
        """Send the stop signal to the program's process group; kill all its processes after the grace time."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self._signal_group(signal.Signals[f"SIG{self._settings.stop_signal}"])
        elif time.monotonic() - self._stopping_since > self._settings.grace_s:
            self._kill()

    def ask_to_finish(self) -> None:
        """Do nothing: a program has no training to cool down."""

    def end(self) -> None:
        """Send SIGTERM to all processes; calls more than 5 s later send SIGKILL."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._send(signal.SIGTERM)
        elif time.monotonic() - self._ending_since > LEFT_BEHIND_S:
            self._kill()

    def _signal_group(self, number: signal.Signals) -> None:
        for rank in self.living:
            rank.ended_by_us = True
            if isinstance(rank, Program):
                # The program has not been reaped, so its pid still names its process group.
                os.killpg(rank.process.pid, number)
            elif self._tree:
                self._tree.send(number)

    def _send(self, number: signal.Signals) -> int:
        for rank in self.living:
            rank.ended_by_us = True
        return self._tree.send(number) if self._tree else 0

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        for rank in self.living:
            rank.kill()

    @property
    def alive(self) -> bool:
        """True while the program or a process that it left behind is running."""
        if super().alive or self._is_adopted:
            return super().alive
        if self._tree and (left := len(self._tree.living())) and not self._has_given_up:
            self._left_behind = self._left_behind or left
            return True
        self._metrics.close()
        self._log.check()
        if self._cgroup:
            self._cgroup.remove()
        return False

    @property
    def _has_given_up(self) -> bool:
        """Whether a process has survived SIGKILL for a minute, as a process hung in the kernel does."""
        since = self._ending_since
        return since is not None and time.monotonic() - since > LEFT_BEHIND_S + GIVEN_UP_AFTER_S

    def wait(self, timeout_s: float) -> list[Rank]:
        """Wait up to `timeout_s` for the program to end; then ask the processes that it left behind to exit."""
        if self._copy:
            self._copy.poll()
        self._log.turn()
        if self.living:
            (program,) = self.living
            if isinstance(program, Program):
                return [self._row(rank) for rank in wait_for_ends([program], timeout_s)]
            return [self._row(program)] if program.wait(timeout_s) else []
        self.end()
        _reap_others()
        time.sleep(min(timeout_s, 0.05))
        return []

    @property
    def is_halted(self) -> bool:
        return any(is_halted(rank.ref.pid) for rank in self.living)

    def describe(self) -> str:
        return next((f"its program {word}" for rank in self.living if (word := odd_state(rank.ref.pid))), "")

    def how(self) -> str:
        """Return how the program ended, as a predicate like `ended with exit code 2`."""
        return self.ranks[0].how()

    def notes(self) -> list[str]:
        """Return what a user should know about an attempt that has ended."""
        notes = []
        if self._left_behind:
            notes.append(f"{plural(self._left_behind, 'process')} left behind by its program ended with it")
        if removed := self._log.removed_bytes:
            notes.append(f"{gibibytes(removed)} were removed from the middle of its log")
        return notes

    def dump_stacks(self, file: Path) -> None:
        processes = self._tree.living() if self._tree else []
        dump_stacks({f"process {ref.pid}": ref for ref in processes}, file)

    def _measured(self) -> list[ProcessRef]:
        return self._tree.recent() if self._tree else []


def placeholders(spec: RankSpec) -> dict[str, str]:
    """Return the values of the placeholders in a command's arguments."""
    return {
        "gpus": str(len(spec.gpu_uuids)),
        "gpu_list": ",".join(spec.gpu_uuids),
        "job_id": str(spec.job_id or 0),
        "run_dir": str(spec.run_dir),
    }


def fill(word: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders in a word; leave all other braces unchanged."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], word)


def _environment(
    spec: RankSpec, stored: ProgramEnvironment, settings: Command, values: Mapping[str, str]
) -> dict[bytes, bytes]:
    """Return the program's environment: the stored one, the job file's variables, the GPUs and the placeholders."""
    pinned = VENDORS[spec.gpu_vendor].pin(spec.gpu_uuids) if spec.gpu_vendor in VENDORS else {}
    own = {f"SAE_TUI_{name.upper()}": value for name, value in values.items()}
    added = {name: fill(value, values) for name, value in settings.variables.items()}
    added |= hide_all() | pinned | own | {MARK: str(spec.run_dir), "SAE_TUI_ATTEMPT": str(spec.attempt)}
    # Without this, the output of a Python program appears in the log only when its buffer is full.
    default = {b"PYTHONUNBUFFERED": b"1"}
    return default | stored.of_program | {os.fsencode(name): os.fsencode(value) for name, value in added.items()}


def _reset_signals() -> None:
    """Reset the handlers that the supervisor has changed; a program must not inherit ignored signals."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)


def _reap_others() -> None:
    """Reap orphans that this subreaper has adopted."""
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
