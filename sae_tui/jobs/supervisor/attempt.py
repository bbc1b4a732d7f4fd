"""Runs one attempt of a job: starts its ranks, monitors them, and determines why they exited."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sae_tui.jobs import named_python
from sae_tui.jobs.ending import JobEnding
from sae_tui.jobs.files import is_gone
from sae_tui.jobs.gpus.idle import IdleWatch
from sae_tui.jobs.launchers import launcher, requeues
from sae_tui.jobs.launchers.base import Attempt, AttemptSetup, RankCommand
from sae_tui.jobs.launchers.early_ranks import EarlyRanks
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.output import output_of
from sae_tui.jobs.queue.gpu_reader import name_of, vendor_of
from sae_tui.jobs.queue.promised import refuse_other_rows
from sae_tui.jobs.shard_headers import ShardHeaders
from sae_tui.jobs.supervisor.energy_meter import EnergyMeter
from sae_tui.jobs.supervisor.follow_run import Watch
from sae_tui.jobs.supervisor.sign import Sign
from sae_tui.jobs.supervisor.signals import SAVE_S, Orders
from sae_tui.jobs.supervisor_log import note, tolerate, tolerate_disk
from sae_tui.policy import IDLE_S, read_policy
from trainer.contract.errors import UserError, sentence
from trainer.contract.extras import OtherInterpreter, judged_by
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.planning.workload import ONE_PROCESS
from trainer.contract.runs.checkpoint_manifest import newest_first, newest_whole
from trainer.contract.runs.model_gpus import with_model_placed
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_STOPPED, RankSpec, rank_command
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.inspectors import inspecting_by
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import load_any
from trainer.contract.settings.toml import read_own_text
from trainer.contract.settings.typed import parse_time_limit
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat
from trainer.contract.store.rows import Job, Rank
from trainer.contract.store.states import JobState
from trainer.contract.wording import duration, plural

if TYPE_CHECKING:
    from sae_tui.jobs.supervisor.gpu_recording import Recording

# The time between two checks of the job: while nothing is happening, and while the job is being ended. A check takes
# about 1 ms of CPU time, because the processor's caches are cold.
CALM_TICK_S, TICK_S = 0.5, 0.25
# How long to wait for the driver's error report after a GPU has failed. GPU conditions are read every 2 s.
FAULT_KNOWN_S = 3.0
# The share of the time limit after which the user is warned.
LATE = 0.9
FOLDER_GONE = "its run folder was deleted"
NO_METRICS = "its SAE was trained, but none of its metrics could be stored; free disk space and clone the job"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of an attempt: how it ended, and whether it was paused, crashed, or asked to be queued again.

    After a crash, the job may be restarted.
    """

    ending: JobEnding
    paused: bool = False
    crashed: bool = False
    requeued: bool = False


