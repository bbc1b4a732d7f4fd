"""Runs one rank: sets up its signals, device, seed and process group, then trains or extracts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.contract import prctl
from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json, write_json
from trainer.contract.output import complain
from trainer.contract.paths import RunPaths, refuse_link
from trainer.contract.planning.gpu_vendors import is_slice_by_name, refusal_of_slices
from trainer.contract.planning.plan import Plan
from trainer.contract.planning.workload import steps_of, with_model_gpus
from trainer.contract.printable import printable_lines
from trainer.contract.process import STOP_SIGNALS, ProcessRef
from trainer.contract.runs.checkpoint_manifest import Position, position_of
from trainer.contract.runs.lock import hold
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RankSpec
from trainer.contract.runs.run_job import load_any_run_job
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import AnyJob
from trainer.contract.settings.sources import DataShape
from trainer.contract.settings.toml import read_own_text
from trainer.contract.store.metrics_store import COMPILING, WAITING, Heartbeat, SeriesWriter, is_before_first_step
from trainer.ranks import staging
from trainer.ranks.environment import write_environment
from trainer.ranks.loading import load_trainer
from trainer.ranks.patience import patience_s

if TYPE_CHECKING:
    import torch

    from trainer.parallel.process_group import World
    from trainer.reporting.progress import RunProgress

# A rank that was asked to stop and makes no progress for this long is stuck.
STUCK_AFTER_S = 60.0
# Kernels from the cache load within a second; only report compilation that takes longer.
SLOW_S = 2.0


def main(spec: RankSpec, job: AnyJob | None = None) -> NoReturn:
    """Run the rank that the environment variable RANK names, and end the process with its exit code."""
    code = run(spec, int(os.environ.get("RANK", "0")), job)
    # The disk of the log may be full.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Skip PyTorch's shutdown: it takes a second of CPU time and would delay a stop and the next job.
    os._exit(code)


def run(spec: RankSpec, rank: int, job: AnyJob | None = None, on_met: Callable[[], object] = lambda: None) -> int:
    """Run one rank of an attempt and return its exit code; exit the process if it fails.

    Pass `job` if this host may not see the run's folder yet. `on_met` is called once all ranks have joined.
    """
    stop = threading.Event()
    parent = end_with_parent()
    _hold_signals()
    hold(RunPaths(spec.run_dir).lock_file)
    try:
        return EXIT_FINISHED if _train(spec, rank, stop, parent, job, on_met) else EXIT_STOPPED
    except BaseException as error:
        _report(RunPaths(spec.run_dir).rank_exit(spec.attempt, rank), error)
        # Tearing down a process group whose peers are gone, or a GPU that hangs, can take minutes.
        os._exit(EXIT_FAILED)


def _train(
    spec: RankSpec,
    rank: int,
    stop: threading.Event,
    parent: int,
    job: AnyJob | None,
    on_met: Callable[[], object],
) -> bool:
    """Train or extract; return True if the run is finished, False if it stopped with a checkpoint."""
    from trainer.reporting.progress import RunProgress

    paths = RunPaths(spec.run_dir)
    job = job or load_any_run_job(paths.job_file, read=read_own_text)
    if isinstance(job, JobConfig):
        job = with_model_gpus(job, spec.n_devices, spec.model_gpus)
    finish = threading.Event()
    progress = _reporting(spec, job, paths, stop, finish) if rank == 0 else RunProgress()
    try:
        # While rank 0 saves, the other ranks wait in the next step; if it fails, they end too.
        others_s = patience_s(job, spec.world_size)
        first = paths.first_rank(spec.attempt)
        if rank == 0 and isinstance(job, JobConfig):
            with contextlib.suppress(OSError):
                write_json(first, ProcessRef.current())
        _stop_on_sigterm(stop, progress, STUCK_AFTER_S if rank == 0 else others_s, parent, first)
        return _run(spec, rank, job, paths, progress, stop, finish, on_met, others_s)
    except BaseException as error:
        progress.event("failed", _sentence(error), "error")
        raise
    finally:
        progress.close()


def _reporting(
    spec: RankSpec, job: AnyJob, paths: RunPaths, stop: threading.Event, finish: threading.Event
) -> RunProgress:
    """Return the progress writer of rank 0, for the run's store and the mirrors configured in the job."""
    from trainer.reporting.mirroring import with_mirrors

    progress = _progress(spec, job, paths, stop, finish)
    if not isinstance(job, JobConfig):
        return progress
    begins = _begins_at(spec, 0)
    return with_mirrors(progress, job, paths.root, begins.step if begins else 0)


