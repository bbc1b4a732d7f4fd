"""The background process that evaluates a job, started by `python -m sae_tui.jobs.evaluation.follow DATA_DIR REQUEST`.

The process holds the run's evaluation lock and its GPU's lock, runs the trainer's command, publishes the progress, and
records the outcome as an event for the job.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs import going, named_python
from sae_tui.jobs.background import go_on
from sae_tui.jobs.evaluation.outcome import failure, outcome
from sae_tui.jobs.evaluation.request import EvaluationRequest, ReservedGpu, idle_gpu
from sae_tui.jobs.files import is_gone
from sae_tui.jobs.going import ENDS, FAILED, HEARTBEAT_S, STARTED, STOPPED, Going
from sae_tui.jobs.gpus.availability import choices, holders, with_other_users
from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder
from sae_tui.jobs.queue.gpu_reader import GpuReader
from sae_tui.jobs.supervisor_log import note, retry
from trainer.contract.errors import UserError
from trainer.contract.json_file import decode_as
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir, umask_of
from trainer.contract.planning.gpu_vendors import VENDORS, hide_all
from trainer.contract.prctl import end_with_parent
from trainer.contract.process import ProcessRef
from trainer.contract.progress import ENV_DESCRIPTOR, Progress, read_reached
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

# How often to check for a free GPU or a stop request.
LOOK_S = 0.5
# How long to wait for the trainer to exit after a stop request before killing it.
PATIENCE_S = 5.0


class RunningEvaluation:
    """An evaluation of a job; the constructor raises `UserError` if the job is already being evaluated."""

    def __init__(self, data: DataDir, request: EvaluationRequest) -> None:
        self._data, self._request = data, request
        self._paths = data.run(request.job_id)
        data.refuse_links(request.job_id)
        os.umask(umask_of(data.root))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._lock = FileLock(self._paths.evaluation_lock)
        if not self._lock.acquire():
            raise UserError("another evaluation of this job is running")
        # Mark any old stop request as answered; it was meant for an earlier evaluation.
        self._answer_stop()
        self._locks: GpuLocks | None = None
        self._gpu: ReservedGpu | None = None
        self._written_at = 0.0
        self._going = Going(
            job_id=request.job_id, process=ProcessRef.current(), host=socket.gethostname(), parts=request.parts,
            began=time.time(),
        )  # fmt: skip
        if not (request.gpu and self._take(request.gpu)):
            self._write(self._going)

    def run(self, command: Sequence[str] = ()) -> None:
        """Evaluate with `command`, or with the requested interpreter if `command` is empty, and record the outcome."""
        try:
            if not self._has_device():
                return self._tell(STOPPED, "was not evaluated: it was stopped while waiting for a GPU")
            self._tell(STARTED, f"is being evaluated on {self._going.where}")
            code = self._run(command)
            if code is None:
                self._tell(STOPPED, "was not evaluated: it was stopped; earlier results are kept")
            elif code:
                self._tell(FAILED, failure(self._paths, code), "warning")
            else:
                self._tell(*outcome(self._data, self._request.job_id, self._request.parts))
        except Exception as error:
            what = f"sae-tui itself failed: {type(error).__name__}: {error}"
            self._tell(FAILED, f"was not evaluated: {what}; see {self._paths.evaluation_log}", "warning")
            raise
        finally:
            going.remove(self._data, self._request.job_id)

    def _has_device(self) -> bool:
        """Wait for a free GPU if the request requires one; return False if a stop request arrives first."""
        while self._request.waits and self._gpu is None:
            if self._is_stopped():
                return False
            gpu, reason = _free_gpu(self._data, self._request.job_id, self._request.gpu_source, self._going.began)
            if gpu and self._take(gpu):
                break
            self._write(msgspec.structs.replace(self._going, waits_for=reason or "another process took the free GPU"))
            time.sleep(LOOK_S)
        return True

    def _take(self, gpu: ReservedGpu) -> bool:
        """Reserve a GPU for the lifetime of this process; return False if another process has reserved it."""
        locks = GpuLocks(Path(gpu.locks), [gpu.uuid])
        if gpu.vendor not in VENDORS or not locks.take():
            return False
        self._locks, self._gpu = locks, gpu
        self._write(msgspec.structs.replace(self._going, device="cuda", gpu_index=gpu.index, waits_for=""))
        return True

    def _run(self, command: Sequence[str]) -> int | None:
        """Run the trainer and publish its progress; return its exit code, or None if it was stopped."""
        python, gpu = self._request.python, self._gpu
        pinned = VENDORS[gpu.vendor].pin([gpu.uuid]) if gpu else {}
        trainer = command or named_python.command(python, "eval")
        argv = [*trainer, str(self._paths.root), "--device", "cuda" if gpu else "cpu", *self._request.flags]
        reading, writing = os.pipe()
        environment = {**named_python.variables(python), **hide_all(), **pinned, ENV_DESCRIPTOR: str(writing)}
        process = _start(argv, environment, writing)
        os.close(writing)
        with (
            Progress(f"evaluation of job {self._request.job_id}", to_descriptor=False) as progress,
            open(reading, "rb", buffering=0) as lines,
        ):
            was_stopped = self._follow(process, lines.fileno(), progress)
        code = process.wait()
        # The trainer may have finished just before the stop.
        return None if was_stopped and code else code

    def _follow(self, process: subprocess.Popen[bytes], descriptor: int, progress: Progress) -> bool:
        """Publish the trainer's progress until the trainer exits; return whether it was stopped."""
        kept, is_open = b"", True
        # The trainer's children may keep the descriptor open after the trainer has exited, so poll the process.
        while process.poll() is None:
            if self._is_stopped():
                _end(process)
                return True
            if not is_open:
                time.sleep(LOOK_S / 5)
            elif select.select([descriptor], [], [], LOOK_S)[0]:
                read = os.read(descriptor, 65536)
                is_open = bool(read)
                *whole, kept = (kept + read).split(b"\n")
                for reached in filter(None, map(read_reached, whole[-1:])):
                    progress.reach(reached)
                    self._write(msgspec.structs.replace(self._going, reached=reached))
            if not is_open:
                # Finish the progress line now so that the trainer's result becomes the last line of the log.
                progress.close()
            self._write(self._going)
        return False

    def _write(self, now: Going) -> None:
        """Write the progress if it has changed, or if the last write was more than `HEARTBEAT_S` ago."""
        is_known = now == self._going and time.monotonic() - self._written_at < HEARTBEAT_S
        # Do not write if the data folder was deleted: writing would recreate it.
        if is_known or is_gone(self._data.root):
            return
        self._going, self._written_at = now, time.monotonic()
        try:
            going.write(self._data, now)
        except (OSError, UserError) as error:
            note(f"the progress of the evaluation cannot be written: {error}")

    def _is_stopped(self) -> bool:
        """Return whether a stop was requested or the job was deleted."""
        if not self._paths.root.exists():
            return True
        try:
            with contextlib.closing(Control(self._data.control_db, readonly=True)) as control:
                return "stop-evaluation" in control.open_requests(self._request.job_id)
        except UserError:
            return False

    def _answer_stop(self) -> None:
        def answer() -> None:
            with contextlib.closing(Control(self._data.control_db)) as control:
                control.answer(self._request.job_id, "stop-evaluation")

        retry("answering a request to stop", answer)

    def _tell(self, kind: str, message: str, level: str = "info") -> None:
        """Record an event for the job, unless the job or the data folder has been deleted in the meantime."""
        if is_gone(self._data.root):
            return

        def add() -> None:
            with contextlib.closing(Control(self._data.control_db)) as control:
                if control.state(self._request.job_id) is not None:
                    if kind in ENDS:
                        control.answer(self._request.job_id, "stop-evaluation")
                    control.add_event(self._request.job_id, kind, message, level)

        retry("recording the evaluation", add)


