"""Runs one attempt of a command: starts its program or attaches to it, and interprets its exit code."""

from __future__ import annotations

import msgspec

from sae_tui.jobs.launchers import command_launcher
from sae_tui.jobs.launchers.attached import ADOPTED
from sae_tui.jobs.launchers.base import Attempt, AttemptSetup
from sae_tui.jobs.mending import running_program
from sae_tui.jobs.supervisor.attempt import AttemptRunner, Outcome
from trainer.contract.errors import UserError
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.job import AnyJob
from trainer.contract.store.states import JobState


class ProgramRunner(AttemptRunner):
    """Runs a command's program from its start until it and all its descendants have ended."""

    processes = "its program"
    counts_steps = False
    knows_failures = False

    def _attempt(self, config: AnyJob) -> Attempt:
        assert isinstance(config, CommandJob)
        self._settings = config.command
        setup = AttemptSetup(self._job.id, config, self._paths, self._spec(), self._locks)
        running = running_program(self._data, self._control, self._job)
        is_local = not config.cluster
        if is_local and not running and self._was_started():
            # Another supervisor started the program, which ended just before this supervisor could attach to it.
            raise UserError("its program ended while it had no supervisor, so its exit code is unknown")
        if running:
            self._began -= running.age_s
        if running and self._job.state != JobState.STARTING:
            self._tell("attached", f"its program (pid {running.pid}) continues under a new supervisor", "info")
        is_adopted = running is not None and self._job.mode == ADOPTED and self._job.attempt == 1
        setup = msgspec.structs.replace(setup, gpu_uuids=self._job.gpu_uuids, running=running, is_adopted=is_adopted)
        self._program = command_launcher(config.launch.backend, setup)
        return self._program

    def _was_started(self) -> bool:
        return any(rank.attempt == self._job.attempt for rank in self._control.ranks(self._job.id))

    def _outcome(self, attempt: Attempt, requests: set[str]) -> Outcome:
        for message in self._program.notes():
            self._tell("left-behind", message, "info")
        if self._failure:
            return Outcome(self._ending(JobState.FAILED, self._failure, attempt))
        (code,) = attempt.codes
        self._tell("exit", f"its program {self._program.how()}", "info")
        if requests or self._killed:
            stopped = self._ending(JobState.STOPPED, self._stop_reason or None, attempt)
            return Outcome(stopped, paused=requests == {"pause"})
        if code in (self._settings.requeue_on or ()):
            return Outcome(self._ending(JobState.FAILED, attempt.cause(), attempt), requeued=True)
        if again := self._interrupted(attempt, requests):
            return again
        if cut_short := self._program.was_cut_short:
            return Outcome(self._ending(JobState.STOPPED, cut_short, attempt))
        if code == 0:
            return Outcome(self._ending(JobState.FINISHED, None, attempt))
        failed = self._ending(JobState.FAILED, attempt.cause(), attempt)
        return Outcome(failed, crashed=self._settings.retry_on is None or code in self._settings.retry_on)