def _progress(
    spec: RankSpec, job: AnyJob, paths: RunPaths, stop: threading.Event, finish: threading.Event
) -> RunProgress:
    """Return a progress writer for the run's store or, if the store is on another host, for a file.

    For a resumed run, delete the history after the step at which it resumes.
    """
    from trainer.reporting.jsonl_file import FileRequests, LineFile
    from trainer.reporting.progress import Requests, StoredProgress

    # Extractions keep their history: they continue after the last shard.
    is_training = isinstance(job, JobConfig)
    total_steps = steps_of(job, spec.n_devices)
    at = _begins_at(spec, total_steps) if is_training and paths.metrics_db.exists() else None
    by_files = FileRequests(paths.stop_file(spec.attempt), paths.finish_file(spec.attempt))
    if spec.by_files:
        return StoredProgress(LineFile(paths.progress_file(spec.attempt), at), total_steps, stop, by_files, finish)
    if at:
        # An unusable store loses metrics but must not fail the run.
        with contextlib.suppress(Exception), contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
            writer.rewind(at)
    requests = by_files if spec.control_db is None or spec.job_id is None else Requests(spec.control_db, spec.job_id)
    return StoredProgress(paths.metrics_db, total_steps, stop, requests, finish, paths.rank_spec(spec.attempt))


def _begins_at(spec: RankSpec, total_steps: int) -> Heartbeat | None:
    """Return a heartbeat for the step at which the run begins; None if the checkpoint cannot be read."""
    with contextlib.suppress(Exception):
        at = position_of(spec.resume_from) if spec.resume_from else Position(0, 0)
        return Heartbeat("resuming", at.step, total_steps, at.tokens, time.time())
    return None


def _run(
    spec: RankSpec,
    rank: int,
    job: AnyJob,
    paths: RunPaths,
    progress: RunProgress,
    stop: threading.Event,
    finish: threading.Event,
    on_met: Callable[[], object],
    patience_s: float,
) -> bool:
    """Connect to the other ranks and train; this process is one rank or, with threads, all ranks."""
    attempt = paths.attempt(spec.attempt)
    if isinstance(job, ExtractJob):
        from trainer.ranks.extraction_rank import PEERS, extract_rows

        if rank == 0:
            write_environment(attempt / "environment.json")
        device, folder = rank_device(spec, _local_rank()), attempt / _once_each_start(spec, PEERS)
        return extract_rows(job, rank, spec.n_processes, device, folder, progress, stop)
    load_trainer()
    import torch

    from trainer.parallel.process_group import World, join
    from trainer.parallel.threads import Threads, on_all
    from trainer.parallel.waiting import waiting

    refuse_slice(spec, _local_rank())
    torch.manual_seed(job.train.seed)
    if rank == 0:
        write_environment(attempt / "environment.json")
    if not spec.as_one_process:
        device, meeting_place = rank_device(spec, _local_rank()), meeting_place_of(spec, attempt)
        if meeting_place:
            refuse_link(meeting_place)
        patience = timedelta(seconds=patience_s)
        set_order_of_sums(job.train.deterministic)

        def give_up(reason: str) -> None:
            _report(paths.rank_exit(spec.attempt, rank), UserError(reason))
            os._exit(EXIT_FAILED)

        def start_again() -> None:
            if stop.is_set():
                os._exit(EXIT_STOPPED)
            staging.restart(give_up, on_one_host=spec.on_one_host)

        world = join(
            device,
            rank,
            spec.world_size,
            meeting_place,
            on_one_host=spec.on_one_host,
            patience=patience,
            on_hang=start_again,
            attempt="staged" if staging.is_staged() else "",
        )
        on_met()
        if staging.is_staged():
            _report_staged(spec, progress)
        return _train_with(world, spec, job, paths, progress, stop, finish, model_devices(spec, _local_rank()))

    def of_thread(group: Threads) -> bool:
        from trainer.reporting import rank_log
        from trainer.reporting.progress import RunProgress

        rank_log.muted.is_on = group.index > 0
        device = rank_device(spec, group.index)
        group.waiting = waiting(device)
        world = World(device, group, group.waiting)
        return _train_with(world, spec, job, paths, RunProgress() if group.index else progress, stop, finish)

    return on_all(spec.world_size, of_thread)[0]