class AttemptRunner:
    """Runs the ranks in one attempt from their start until all ranks have exited."""

    # What an attempt runs, as named in messages.
    processes = "its ranks"
    # Whether an attempt that takes no steps is considered stalled.
    counts_steps = True
    # Whether a failure whose cause is known to recur prevents a restart.
    knows_failures = True

    def __init__(
        self, data: DataDir, control: Control, job: Job, orders: Orders, locks: tuple[int, ...], command: RankCommand,
        sign: Sign, early: EarlyRanks | None = None,
    ) -> None:  # fmt: skip
        self._data, self._control, self._job, self._orders = data, control, job, orders
        self._locks, self._command, self._sign, self._early = locks, command, sign, early
        self._paths = data.run(job.id)
        self._killed = False
        self._failure = ""
        self._given_up = ""
        self._stacks: threading.Thread | None = None
        self._began = time.monotonic()
        self._idle = IdleWatch(data, job)
        self._is_late = self._is_idle = False
        # Why the supervisor itself asked the job to stop, or "" if it has not.
        self._stop_reason = ""

    def run(self) -> Outcome:
        """Run the attempt; return its outcome once all ranks have exited."""
        try:
            attempt = self._begin()
        except (UserError, OSError) as error:
            return Outcome(self._ending(JobState.FAILED, sentence(error)))
        recording = _record_gpus(self._data, self._job) if attempt.alive else None
        meter = EnergyMeter(self._data, self._control, self._job)
        try:
            outcome = self._outcome(attempt, self._watch(attempt, meter))
            if recording and outcome.ending.state == JobState.FAILED:
                self._record_faults(recording, outcome.ending.error)
        except Exception:
            self._let_save(attempt)
            raise
        finally:
            self._paths.free_reserve()
            if recording:
                recording.stop()
            if not is_gone(self._data.root):
                meter.end()
        return outcome

    def _record_faults(self, recording: Recording, error: str | None) -> None:
        """If a GPU probably caused the failure, record the errors reported by the driver for the job's GPUs."""
        from sae_tui.jobs.known_failures import remedy

        if (cause := remedy(error)) and cause.kind == "gpu-fault":
            for words in recording.faults(FAULT_KNOWN_S):
                self._tell("gpu-fault", words, "error")

    def _let_save(self, attempt: Attempt) -> None:
        """Ask the ranks to save and stop after an error in this program; terminate them if they do not exit in time."""
        attempt.ask_to_stop()
        with tolerate("asking for a stop"):
            self._control.request(self._job.id, "stop")
        deadline = time.monotonic() + SAVE_S
        while attempt.alive:
            self._record(attempt.wait(TICK_S))
            if time.monotonic() > deadline:
                attempt.end()

    def _begin(self) -> Attempt:
        """Start the ranks and return the attempt; if a rank cannot be started, set `_failure`."""
        self._data.refuse_links(self._job.id)
        config = load_any(self._paths.job_file, read=read_own_text)
        # Do not check another interpreter's packages here: they were checked at launch.
        there = OtherInterpreter(config.launch.python) if config.launch.python else None
        with judged_by(there), inspecting_by(ShardHeaders(self._data).inspect):
            attempt = self._attempt(config)
        self._launch = config.launch
        self._limit_s = self._time_limit_s()
        try:
            attempt.start()
        except (UserError, OSError) as error:
            self._failure = f"{self.processes} could not be started: {sentence(error)}"
        self._record(attempt.rows())
        return attempt

    def _attempt(self, config: AnyJob) -> Attempt:
        """Return the attempt of a job with these settings, without starting it."""
        return launcher(config.launch.backend, self._setup(config))

    def _setup(self, config: AnyJob) -> AttemptSetup:
        refuse_other_rows(self._control, self._job, config)
        spec = self._with_model_placed(self._spec(), config)
        command = self._rank_command(config)
        return AttemptSetup(self._job.id, config, self._paths, spec, self._locks, command, self._early)

    def _spec(self) -> RankSpec:
        """Return the attempt's specification before GPUs are set aside for a language model."""
        vendor = vendor_of(self._data, self._job)
        return RankSpec(
            run_dir=self._paths.root,
            output_dir=self._data.sae(self._job.id),
            attempt=self._job.attempt,
            world_size=self._job.world_size,
            device=self._job.device,
            gpu_uuids=self._job.gpu_uuids if vendor or self._job.device == "cuda" else (),
            gpu_vendor=vendor,
            control_db=self._data.control_db,
            job_id=self._job.id,
            resume_from=_checkpoint(self._paths),
            box_file=self._data.box_file,
            as_one_process=self._job.mode in ONE_PROCESS,
            may_take_bytes=_memory_limit(self._job),
        )

    def _rank_command(self, config: AnyJob) -> RankCommand:
        """Return the rank command with the job's interpreter; raise `UserError` if that interpreter must not be run."""
        if not (python := config.launch.python):
            return self._command
        named_python.refuse(python)
        return functools.partial(rank_command, python=named_python.whole(python))

    def _with_model_placed(self, spec: RankSpec, config: AnyJob) -> RankSpec:
        """Choose the GPUs that run only the language model, based on the memory that the job requested on each GPU."""
        if config.model_gpus == 0:
            return spec
        had, is_simulated = self._job.card_memory_bytes, bool(self._job.gpus_wanted) and self._job.device == "cpu"
        name = CPU if self._job.device == "cpu" else name_of(self._data, self._job)
        box, memory_of = read_box(self._data.box_file), "" if is_simulated else None
        return with_model_placed(spec, config, name, box, DeviceMemory(had, had), memory_of)

    def _watch(self, attempt: Attempt, meter: EnergyMeter) -> set[str]:
        """Monitor the ranks until all have exited; return the requests made in the meantime.

        Forward requests to the ranks, publish their progress, and stop all ranks if one fails.
        """
        watch = Watch(self._control, self._job, self._paths, self._launch, counts_steps=self.counts_steps)
        must_end = False
        while attempt.alive:
            self._record(attempt.wait(TICK_S if must_end or watch.asked_to_stop else CALM_TICK_S))
            if is_gone(self._paths.root):
                # Do nothing else: without the folder, everything else would only log errors.
                self._failure, must_end = self._failure or FOLDER_GONE, True
                attempt.end()
                continue
            self._sign.turn()
            if attempt.is_waiting:
                watch.nothing_expected()
            if watch.poll():
                self._record(attempt.rows())
            if watch.asked_to_stop:
                attempt.ask_to_stop()
            elif watch.asked_to_finish:
                attempt.ask_to_finish()
            self._look_after(attempt, watch)
            self._check_time_limit(watch)
            self._check_idle(watch)
            meter.turn()
            must_end = bool(self._must_end(watch) or self._failure or self._given_up or attempt.has_failed)
            if must_end:
                attempt.end()
        watch.close()
        if attempt.is_hung:
            self._record(attempt.rows())
        return set(watch.requests)

    def _look_after(self, attempt: Attempt, watch: Watch) -> None:
        """Dump the stacks of an attempt that makes no progress, and give up on the attempt after the time limit."""
        is_over = watch.is_given_up or (watch.is_overdue and attempt.is_halted)
        if (watch.is_stalled or is_over) and self._stacks is None:
            self._stacks = threading.Thread(target=self._dump, args=(attempt,), name="stacks", daemon=True)
            self._stacks.start()
        has_dumped = self._stacks is not None and not self._stacks.is_alive()
        if is_over and has_dumped and not self._given_up:
            self._given_up = f"took no step for {watch.quiet_s:.0f} s and was ended"
            if odd := attempt.describe():
                self._given_up += f": {odd}"
            self._tell("given-up", self._given_up, "error")

    def _check_time_limit(self, watch: Watch) -> None:
        """Warn when 90 % of the time limit has passed, and ask the job to stop at the limit; SLURM enforces its own."""
        limit_s, passed_s = self._limit_s, time.monotonic() - self._began
        if limit_s is None:
            return
        if passed_s > limit_s and not watch.asked_to_stop:
            self._stop_reason = f"reached its time limit of {duration(limit_s)}"
            watch.request_stop(self._stop_reason)
        elif LATE * limit_s < passed_s <= limit_s and not self._is_late:
            self._is_late = True
            self._tell("late", f"has {duration(limit_s - passed_s)} left until its time limit", "warning")

    def _time_limit_s(self) -> float | None:
        """Return the job's time limit in seconds, which the machine's policy may shorten, or None if it has none."""
        limit, entry = self._launch.time_limit, LAUNCH_BACKENDS[self._launch.backend]
        if entry.cluster:
            return None if entry.limits_time or limit is None else parse_time_limit(limit)
        policy = read_policy(self._data)
        for problem in policy.problems:
            note(f"{policy.path}: {problem}")
        return policy.time_limit_s(None if limit is None else parse_time_limit(limit))

    def _check_idle(self, watch: Watch) -> None:
        """Warn if the job is not using its GPUs, and ask it to stop after the time set in the machine's policy."""
        if (idle_s := self._idle.turn()) is None:
            return
        was_idle, self._is_idle = self._is_idle, idle_s >= IDLE_S
        if not self._is_idle:
            return
        unused = f"kept its GPUs below 5 % utilisation for {duration(idle_s)}"
        if not was_idle:
            self._tell("idle", f"has {unused}", "warning")
        # Read the policy here: it may have changed since the job started.
        stop_s = read_policy(self._data).stop_idle_s
        if stop_s is not None and idle_s >= stop_s and not watch.asked_to_stop:
            self._stop_reason = f"{unused}, which this machine's policy does not allow"
            watch.request_stop(self._stop_reason)

    def _dump(self, attempt: Attempt) -> None:
        odd, file = attempt.describe(), self._paths.attempt(self._job.attempt) / "stacks.txt"
        try:
            attempt.dump_stacks(file)
            where = f"{file} contains the stacks of {self.processes}"
        except OSError as error:
            where = f"the stacks of {self.processes} could not be written: {error}"
        self._tell("stacks", f"{odd}; {where}" if odd else where, "warning")

    def _must_end(self, watch: Watch) -> bool:
        """Return whether the ranks must be stopped now.

        A signal to this process is treated as a stop request and, if the ranks do not stop in time, as a kill request.
        """
        if self._orders.to_end_since and not watch.asked_to_stop:
            watch.request_stop()
        self._killed = self._killed or watch.asked_to_kill or self._orders.at_once or self._orders.is_overdue
        return self._killed

    def _record(self, ranks: list[Rank]) -> None:
        for rank in ranks if not is_gone(self._data.root) else ():
            with tolerate(f"recording the state of {self.processes}"):
                self._control.record_rank(rank)

    def _tell(self, kind: str, message: str, level: str) -> None:
        if is_gone(self._data.root):
            return
        with tolerate(message):
            self._control.add_event(self._job.id, kind, message, level)

    def _outcome(self, attempt: Attempt, requests: set[str]) -> Outcome:
        """Return the outcome of an attempt whose ranks have all exited."""
        codes = attempt.codes
        if self._failure:
            return Outcome(self._ending(JobState.FAILED, self._failure, attempt))
        if again := self._interrupted(attempt, requests):
            return again
        # Hung ranks may have saved and stopped when they were terminated, although no user asked them to stop.
        hung = bool(self._given_up) and not requests and EXIT_STOPPED in codes
        if codes <= {EXIT_FINISHED, EXIT_STOPPED} and not hung:
            state = JobState.STOPPED if EXIT_STOPPED in codes else JobState.FINISHED
            if state == JobState.FINISHED and self._has_no_metrics():
                return Outcome(self._ending(JobState.FAILED, NO_METRICS, attempt))
            paused = state == JobState.STOPPED and requests == {"pause"}
            return Outcome(self._ending(state, self._stop_reason or None, attempt), paused=paused)
        if self._is_complete():
            return Outcome(self._ending(JobState.FINISHED, None, attempt))
        hangs = attempt.is_hung
        if self._killed and not hangs:
            return Outcome(self._ending(JobState.STOPPED, "was killed on request before it had saved", attempt))
        cause = attempt.cause() if hangs or not self._given_up else self._given_up
        return Outcome(self._ending(JobState.FAILED, cause, attempt), crashed=not requests)

    def _interrupted(self, attempt: Attempt, requests: set[str]) -> Outcome | None:
        """Return an outcome that queues the job again if a cluster took its nodes or a node failed, otherwise None."""
        if requests or self._killed or attempt.codes == {EXIT_FINISHED} or self._is_complete():
            return None
        if (interruption := attempt.interruption()) is None:
            return None
        before = len(requeues.before(self._paths, self._job.attempt))
        if before >= self._launch.max_requeues:
            limit = f"; it was already queued again {plural(before, 'time')} (launch.max_requeues)" if before else ""
            return Outcome(self._ending(JobState.FAILED, interruption.reason + limit, attempt))
        with tolerate_disk("recording why it is queued again"):
            requeues.record(self._paths, self._job.attempt, interruption)
        return Outcome(self._ending(JobState.FAILED, interruption.reason, attempt), requeued=True)

    def _is_complete(self) -> bool:
        """Return whether training had written all its output before the ranks were stopped."""
        heartbeat, job = self._heartbeat(), self._job
        with tolerate("reading its number of steps"):
            # A run asked to finish early has fewer steps than planned, so reread the row.
            job = self._control.job(job.id)
        is_last = heartbeat is not None and heartbeat.is_complete(job.total_steps or 0)
        return is_last and output_of(self._data, self._job) is not None

    def _has_no_metrics(self) -> bool:
        """Return whether the run has written an SAE but no metrics."""
        return self._heartbeat() is None and output_of(self._data, self._job) is not None

    def _heartbeat(self) -> Heartbeat | None:
        run = LiveRun(self._paths)
        run.poll()
        run.close()
        return run.heartbeat

    def _ending(self, state: JobState, reason: str | None, attempt: Attempt | None = None) -> JobEnding:
        return JobEnding(
            state=state,
            ended=time.time(),
            error=reason,
            output_path=output_of(self._data, self._job),
            ranks=attempt.endings() if attempt else (),
            first_failed=attempt.first_failed if attempt else None,
        )


def _memory_limit(job: Job) -> int | None:
    """Return the memory in bytes that each rank may use on a shared or simulated GPU, or None if there is no limit."""
    if job.gpus_wanted and job.device == "cpu":
        return job.estimated_memory_bytes
    return job.card_memory_bytes if job.shares_gpus else None


def _checkpoint(paths: RunPaths) -> Path | None:
    """Return the latest intact checkpoint, or None if there are no checkpoints.

    Raise `UserError` if all checkpoints are damaged.
    """
    return newest_whole(paths.checkpoints) if newest_first(paths.checkpoints) else None


def _record_gpus(data: DataDir, job: Job) -> Recording | None:
    """Start storing GPU samples during a job, in case no app is running; return None if this fails.

    Recording errors never affect the job.
    """
    try:
        from sae_tui.jobs.supervisor.gpu_recording import record

        return record(data, job)
    except Exception as error:
        note(f"GPU samples are not recorded: {error!r}")
        return None
