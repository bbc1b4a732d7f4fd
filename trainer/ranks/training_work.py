"""A training rank's work: join the other ranks, train, and write the report cards at the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.contract.errors import JobFileError, UserError
from trainer.contract.json_file import write_json
from trainer.contract.paths import refuse_link
from trainer.contract.planning.gpu_vendors import is_slice_by_name, refusal_of_slices
from trainer.contract.planning.hardware import CPU
from trainer.contract.planning.memory import checkpoint_bytes
from trainer.contract.planning.plan import Plan
from trainer.contract.planning.workload import Workload, with_model_gpus
from trainer.contract.runs.checkpoint_manifest import Position, position_of
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_STOPPED, RankSpec
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import COMPILING, Heartbeat, is_before_first_step
from trainer.ranks import staging
from trainer.ranks.environment import write_environment
from trainer.ranks.loading import load_trainer
from trainer.ranks.rank import LEAST_PATIENCE_S, RankWork, local_rank, once_each_start, rank_device, report, require_gpu

if TYPE_CHECKING:
    import threading

    import torch

    from trainer.parallel.process_group import World
    from trainer.parallel.threads import Threads
    from trainer.reporting.progress import RunProgress
    from trainer.training.checkpoint_mirroring import CheckpointMirroring

# The delay, in seconds, before compilation is reported. Cached kernels load within a second.
SLOW_S = 2.0
# The assumed write speed of a busy network file system, in bytes per second.
_WRITTEN_PER_S = 50e6


class TrainingWork(RankWork[JobConfig]):
    """A training process's work; the process is one rank or, with threads, all ranks."""

    first_saves = True

    def __init__(
        self, spec: RankSpec, rank: int, job: JobConfig, stop: threading.Event, on_met: Callable[[], object]
    ) -> None:
        super().__init__(spec, rank, with_model_gpus(job, spec.n_devices, spec.model_gpus), stop, on_met)
        self.patience_s = patience_s(self.job, spec.world_size)
        self._mirroring: CheckpointMirroring | None = None

    def progress(self, at: Heartbeat | None = None) -> RunProgress:
        """Return a writer for the run's store and mirrors; a resumed run replaces the history after its checkpoint."""
        from trainer.reporting.mirroring import with_mirrors

        at = _begins_at(self.spec, self.total_steps) if self.paths.metrics_db.exists() else None
        begins = _begins_at(self.spec, 0)
        return with_mirrors(super().progress(at), self.job, self.paths.root, begins.step if begins else 0)

    def run(self, progress: RunProgress) -> bool:
        load_trainer()
        import torch

        refuse_slice(self.spec, local_rank())
        torch.manual_seed(self.job.train.seed)
        if self.rank == 0:
            write_environment(self.attempt / "environment.json")
            self._mirroring = self._open_mirror(progress)
        return self._as_threads(progress) if self.spec.as_one_process else self._as_rank(progress)

    def _open_mirror(self, progress: RunProgress) -> CheckpointMirroring | None:
        """Check the mirror of the checkpoints before training, and return it; None if the job has none."""
        if not self.job.train.mirror_checkpoints:
            return None
        from trainer.training.checkpoint_mirroring import CheckpointMirroring

        mirroring = CheckpointMirroring(self.spec, self.job, progress)
        mirroring.start()
        return mirroring

    def _as_rank(self, progress: RunProgress) -> bool:
        """Connect to the other ranks and train."""
        from trainer.parallel.process_group import join

        spec = self.spec
        device, meeting_place = rank_device(spec, local_rank()), meeting_place_of(spec, self.attempt)
        if meeting_place:
            refuse_link(meeting_place)
        set_order_of_sums(self.job.train.deterministic)
        world = join(
            device,
            self.rank,
            spec.world_size,
            meeting_place,
            on_one_host=spec.on_one_host,
            patience=timedelta(seconds=self.patience_s),
            on_hang=self._start_again,
            attempt="staged" if staging.is_staged() else "",
        )
        self.on_met()
        if staging.is_staged():
            _report_staged(spec, progress)
        return self._train(world, progress, model_devices(spec, local_rank()))

    def _start_again(self) -> None:
        """Restart this process with transfers through host memory, since the GPUs cannot reach each other directly."""
        if self.stop.is_set():
            os._exit(EXIT_STOPPED)
        staging.restart(self._give_up, on_one_host=self.spec.on_one_host)

    def _give_up(self, reason: str) -> None:
        report(self.paths.rank_exit(self.spec.attempt, self.rank), UserError(reason))
        os._exit(EXIT_FAILED)

    def _as_threads(self, progress: RunProgress) -> bool:
        """Train with one thread per rank."""
        from trainer.parallel.process_group import World
        from trainer.parallel.threads import on_all
        from trainer.parallel.waiting import waiting

        def of_thread(group: Threads) -> bool:
            from trainer.reporting import rank_log
            from trainer.reporting.progress import RunProgress

            rank_log.muted.is_on = group.index > 0
            device = rank_device(self.spec, group.index)
            group.waiting = waiting(device)
            return self._train(World(device, group, group.waiting), RunProgress() if group.index else progress)

        return on_all(self.spec.world_size, of_thread)[0]

    def _train(self, world: World, progress: RunProgress, own_devices: Sequence[torch.device] = ()) -> bool:
        from trainer.activations.base import StreamSource
        from trainer.activations.open_source import open_source, shape_for_saes
        from trainer.evaluation.at_end import Cards
        from trainer.evaluation.watching import watch
        from trainer.parallel.arrange import arrange
        from trainer.training.loop import Trainer

        spec, paths = self.spec, self.paths
        source = open_source(self.job)
        if isinstance(source, StreamSource):
            source.own_devices = own_devices
        shape = shape_for_saes(source, self.job)
        settled, parallel, plan = arrange(
            world, self.job, shape, spec.box_file, spec.may_take_bytes, spec.model_gpus_why
        )
        if world.device.type == "cuda":
            _compile(world, spec, settled, progress)
        if parallel.is_main:
            _tell_plan(plan, self.attempt / "plan.json", progress)
        trainer = Trainer(
            settled,
            source=source,
            parallel=parallel,
            progress=progress,
            stop=self.stop,
            checkpoints=paths.checkpoints,
            output=spec.output_dir,
            resume_from=spec.resume_from,
            expected_step_s=plan.step_s,
            tries_batch=self.job.train.batch_size == "auto",
            finish=self.finish,
        )
        if parallel.is_main:
            # If a truncated shard kills the process, the parent uses this record to find out which shard it was.
            with contextlib.suppress(OSError):
                write_json(paths.data_record(spec.attempt), trainer.record)
        mirroring = self._mirroring if parallel.is_main else None
        if mirroring:
            trainer.call_when_saved(mirroring.saved)
        watch(trainer, settled, source, parallel, progress, paths.root)
        finished = trainer.run()
        if finished:
            Cards(trainer, settled, source, parallel, progress, self.stop).write()
        world.close()
        if mirroring:
            mirroring.finish(spec.output_dir if finished else None, self.stop, trainer.position)
        return finished