def _train_with(
    world: World,
    spec: RankSpec,
    job: JobConfig,
    paths: RunPaths,
    progress: RunProgress,
    stop: threading.Event,
    finish: threading.Event,
    own_devices: Sequence[torch.device] = (),
) -> bool:
    from trainer.activations.base import StreamSource
    from trainer.activations.open_source import open_source
    from trainer.evaluation.at_end import Cards
    from trainer.parallel.arrange import arrange
    from trainer.training.loop import Trainer

    source = open_source(job)
    if isinstance(source, StreamSource):
        source.own_devices = own_devices
    shape = DataShape(source.d_in, source.d_out, source.n_tokens)
    settled, parallel, plan = arrange(world, job, shape, spec.box_file, spec.may_take_bytes, spec.model_gpus_why)
    if world.device.type == "cuda":
        _compile(world, spec, settled, progress)
    if parallel.is_main:
        _tell_plan(plan, paths.attempt(spec.attempt) / "plan.json", progress)
    trainer = Trainer(
        settled,
        source=source,
        parallel=parallel,
        progress=progress,
        stop=stop,
        checkpoints=paths.checkpoints,
        output=spec.output_dir,
        resume_from=spec.resume_from,
        expected_step_s=plan.step_s,
        tries_batch=job.train.batch_size == "auto",
        finish=finish,
    )
    if parallel.is_main:
        # If a shard that is cut short kills the process, the parent uses this to find out which one it was.
        with contextlib.suppress(OSError):
            write_json(paths.data_record(spec.attempt), trainer.record)
    finished = trainer.run()
    if finished:
        Cards(trainer, settled, source, parallel, progress, stop).write()
    world.close()
    return finished


class Compiling:
    """Reports the kernels that Triton compiles before the first step of a run that begins at `step`."""

    def __init__(self, progress: RunProgress, step: int, tokens: int) -> None:
        self._progress, self._step, self._tokens, self._said = progress, step, tokens, time.monotonic()

    def begin(self, number: int) -> None:
        """Report that kernel `number` is compiling; do nothing once training has begun, when steps show progress."""
        from trainer.reporting import rank_log
        from trainer.runtime.triton_kernels import n_kernels

        if not (self._progress.place[0] == "starting" or is_before_first_step(self._progress.place[0])):
            return
        of_all = f"{number} of {n_kernels()}" if number <= n_kernels() else f"{number}"
        self._progress.heartbeat(f"{COMPILING}, {of_all}", self._step, self._tokens)
        if time.monotonic() - self._said > SLOW_S:
            self._said = time.monotonic()
            rank_log.say(f"compiling {of_all} kernels, first time on this machine")


def _compile(world: World, spec: RankSpec, job: JobConfig, progress: RunProgress) -> None:
    """Compile and try all kernels before the first step, with a heartbeat for each.

    The first time on a machine this takes one or two minutes, and without heartbeats the run would appear to hang. The
    first step compiles some more kernels for its tensor sizes.
    """
    from trainer.parallel.same_kernels import agree
    from trainer.runtime.triton_kernels import report_compiling

    if world.group.index == 0:
        at = _begins_at(spec, 0)
        report_compiling(Compiling(progress, at.step if at else 0, at.tokens if at else 0).begin)
    agree(
        world.group,
        world.device,
        job,
        compiles=(world.group.index if spec.as_one_process else _local_rank()) == 0,
        report=lambda words: progress.event("kernels", words, "warning"),
    )


def _tell_plan(plan: Plan, file: Path, progress: RunProgress) -> None:
    """Write the plan to the attempt's folder, the run's history and the log; failures do not stop the run."""
    from trainer.reporting import rank_log

    with contextlib.suppress(OSError):
        write_json(file, plan)
    if plan.ranks > 1 or plan.model_gpus or plan.model_share:
        progress.event("plan", plan.sentence())
        rank_log.say(f"plan: {plan.sentence()}")


def _report_staged(spec: RankSpec, progress: RunProgress) -> None:
    """Report that transfers go through host memory, and record that for later jobs."""
    # Cluster nodes would write to the file of the host that submitted the job.
    if spec.by_files or not spec.box_file:
        progress.event("staged", staging.SENTENCE, "warning")
        return
    progress.event("staged", f"{staging.SENTENCE}, {staging.LATER}", "warning")
    if _local_rank() == 0:
        staging.remember(spec.box_file)


def meeting_place_of(spec: RankSpec, attempt: Path) -> Path | None:
    """Return the rendezvous file of the ranks, a new one for each start; None under torchrun."""
    return attempt / _once_each_start(spec, "rendezvous") if spec.by_files or spec.on_one_host else None


