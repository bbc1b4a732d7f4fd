"""What a job comes to on the devices it is to have: its mode, what each rank takes, and whether that is there.

Whoever tells, checks or waits for the memory of a job asks here, so that all say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.planning import memory
from trainer.contract.planning.choose_mode import Settled
from trainer.contract.planning.forecast import NO_ROOM, Room, settled_on
from trainer.contract.planning.hardware import CPU, Box, slowest
from trainer.contract.planning.memory import gigabytes
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape

NOTHING_MEASURED = Box()


class Card(Protocol):
    """A GPU with its memory, free now and in all, None where it does not tell, and who is on it."""

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_free_bytes(self) -> int | None: ...
    @property
    def memory_total_bytes(self) -> int | None: ...
    @property
    def busy(self) -> str: ...


class Took(msgspec.Struct, frozen=True):
    """What a finished job of this shape took of a GPU."""

    job_id: int
    n_bytes: int


class Outlook(msgspec.Struct, frozen=True):
    """The job with its mode settled, and the memory there is for a rank of it.

    `lack` says what is missing now and `excess` what will ever be, empty where nothing is.
    """

    settled: Settled
    ranks: int
    on_gpus: bool
    is_measured: bool = False
    room: Room = NO_ROOM
    lack: str = ""
    excess: str = ""
    took: Took | None = None

    @property
    def mode(self) -> str:
        return self.settled.job.parallel.mode

    @property
    def needs_bytes(self) -> int:
        """Of each rank: the estimate, or what such a job was seen to take where that is more and is free.

        What is not free now may never be: PyTorch keeps more of a card than it needs where there is more.
        """
        estimate, free = self.settled.needs_bytes, self.room.free_bytes
        if self.took and estimate < self.took.n_bytes <= (self.took.n_bytes if free is None else free):
            return self.took.n_bytes
        return estimate

    def problems(self, job: JobConfig, shape: DataShape) -> list[Problem]:
        """Of `job` as it was written: an error where it can never run, a warning where it cannot now."""
        if self.excess:
            cure = self._cure(shape, self.room.total_bytes or 0, "larger GPUs")
            return [Problem(self._culprit(job, shape), f"{self.excess}; {cure}")]
        if self.lack:
            cure = self._cure(shape, self.room.free_bytes or 0, "other GPUs")
            return [Problem("launch.gpus", f"{self.lack}; {cure}", "warning")]
        if self.took and self.took.n_bytes > max(self.needs_bytes, self.room.free_bytes or 0):
            took, has = told_apart(self.took.n_bytes, self.room.free_bytes or 0)
            message = f"it has {has} free, and job {self.took.job_id} of this shape took {took} of a GPU"
            return [Problem("launch.gpus", message, "warning")]
        return []

    def _cure(self, shape: DataShape, room_bytes: int, others: str) -> str:
        """Settings with which the job would fit, each for itself; what to lower where none of them is enough."""
        job = self.settled.job
        fitting = memory.remedies(job, shape.d_in, self.ranks, room_bytes, shape.d_out) if self.on_gpus else []
        other = f", or choose {others}" if self.on_gpus else ""
        if fitting:
            return f"it fits with {' or '.join(fitting)}{other}"
        return "lower train.batch_size or sae.d_sae" + (", make the sweep smaller" if job.sweep else "") + other

    def _culprit(self, job: JobConfig, shape: DataShape) -> str:
        """The setting that takes most of it."""
        device = "cuda" if self.on_gpus else "cpu"
        parts = memory.estimate(self.settled.job, shape.d_in, self.ranks, d_out=shape.d_out, device=device)
        by_tokens = parts.activations + parts.communication
        if by_tokens > parts.weights + parts.gradients + parts.optimizer and job.train.batch_size != "auto":
            return "train.batch_size"
        return "sae.d_sae" if job.sae.d_sae else "sae.expansion_factor"


def outlook(
    job: JobConfig,
    shape: DataShape,
    ranks: int,
    cards: Sequence[Card],
    *,
    speeds: Box = NOTHING_MEASURED,
    cuda: bool = True,
    host: Room = NO_ROOM,
) -> Outlook:
    """What the job comes to, on those of `cards` that its launch.gpus names, or on the first of them for any.

    Without `cuda` they are simulated: processes of this host run there, which are as fast as those. `host` is what
    this machine has of memory, for processes on the CPU.
    """
    gpus, cards = job.launch.gpus, () if job.by_slurm else cards
    if str(gpus).startswith("cpu") or (gpus == "auto" and not cards and not job.by_slurm):
        return _in_processes(job, shape, ranks, speeds, NO_ROOM if job.by_slurm else host)
    named = isinstance(gpus, list)
    now = [card for card in cards if card.index in gpus] if named else list(cards[:ranks])
    ever = now if named else sorted(cards, key=lambda card: -(card.memory_total_bytes or 0))[:ranks]
    room = Room(_least(card.memory_free_bytes for card in now), _least(card.memory_total_bytes for card in ever))
    name = CPU if not cuda else slowest(card.name for card in now) if now else ""
    found, is_measured = settled_on(job, shape, speeds, name, ranks, room, "cuda")
    lack = excess = ""
    if _exceeds(found, room.free_bytes):
        lack = _lack(now, found.needs_bytes) if named else _lack_of_any(job, cards, ranks, found.needs_bytes)
    if _exceeds(found, room.total_bytes):
        excess = _excess(now if named else cards, ranks, found.needs_bytes, named=named)
    return Outlook(found, ranks, True, is_measured, room, lack, excess)


def _in_processes(job: JobConfig, shape: DataShape, ranks: int, speeds: Box, host: Room) -> Outlook:
    """On the CPU, where all ranks have the same memory."""
    room = Room(*(None if n_bytes is None else n_bytes // ranks for n_bytes in (host.free_bytes, host.total_bytes)))
    found, is_measured = settled_on(job, shape, speeds, CPU, ranks, room)
    needs, lack, excess = ranks * found.needs_bytes, "", ""
    if _exceeds(found, room.free_bytes):
        lack = "this machine has {1} free of {0} needed".format(*told_apart(needs, host.free_bytes or 0))
    if _exceeds(found, room.total_bytes):
        each = f" for {ranks} processes" if ranks > 1 else ""
        excess = "needs {0}{each}, and this machine has {1} in all".format(
            *told_apart(needs, host.total_bytes or 0), each=each
        )
    return Outlook(found, ranks, False, is_measured, room, lack, excess)


def _exceeds(found: Settled, room_bytes: int | None) -> bool:
    return room_bytes is not None and found.needs_bytes > room_bytes


def _lack_of_any(job: JobConfig, cards: Sequence[Card], ranks: int, needs_bytes: int) -> str:
    """`1 of 4 GPUs is free and has the 17.9 GB that it needs on 2`; nothing where there are enough."""
    free = [card for card in cards if job.launch.share or not card.busy]
    enough = sum(card.memory_free_bytes is None or card.memory_free_bytes >= needs_bytes for card in free)
    if enough >= ranks:
        return ""
    few = f"{enough} of {len(cards)} GPUs {'is' if enough == 1 else 'are'} free and {'has' if enough == 1 else 'have'}"
    each = f" on {ranks}" if ranks > 1 else ""
    return f"{few if enough else 'no GPU is free and has'} the {gigabytes(needs_bytes)} that it needs{each}"


def _lack(cards: Sequence[Card], needs_bytes: int) -> str:
    """`GPU 2 has 9.1 GB free of 17.9 GB needed`."""
    fullest = min(cards, key=lambda card: _or_inf(card.memory_free_bytes))
    has, needs = told_apart(fullest.memory_free_bytes or 0, needs_bytes)
    # What a driver or a desktop holds does not go away by waiting.
    nobody = "" if fullest.busy or fullest.memory_total_bytes is None else ", though nobody uses it"
    return f"GPU {fullest.index} has {has} free of {needs} needed{nobody}"


def _excess(cards: Sequence[Card], ranks: int, needs_bytes: int, *, named: bool) -> str:
    """`needs 17.9 GB on each of 3 GPUs, and GPU 2 has 10.0 GB in all`; of any GPUs how many have so much."""
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    if named:
        smallest = min(cards, key=lambda card: _or_inf(card.memory_total_bytes))
        needs, has = told_apart(needs_bytes, smallest.memory_total_bytes or 0)
        return f"needs {needs}{each}, and GPU {smallest.index} has {has} in all"
    enough = sum(card.memory_total_bytes is None or card.memory_total_bytes >= needs_bytes for card in cards)
    needs, has = told_apart(needs_bytes, max(card.memory_total_bytes or 0 for card in cards))
    return f"needs {needs}{each}, and " + (
        f"only {enough} of {len(cards)} have" if enough else f"the largest has {has}"
    )


def _or_inf(n_bytes: int | None) -> float:
    return math.inf if n_bytes is None else n_bytes


def told_apart(first: int, second: int) -> tuple[str, str]:
    """Two sizes in GB, with as many digits as it takes to see which one is more."""
    pairs = [(gigabytes(first, digits), gigabytes(second, digits)) for digits in (1, 2, 3)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _least(found: Iterable[int | None]) -> int | None:
    """Of those that tell it."""
    return min((n_bytes for n_bytes in found if n_bytes is not None), default=None)
