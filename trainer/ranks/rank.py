"""Runs one rank: sets up signal handling and progress reporting, then does the work for this kind of job."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn

from trainer.contract import prctl
from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json, write_json
from trainer.contract.output import complain
from trainer.contract.paths import RunPaths
from trainer.contract.planning.check_job import proposal_class
from trainer.contract.printable import printable_lines
from trainer.contract.process import STOP_SIGNALS, ProcessRef
from trainer.contract.runs.lock import hold
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RankSpec
from trainer.contract.runs.run_job import load_any_run_job
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.job import AnyJob, J
from trainer.contract.settings.toml import read_own_text
from trainer.contract.store.metrics_store import Heartbeat, SeriesWriter, may_take_long
from trainer.ranks import staging

if TYPE_CHECKING:
    import torch

    from trainer.reporting.progress import RunProgress

# The time without progress, in seconds, after which a rank is considered stuck once it has been asked to stop.
STUCK_AFTER_S = 60.0
# The minimum time that ranks wait for a busy rank, in seconds.
LEAST_PATIENCE_S = 600.0


def main(spec: RankSpec, job: AnyJob | None = None) -> NoReturn:
    """Run the rank named by the environment variable RANK, and exit the process with the rank's exit code."""
    code = run(spec, int(os.environ.get("RANK", "0")), job)
    # The disk that holds the log may be full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Skip PyTorch's shutdown: it takes a second of CPU time and would delay a stop and the next job.
    os._exit(code)


def run(spec: RankSpec, rank: int, job: AnyJob | None = None, on_met: Callable[[], object] = lambda: None) -> int:
    """Run one rank of an attempt and return its exit code; exit the process if the rank fails.

    Pass `job` if this host may not see the run's folder yet. `on_met` is called once all ranks have joined.
    """
    stop = threading.Event()
    parent = end_with_parent()
    hold_signals()
    hold(RunPaths(spec.run_dir).lock_file)
    try:
        return EXIT_FINISHED if _work(spec, rank, stop, parent, job, on_met) else EXIT_STOPPED
    except BaseException as error:
        report(RunPaths(spec.run_dir).rank_exit(spec.attempt, rank), error)
        # Tearing down a process group whose peers are gone, or a GPU that hangs, can take minutes.
        os._exit(EXIT_FAILED)


def _work(
    spec: RankSpec,
    rank: int,
    stop: threading.Event,
    parent: int,
    job: AnyJob | None,
    on_met: Callable[[], object],
) -> bool:
    """Do the rank's work; return True if the run is finished, False if it stopped."""
    from trainer.reporting.progress import RunProgress

    paths = RunPaths(spec.run_dir)
    job = job or load_any_run_job(paths.job_file, read=read_own_text)
    work = _rank_work(job)(spec, rank, job, stop, on_met)
    progress = work.progress() if rank == 0 else RunProgress()
    try:
        # While rank 0 saves, the other ranks wait in the next step. If rank 0 fails, the other ranks exit too.
        stuck_after_s = STUCK_AFTER_S if rank == 0 else work.patience_s
        first = paths.first_rank(spec.attempt)
        if rank == 0 and work.first_saves:
            with contextlib.suppress(OSError):
                write_json(first, ProcessRef.current())
        _stop_on_sigterm(stop, progress, stuck_after_s, parent, first)
        return work.run(progress)
    except BaseException as error:
        progress.event("failed", _sentence(error), "error")
        raise
    finally:
        progress.close()


def _rank_work(job: J) -> type[RankWork[J]]:
    """Return the class that does the work for this kind of job."""
    loaded: type[RankWork[J]] = pkgutil.resolve_name(KINDS[job.kind].rank)
    return loaded


class RankWork(Generic[J]):
    """The work done by a rank. Each kind of job has a subclass, which imports torch only in `run`."""

    # How long ranks wait for a busy rank, in seconds.
    patience_s: float = LEAST_PATIENCE_S
    # Whether rank 0 saves for all ranks.
    first_saves = False

    def __init__(self, spec: RankSpec, rank: int, job: J, stop: threading.Event, on_met: Callable[[], object]) -> None:
        self.spec, self.rank, self.job, self.stop, self.on_met = spec, rank, job, stop, on_met
        self.finish = threading.Event()
        self.paths = RunPaths(spec.run_dir)
        self.attempt = self.paths.attempt(spec.attempt)
        self.total_steps = proposal_class(job).total_steps(job, spec.n_devices)

    def run(self, progress: RunProgress) -> bool:
        """Work until the job is done or `stop` is set; return whether it is done."""
        raise NotImplementedError

    def progress(self, at: Heartbeat | None = None) -> RunProgress:
        """Return a progress writer for the run's store or, if the store is on another host, for a file.

        Delete the history after the step in the heartbeat `at`.
        """
        from trainer.reporting.jsonl_file import FileRequests, LineFile
        from trainer.reporting.progress import Requests, StoredProgress

        spec, paths = self.spec, self.paths
        by_files = FileRequests(paths.stop_file(spec.attempt), paths.finish_file(spec.attempt))
        if spec.by_files:
            file = LineFile(paths.progress_file(spec.attempt), at)
            return StoredProgress(file, self.total_steps, self.stop, by_files, self.finish)
        if at:
            # If the store is unusable, metrics are lost, but the run must not fail.
            with contextlib.suppress(Exception), contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
                writer.rewind(at)
        requests = (
            by_files if spec.control_db is None or spec.job_id is None else Requests(spec.control_db, spec.job_id)
        )
        return StoredProgress(
            paths.metrics_db, self.total_steps, self.stop, requests, self.finish, paths.rank_spec(spec.attempt)
        )