def _once_each_start(spec: RankSpec, name: str) -> str:
    """Return a name in the attempt's folder that changes whenever a cluster restarts the same attempt."""
    if staging.is_staged():
        # The process may have left the file locked before its restart.
        name = f"{name}-staged"
    if not spec.by_files:
        return name
    return "-".join([name, os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")])


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def set_order_of_sums(deterministic: bool) -> None:
    """Make NCCL use rings only, if `deterministic`; call it before NCCL loads.

    By default NCCL chooses rings, trees or switches by message size, and these round differently.
    """
    if deterministic:
        os.environ.setdefault("NCCL_ALGO", "Ring")


def rank_device(spec: RankSpec, local_rank: int) -> torch.device:
    """Return the device of this rank and make it the current device of this thread.

    Raise `UserError` if PyTorch sees too few GPUs.
    """
    import torch

    if spec.device != "cuda":
        return torch.device("cpu")
    # srun and wrappers of torchrun may make only one GPU visible to each rank; NCCL refuses ranks that share a GPU.
    index = 0 if not spec.gpu_uuids and not spec.as_one_process and torch.cuda.device_count() == 1 else local_rank
    _require_gpu(index, f"rank {local_rank} has none")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def refuse_slice(spec: RankSpec, local_rank: int) -> None:
    """Raise `UserError` if this rank would exchange tensors with other ranks from a MIG slice.

    GPUs assigned by torchrun and SLURM were not checked earlier. CUDA shows a process only one slice, regardless of its
    local rank, so the device index is limited to the visible ones.
    """
    import torch

    n_gpus = torch.cuda.device_count() if spec.device == "cuda" else 0
    if n_gpus == 0:
        return
    is_cut = is_slice_by_name(torch.cuda.get_device_properties(min(local_rank, n_gpus - 1)).name)
    if refusal := refusal_of_slices([(local_rank, is_cut)] * spec.n_devices):
        raise UserError(f"launch.gpus: {refusal}")


def model_devices(spec: RankSpec, local_rank: int) -> list[torch.device]:
    """Return the devices reserved for this rank's language model.

    Raise `UserError` if PyTorch sees too few GPUs.
    """
    import torch

    gpus = spec.model_gpus_of(local_rank)
    if spec.device != "cuda":
        return [torch.device("cpu") for _ in gpus]
    for gpu in gpus:
        _require_gpu(gpu, f"the language model of rank {local_rank} lacks one")
    return [torch.device("cuda", gpu) for gpu in gpus]


def _require_gpu(index: int, lack: str) -> None:
    """Raise `UserError` if PyTorch sees no GPU with this index; `lack` ends the message."""
    import torch

    if index >= (n_gpus := torch.cuda.device_count()):
        reason = f"PyTorch {torch.__version__} sees {n_gpus} GPUs, so {lack}"
        raise UserError(f'launch.gpus: {reason}; install a PyTorch built for this driver, or choose "cpu"')


def end_with_parent() -> int:
    """Ask the kernel for SIGTERM when the parent, a supervisor, dies; return the parent's pid."""
    parent = os.getppid()
    prctl.end_with_parent(parent)
    return parent


def _hold_signals() -> None:
    """Block `STOP_SIGNALS`, since a thread waits for them; ignore SIGINT and SIGHUP, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Must run before torch starts threads, which inherit this mask: an unmasked thread would let the signal kill us.
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
    """Request a stop at each stop signal; after the first, watch for training that is stuck or orphaned."""
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
        """Return whether the supervisor is gone and ending loses nothing.

        Nothing is lost before the first step, or if rank 0, which saves, is gone too: other orphaned ranks may have
        died before all ranks joined. Poll, since the parent-death signal can come when one of the parent's threads
        ends, a moment before the process is gone.
        """
        return os.getppid() != parent and (progress.place[0] == "starting" or _is_gone(first))

    wait_until_stuck(progress, stuck_after_s, is_alone)
    phase, step = progress.place
    if is_alone():
        _leave(f"its supervisor is gone{' before it began to train' if phase == 'starting' else ', and so is rank 0'}")
    _leave(f"asked to stop, but stuck for {stuck_after_s:g} s at step {step} ({phase})")


def _is_gone(first: Path | None) -> bool:
    """Return whether the process of rank 0 is known to have ended; False if it runs on another host."""
    process = read_json(first, ProcessRef) if first else None
    return process is not None and process.is_gone


def _leave(reason: str) -> NoReturn:
    """Print the reason and exit the process as failed."""
    complain(f"{reason}\n")
    os._exit(EXIT_FAILED)


def wait_until_stuck(progress: RunProgress, after_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
    """Return once step and phase have not changed for `after_s` seconds, or once `is_over()` is true.

    Saving and waiting for disk space are not limited.
    """
    place, since = progress.place, time.monotonic()
    while time.monotonic() - since < after_s and not is_over():
        time.sleep(min(0.5, after_s / 4))
        if progress.place != place or place[0] in ("saving", WAITING):
            place, since = progress.place, time.monotonic()


def _report(file: Path, error: BaseException) -> None:
    """Write the error to a file for the supervisor and one line to the log."""
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