def patience_s(job: JobConfig, world_size: int) -> float:
    """Return how long ranks wait for a busy rank, in s: enough for a checkpoint, and at least `LEAST_PATIENCE_S`."""
    try:
        # Assume a CPU: checkpoints are larger there, because moments are in fp32 by default.
        work = Workload(job, world_size, job.data_shape(), CPU)
    except JobFileError:  # The ranks report this error themselves.
        return LEAST_PATIENCE_S
    return max(LEAST_PATIENCE_S, checkpoint_bytes(work) / _WRITTEN_PER_S)


def _begins_at(spec: RankSpec, total_steps: int) -> Heartbeat | None:
    """Return a heartbeat for the run's starting step, or None if the checkpoint cannot be read."""
    with contextlib.suppress(Exception):
        at = position_of(spec.resume_from) if spec.resume_from else Position(0, 0)
        return Heartbeat("resuming", at.step, total_steps, at.tokens, time.time())
    return None


class Compiling:
    """Reports the kernels that Triton compiles before the first step of a run that starts at `step`."""

    def __init__(self, progress: RunProgress, step: int, tokens: int) -> None:
        self._progress, self._step, self._tokens, self._said = progress, step, tokens, time.monotonic()

    def begin(self, number: int) -> None:
        """Report that kernel `number` is compiling; do nothing once training has started, since steps show progress."""
        from trainer.reporting import rank_log
        from trainer.runtime.triton_kernels import n_kernels

        if not (self._progress.place[0] == "starting" or is_before_first_step(self._progress.place[0])):
            return
        of_all = f"{number} of {n_kernels()}" if number <= n_kernels() else f"{number}"
        self._progress.heartbeat(f"{COMPILING}, {of_all}", self._step, self._tokens)
        if time.monotonic() - self._said > SLOW_S:
            self._said = time.monotonic()
            rank_log.say(f"compiling kernel {of_all} for the first time on this machine")


def _compile(world: World, spec: RankSpec, job: JobConfig, progress: RunProgress) -> None:
    """Compile and try all kernels before the first step, with a heartbeat for each.

    The first time on a machine, this takes one or two minutes, and without heartbeats, the run would appear to hang.
    The first step compiles a few more kernels for its tensor sizes.
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
        compiles=(world.group.index if spec.as_one_process else local_rank()) == 0,
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
    # Do not record this on a cluster: its nodes would write to the submitting host's file.
    if spec.by_files or not spec.box_file:
        progress.event("staged", staging.SENTENCE, "warning")
        return
    progress.event("staged", f"{staging.SENTENCE}, {staging.LATER}", "warning")
    if local_rank() == 0:
        staging.remember(spec.box_file)


def meeting_place_of(spec: RankSpec, attempt: Path) -> Path | None:
    """Return the ranks' rendezvous file, which is new for each start, or None under torchrun."""
    return attempt / once_each_start(spec, "rendezvous") if spec.by_files or spec.on_one_host else None


def set_order_of_sums(deterministic: bool) -> None:
    """Make NCCL use only rings if `deterministic` is True; call this before NCCL loads.

    By default, NCCL chooses rings, trees or switches depending on message size, and these algorithms round differently.
    """
    if deterministic:
        os.environ.setdefault("NCCL_ALGO", "Ring")


def refuse_slice(spec: RankSpec, local_rank: int) -> None:
    """Raise `UserError` if this rank would exchange tensors with other ranks from a MIG slice.

    GPUs assigned by torchrun or SLURM have not been checked before. CUDA exposes only one slice to a process,
    regardless of its local rank, so the device index is clamped to the visible devices.
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
        require_gpu(gpu, f"the language model of rank {local_rank} lacks one")
    return [torch.device("cuda", gpu) for gpu in gpus]