def once_each_start(spec: RankSpec, name: str) -> str:
    """Return a file name in the attempt's folder that changes whenever a cluster restarts the attempt."""
    if staging.is_staged():
        # The process may have left the file locked before its restart.
        name = f"{name}-staged"
    if not spec.by_files:
        return name
    return "-".join([name, os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")])


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank_device(spec: RankSpec, local_rank: int) -> torch.device:
    """Return this rank's device and make it the current device for this thread.

    Raise `UserError` if PyTorch sees too few GPUs.
    """
    import torch

    if spec.device != "cuda":
        return torch.device("cpu")
    # srun and torchrun wrappers may make only one GPU visible to each rank; NCCL refuses ranks that share a GPU.
    index = 0 if not spec.gpu_uuids and not spec.as_one_process and torch.cuda.device_count() == 1 else local_rank
    require_gpu(index, f"rank {local_rank} has none")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def require_gpu(index: int, lack: str) -> None:
    """Raise `UserError` if PyTorch sees no GPU with this index; `lack` is the consequence to state in the message."""
    import torch

    if index >= (n_gpus := torch.cuda.device_count()):
        reason = f"PyTorch {torch.__version__} sees {n_gpus} GPUs, so {lack}"
        raise UserError(f'launch.gpus: {reason}; install a PyTorch built for this driver, or choose "cpu"')


def end_with_parent() -> int:
    """Make the kernel send SIGTERM when the parent (a supervisor) dies; return the parent's pid.

    Exit the process if the parent has died since `note_parent`.
    """
    parent = note_parent()
    prctl.end_with_parent(parent)
    return parent


def note_parent() -> int:
    """Return the pid of the parent when this process first called this function, even if the parent has died since."""
    return _parent_of(os.getpid())


@functools.cache
def _parent_of(_: int) -> int:
    # The cache has the process's pid as its key, because a forked process has another parent.
    return os.getppid()


def hold_signals() -> None:
    """Block `STOP_SIGNALS`, since a thread waits for them; ignore SIGINT and SIGHUP, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Block the signals before torch starts threads, which inherit the mask. A signal to an unmasked thread would kill
    # the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _stop_on_sigterm(
    stop: threading.Event, progress: RunProgress, stuck_after_s: float, parent: int, first: Path | None = None
) -> None:
    """Start a thread that waits for `STOP_SIGNALS`; a handler would not run while the main thread waits for a peer."""
    arguments = (stop, progress, stuck_after_s, parent, first)
    threading.Thread(target=_await_sigterm, args=arguments, name="sigterm", daemon=True).start()


def _await_sigterm(
    stop: threading.Event, progress: RunProgress, stuck_after_s: float, parent: int, first: Path | None
) -> None:
    """Request a stop at each stop signal; after the first signal, watch for stuck or orphaned training."""
    signal.sigwait(STOP_SIGNALS)
    stop.set()
    arguments = (progress, stuck_after_s, parent, first)
    threading.Thread(target=_end_if_stuck, args=arguments, name="stuck", daemon=True).start()
    while True:
        signal.sigwait(STOP_SIGNALS)
        stop.set()


def _end_if_stuck(progress: RunProgress, stuck_after_s: float, parent: int, first: Path | None) -> None:
    """Wait until training is stuck or orphaned, then exit the process."""

    def is_alone() -> bool:
        """Return whether the supervisor is gone and no progress would be lost if this process exits.

        No progress is lost before the first step, or if rank 0 (the rank that saves checkpoints) is gone too. Waiting
        for the other orphaned ranks could be futile, because they may have died before all ranks joined. This condition
        is polled because the parent-death signal can arrive when one of the parent's threads exits, a moment before the
        process is gone.
        """
        return os.getppid() != parent and (progress.place[0] == "starting" or _is_gone(first))

    wait_until_stuck(progress, stuck_after_s, is_alone)
    phase, step = progress.place
    if is_alone():
        _leave(f"its supervisor is gone{' before training started' if phase == 'starting' else ', and so is rank 0'}")
    _leave(f"asked to stop, but stuck for {stuck_after_s:g} s at step {step} ({phase})")


def _is_gone(first: Path | None) -> bool:
    """Return whether rank 0's process is known to have exited; return False if the process is on another host."""
    process = read_json(first, ProcessRef) if first else None
    return process is not None and process.is_gone


def _leave(reason: str) -> NoReturn:
    """Print the reason and exit the process with a failure code."""
    complain(f"{reason}\n")
    os._exit(EXIT_FAILED)


def wait_until_stuck(progress: RunProgress, after_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
    """Return once the step and the phase have not changed for `after_s` seconds, or once `is_over()` is true.

    Time spent saving, mirroring or waiting for disk space is not limited.
    """
    place, since = progress.place, time.monotonic()
    while time.monotonic() - since < after_s and not is_over():
        time.sleep(min(0.5, after_s / 4))
        if progress.place != place or may_take_long(place[0]):
            place, since = progress.place, time.monotonic()


def report(file: Path, error: BaseException) -> None:
    """Write the error to a file for the supervisor, and one line about it to the log."""
    sentence = _sentence(error)
    report = {"error": sentence, "traceback": "".join(traceback.format_exception(error))}
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps(report, indent=2) + "\n")
    complain(f"{printable_lines(sentence)}\n")


def _sentence(error: BaseException) -> str:
    """Return an error as one line for the user."""
    if isinstance(error, UserError):
        return str(error)
    # NCCL puts "out of memory" in the middle of its message.
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error):
        return "train.batch_size: the GPU has too little free memory; lower train.batch_size or sae.d_sae"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
