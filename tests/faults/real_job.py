"""A job with real training processes, and methods that inject faults and check the guarantees afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.conftest import Box, wait_for

from sae_tui.jobs import edits
from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.resume import resume
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.reconcile import reconcile
from trainer.contract.process import ProcessRef
from trainer.contract.runs.checkpoint_manifest import damage, newest_first
from trainer.contract.store.metrics_store import Heartbeat, SeriesReader
from trainer.contract.store.rows import Job, Rank
from trainer.contract.store.states import JobState

# These GPUs are simulated: their leases and locks are real, but the ranks run on the CPU.
GPUS = ((0, "GPU-51a0-sim-0"), (1, "GPU-51a0-sim-1"))
START_S = 240.0
# How soon all of a killed job's processes must exit and its GPUs must be released, in seconds.
GONE_AFTER_S = 15.0
# Log every step, because a run stopped within a log interval averages over different steps than an undisturbed run.
SHORT = {"n_steps": 400, "log_every": 1, "eval_every": 0, "checkpoint_every": 50, "deterministic": True}
ENDLESS = SHORT | {"n_steps": 10**7}


Result = tuple[bytes, list[tuple[int, float | None]]]


class RealJob:
    """A job launched just as the app would launch it.

    `train` and `launch` contain settings of these sections; `place` contains the options `after` and `hold`.
    """

    def __init__(
        self,
        box: Box,
        n_ranks: int = 2,
        *,
        launch: Mapping[str, Any] | None = None,
        gpus: bool = True,
        start: launching.Start | None = None,
        place: Mapping[str, Any] | None = None,
        **train: Any,
    ) -> None:
        self.box = box
        self.began = time.monotonic()
        where = Placement("cpu", GPUS[:n_ranks] if gpus else (), n_ranks)
        config = box.config("job", **(launch or {})).replace("train", **(SHORT | train))
        gpu_source = "simulated" if gpus else "none"
        self.id = launching.launch(box.data, config, where, gpu_source=gpu_source, start=start, **place or {})
        self.paths = box.data.run(self.id)

    @property
    def row(self) -> Job:
        return self.box.job(self.id)

    @property
    def ranks(self) -> list[Rank]:
        """The ranks of the current attempt."""
        attempt = self.row.attempt
        return [rank for rank in self.box.control.ranks(self.id) if rank.attempt == attempt]

    @property
    def heartbeat(self) -> Heartbeat | None:
        run = LiveRun(self.paths)
        run.poll()
        run.close()
        return run.heartbeat

    @property
    def step(self) -> int:
        return self.heartbeat.step if self.heartbeat else 0

    def log(self, rank: int = 0) -> str:
        file = self.paths.log(rank)
        return file.read_text() if file.exists() else ""

    def processes(self) -> list[int]:
        """Return the pids of all processes whose command line names the data folder, except the queue process.

        They include processes that are not recorded.
        """
        folder, queue = os.fsencode(self.box.data.root), b"queue_process"
        return [pid for pid, line in _command_lines() if folder in line and queue not in line and pid != os.getpid()]

    # waiting

    def at_step(self, step: int) -> RealJob:
        wait_for(lambda: self.step >= step or self.row.state.is_final, f"step {step}", START_S)
        assert self.step >= step, f"{self.row.state} at step {self.step}: {self.row.error}"
        # On a busy machine, the ranks may take a step before the supervisor has read their state.
        wait_for(lambda: self.row.state != JobState.STARTING, "the job to leave the state starting", START_S)
        return self

    def with_ranks(self, n_ranks: int = 2) -> RealJob:
        """Wait until all ranks are recorded, which is long before they train."""
        wait_for(lambda: len(self.ranks) == n_ranks, f"{n_ranks} ranks", START_S)
        return self

    def ended(self, timeout_s: float = START_S) -> Job:
        return self.box.wait_ended(self.id, timeout_s)

    def mend(self) -> float:
        """Wait until the job has ended, has no processes and holds no GPUs, and return how many seconds this takes.

        Meanwhile, reconcile jobs as the app or a command would.
        """
        began = time.monotonic()
        while not (self.row.state.is_final and not self.processes() and self.is_free()):
            reconcile(self.box.data)
            taken = time.monotonic() - began
            assert taken < GONE_AFTER_S, f"after {taken:.0f} s: {self.row.state}, pids {self.processes()}"
            time.sleep(0.05)
        return time.monotonic() - began

    def is_free(self) -> bool:
        """Return whether another job could get the job's GPUs."""
        locks = GpuLocks(lock_folder(self.box.data, "simulated"), [uuid for _, uuid in GPUS])
        took = locks.take()
        locks.release()
        return took and not self.box.control.leases()

    # doing

    def kill(self, *ranks: int, supervisor: bool = False, number: signal.Signals = signal.SIGKILL) -> None:
        targets = [rank.process for rank in self.ranks if rank.rank in ranks]
        whole = [self.row.supervisor, *targets] if supervisor else targets
        for process in whole:
            if process:
                process.send(number)

    def stop(self) -> RealJob:
        edits.stop(self.box.data, self.id)
        return self

    def go_on(self) -> RealJob:
        resume(self.box.data, self.id, _nowhere_else)
        return self

    # results

    def result(self) -> Result:
        """Return the content of the job's SAE file, and the loss at every logged step."""
        weights = (self.box.data.sae(self.id) / "sae_weights.safetensors").read_bytes()
        with contextlib.closing(SeriesReader(self.paths.metrics_db)) as reader:
            return weights, [(point.step, point.value) for point in reader.points("loss")]

    def require_whole_checkpoints(self) -> None:
        """Check that the latest checkpoint, which a resume tries first, is complete."""
        checkpoints = newest_first(self.paths.checkpoints)
        assert checkpoints, "no checkpoint"
        assert damage(checkpoints[0]) is None, damage(checkpoints[0])

    def require(self, state: JobState, error: str | None = None) -> Job:
        """Check the job's state, and that its error contains `error`; return its row."""
        row = self.row
        assert row.state == state, f"{row.state}, not {state}: {row.error}; log: {self.log()[-400:]}"
        assert error is None or error in (row.error or ""), f"{error!r} is not in {row.error!r}"
        return row

    def require_same(self, other: Result) -> None:
        weights, losses = self.result()
        other_losses = [pair for pair in zip(losses, other[1], strict=False) if pair[0] != pair[1]]
        assert losses == other[1], f"{len(losses)} losses instead of {len(other[1])}: {other_losses[:3]}"
        assert weights == other[0], "the losses are equal but the weights differ"


def undisturbed(root: Path, n_ranks: int, **train: Any) -> Result:
    """Return the result of an undisturbed job with these settings."""
    with boxed(root) as box:
        job = RealJob(box, n_ranks, **train)
        job.ended()
        job.require(JobState.FINISHED)
        return job.result()


@contextlib.contextmanager
def boxed(root: Path) -> Iterator[Box]:
    """Yield a box with a data folder; end all its processes on exit."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root)
    try:
        yield box
    finally:
        for pid, line in _command_lines():
            process = ProcessRef.of(pid)
            if process and os.fsencode(box.data.root) in line and pid != os.getpid():
                process.send(signal.SIGKILL)
        box.end_everything()


def _command_lines() -> list[tuple[int, bytes]]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                lines.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return [(pid, line) for pid, line in lines if line]


def _nowhere_else(_config: object) -> Placement:
    raise AssertionError("a resumed job must keep its GPUs")
