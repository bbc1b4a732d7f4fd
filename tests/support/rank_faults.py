"""Faults injected into a forked rank before it starts: limited memory, an exit at a chosen step, a short timeout.

Each function's last argument is the rank number.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from trainer.activations.training_data import IndexedData
from trainer.checkpoints import checkpoint
from trainer.contract.errors import UserError
from trainer.contract.planning import step_time
from trainer.parallel import calibrate, process_group, rebalancer
from trainer.ranks import training_work
from trainer.training import loop


def starve(mib: int, starved: int, rank: int) -> None:
    """While the speed of the `starved` rank is measured, limit its memory to `mib` MiB more than it uses."""
    if rank == starved:
        calibration: Any = calibrate
        measure = calibration.measure

        def starving(*arguments: Any) -> Any:
            before = limit_memory(mib)
            try:
                return measure(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)

        calibration.measure = starving


def limit_memory(mib: int) -> tuple[int, int]:
    """Limit this process's address space to `mib` MiB more than it uses now; return the previous limits."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    match = re.search(r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(match[1]) + mib * 2**20, before[1]))
    return before


def write_log(folder: Path, rank: int) -> None:
    """Redirect the rank's standard output to the file `RANK.log`."""
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600), 1)


def log_in_little_memory(mib: int, starved: int, folder: Path, rank: int) -> None:
    """Limit the memory of the `starved` rank to `mib` MiB more than it uses at its start. Every rank writes a log."""
    write_log(folder, rank)
    if rank == starved:
        # With the default stack size, each new thread would allocate a block of 8 MiB.
        threading.stack_size(1 << 20)
        limit_memory(mib)


def die_in_step(step: int, rank: int) -> None:
    """Make the rank kill itself after `step` steps, before the next one."""
    trainer_class: Any = loop.Trainer
    take_step = trainer_class._train_step

    def dying(trainer: loop.Trainer) -> None:
        if trainer.position.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        take_step(trainer)

    trainer_class._train_step = dying


def die_in_save(step: int, rank: int) -> None:
    """Make the rank kill itself when it has written the tensors of this step's checkpoint, but not the manifest."""
    saving: Any = checkpoint
    write_json = saving.write_json

    def dying(file: Path, content: Any) -> None:
        if file.name == "manifest.json" and f"{step:08d}" in str(file):
            os.kill(os.getpid(), signal.SIGKILL)
        write_json(file, content)

    saving.write_json = dying


def share_anew_soon(rank: int) -> None:
    """Make the rank rebalance the shares after three log intervals, even if these are short."""
    rebalancer.PATIENCE_S = 0.0


def end_with_patience(rank: int) -> None:
    """Set the timeout to 5,000 s per rank; instead of connecting, raise an error that reports the timeout."""

    def join(*_: object, patience: timedelta, **__: object) -> None:
        raise UserError(f"the others wait {patience.total_seconds():.0f} s")

    of_rank: Any = training_work
    connecting: Any = process_group
    of_rank.patience_s = lambda job, world_size: 5000.0 * world_size
    connecting.join = join


class Reading(NamedTuple):
    """Makes each rank read either part of the rows or all rows, and write the sizes of its batches to COUNTS.RANK.

    The rank `failing` fails to read its batch number `fails_at`. Rank 0 requests a stop after `stops_after` steps.
    """

    parts: bool
    counts: str = ""
    fails_at: int = -1
    failing: int = -1
    stops_after: int = -1

    def __call__(self, rank: int) -> None:
        planning: Any = step_time
        planning.reads_parts = lambda *_: self.parts
        indexed_data: Any = IndexedData
        read, sizes = indexed_data.read, list[int]()

        def counting(data: IndexedData, *arguments: Any) -> Any:
            if rank == self.failing and len(sizes) == self.fails_at:
                raise UserError("data.path: the disk went away")
            rows = read(data, *arguments)
            sizes.append(len(rows.x))
            if self.counts:
                Path(self.counts).with_suffix(f".{rank}").write_text(json.dumps(sizes))
            return rows

        indexed_data.read = counting
        trainer_class: Any = loop.Trainer
        take_step = trainer_class._train_step

        def stopping(trainer: loop.Trainer) -> None:
            if trainer.position.step == self.stops_after and rank == 0:
                trainer._stop.set()
            take_step(trainer)

        trainer_class._train_step = stopping