def _start(argv: Sequence[str], environment: Mapping[str, str], descriptor: int) -> subprocess.Popen[bytes]:
    """Start a command that writes its progress to `descriptor` and is terminated when this process exits."""
    parent = os.getpid()
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        pass_fds=[descriptor],
        preexec_fn=lambda: end_with_parent(parent),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_gpu(data: DataDir, job_id: int, source: str, since: float) -> tuple[ReservedGpu | None, str]:
    """Return the free GPU with the most free memory, and ""; if no GPU is free, return None and the reason."""
    try:
        with contextlib.closing(Control(data.control_db, readonly=True)) as control:
            job, jobs, leases = control.job(job_id), control.active_jobs(), control.leases()
            ranks = [rank for lease in leases for rank in control.ranks(lease.job_id)]
    except UserError as error:
        return None, str(error)
    if before := [one for one in jobs if _is_before(one, job.host, since)]:
        return None, f"job {before[-1].id} was queued before it"
    reader = _reader(data.root, source)
    samples = reader.samples()
    if not samples and reader.problem:
        return None, f"the GPUs cannot be read: {reader.problem}"
    held = with_other_users(holders(jobs, leases, ranks), lock_folder(data, source), samples)
    gpu = idle_gpu(data, job, choices(samples, held), source)
    return gpu, "" if gpu else "no GPU is free"


@functools.cache
def _reader(root: Path, source: str) -> GpuReader:
    """Return the cached reader for a GPU source.

    The reader tracks how long another process has been blocking the source.
    """
    return GpuReader(DataDir(root), source)


def _is_before(job: Job, host: str, since: float) -> bool:
    """Return whether a job on this host is queued for GPUs, and was queued before `since`."""
    waits = job.state == JobState.QUEUED and not job.held and not job.after and job.gpus_wanted > 0
    return waits and job.host == host and (job.queued or job.created) < since


def main(arguments: Sequence[str], command: Sequence[str] = ()) -> int:
    """Fork the evaluating process; in the parent, return 0 once the evaluation has started, or 1 if it cannot start."""
    root, request = arguments

    def begin() -> Callable[[], None]:
        evaluation = RunningEvaluation(DataDir(Path(root)), decode_as(request, EvaluationRequest))
        return lambda: evaluation.run(command)

    return go_on(begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
