"""Whose turn it is: jobs in line and the cards there are, from which every supervisor draws the same conclusion.

By priority, then by age. A job that cannot start yet keeps the cards it will get first; others may use them until
then (back-fill), but only with an expected end in time, and only while it has not waited too long: so a job that
needs many cards waits no longer than that and the longest job that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sae_tui.jobs.wording import gigabytes, listed, plural
from trainer.contract.planning.visible import visible_indices
from trainer.contract.store.rows import Job, Lease

# From then on, nobody is let in before a job that waits.
BACKFILL_S = 3600.0


class Card(msgspec.Struct, frozen=True):
    """A GPU as a job in line sees it. `free_bytes` is what strangers leave, None where it is unknown.

    `unusable` and `stranger` are reasons that do not go away by waiting for jobs; `frees_in_s` is when they all end.
    """

    index: int
    uuid: str
    free_bytes: int | None = None
    unusable: str = ""
    stranger: str = ""
    leases: tuple[Lease, ...] = ()
    frees_in_s: float = 0.0

    def has_memory(self, job: Job) -> bool:
        """Whether the job would fit beside strangers alone; where that cannot be known, who named the card decides."""
        if self.free_bytes is None:
            return not job.any_gpus
        return job.card_memory_bytes is None or self.free_bytes >= job.card_memory_bytes

    def is_for(self, job: Job) -> bool:
        """Whether the job could have it once other jobs have ended."""
        wanted = job.any_gpus or self.uuid in job.gpu_uuids
        return wanted and not self.unusable and (job.shares_gpus or not self.stranger) and self.has_memory(job)

    def takes_now(self, job: Job) -> bool:
        if not self.leases:
            return True
        return job.shares_gpus and all(lease.shared for lease in self.leases) and self._has_room_beside_others(job)

    def _has_room_beside_others(self, job: Job) -> bool:
        taken = [lease.memory_bytes for lease in self.leases]
        if self.free_bytes is None or job.card_memory_bytes is None or None in taken:
            return False
        return self.free_bytes - sum(taken) >= job.card_memory_bytes  # type: ignore[arg-type]

    def given_to(self, job: Job) -> Card:
        """As it will be once a job ahead has taken it, which no process has done yet."""
        memory, in_s = job.card_memory_bytes, math.inf if job.expected_s is None else job.expected_s
        lease = Lease(
            host=job.host, gpu_uuid=self.uuid, gpu_index=self.index, job_id=job.id, user=job.user, pid=0, since=0.0,
            shared=job.shares_gpus, memory_bytes=memory,
        )  # fmt: skip
        return msgspec.structs.replace(self, leases=(*self.leases, lease), frees_in_s=max(self.frees_in_s, in_s))


class Turn(msgspec.Struct, frozen=True):
    """The cards that a job may take now, or what it waits for."""

    cards: tuple[Card, ...] = ()
    waits_for: str = ""


class _Kept(msgspec.Struct, frozen=True):
    """A card that is waited for: by whom, and until when others may use it."""

    job_id: int
    until_s: float


def in_order(line: Iterable[Job]) -> list[Job]:
    return sorted(line, key=lambda job: (-job.priority, job.queued or job.created, job.id))


def turns(line: Iterable[Job], cards: Iterable[Card], now: float) -> dict[int, Turn]:
    """For every job in line its cards or its reason to wait; `now` is in seconds since the epoch."""
    board = {card.uuid: card for card in sorted(cards, key=lambda card: card.index)}
    kept: dict[str, _Kept] = {}
    found: dict[int, Turn] = {}
    for job in in_order(line):
        visible = _visible(job, board)
        found[job.id] = turn = _turn(job, visible, kept)
        if turn.cards:
            board |= {card.uuid: card.given_to(job) for card in turn.cards}
        else:
            kept |= _keep(job, visible, kept, now)
    return found


def _visible(job: Job, board: Mapping[str, Card]) -> list[Card]:
    """The cards that the environment of its launch left to a job that takes any."""
    if not job.any_gpus:
        return list(board.values())
    indices = visible_indices(job.visible_devices, [(card.index, card.uuid) for card in board.values()])
    return [card for card in board.values() if card.index in indices]


def _turn(job: Job, cards: Sequence[Card], kept: Mapping[str, _Kept]) -> Turn:
    free = [card for card in cards if card.is_for(job) and card.takes_now(job) and _is_open(job, card, kept)]
    if len(free) < job.gpus_wanted:
        return Turn(waits_for=_reason(job, cards, kept))
    # A card that nobody waits for first, then the one with the most memory.
    free.sort(key=lambda card: (card.uuid in kept, -(card.free_bytes or 0), card.index))
    return Turn(tuple(sorted(free[: job.gpus_wanted], key=lambda card: card.index)))


def _is_open(job: Job, card: Card, kept: Mapping[str, _Kept]) -> bool:
    """Whether the job would be gone from the card before the one that waits for it could start."""
    if card.uuid not in kept:
        return True
    return job.expected_s is not None and job.expected_s <= kept[card.uuid].until_s


def _keep(job: Job, cards: Sequence[Card], kept: Mapping[str, _Kept], now: float) -> dict[str, _Kept]:
    """The cards this job will get first; none where it waits for strangers, whose end nobody knows."""
    possible = [card for card in cards if card.is_for(job) and card.uuid not in kept]
    if len(possible) < job.gpus_wanted:
        return {}
    possible.sort(key=lambda card: (_ready_in_s(job, card), card.index))
    chosen = possible[: job.gpus_wanted]
    starts_in_s = max((_ready_in_s(job, card) for card in chosen), default=0.0)
    waited_s = now - (job.queued or now)
    until_s = starts_in_s if waited_s < BACKFILL_S else 0.0
    return {card.uuid: _Kept(job.id, until_s) for card in chosen}


def _ready_in_s(job: Job, card: Card) -> float:
    return 0.0 if card.takes_now(job) else card.frees_in_s


def _reason(job: Job, cards: Sequence[Card], kept: Mapping[str, _Kept]) -> str:
    """`GPU 0 is held by job 3 (ann)`; of any GPUs all there are: `2 GPUs: GPU 0 is …, GPU 1 is …`."""
    wanted = [card for card in cards if job.any_gpus or card.uuid in job.gpu_uuids]
    missing = len(job.gpu_uuids) - len(wanted) if not job.any_gpus else 0
    said = [word for card in wanted if (word := _obstacle(job, card, kept))]
    if missing > 0:
        said.append(f"{plural(missing, 'GPU')} of it cannot be seen")
    few = "there are not so many here" if cards else "none can be seen"
    told = listed(list(dict.fromkeys(said))) if said else few
    return f"{plural(job.gpus_wanted, 'GPU')}: {told}" if job.any_gpus else told


def _obstacle(job: Job, card: Card, kept: Mapping[str, _Kept]) -> str:
    """Why the job cannot have this card now; nothing where it can."""
    if card.unusable:
        return f"GPU {card.index} cannot be used ({card.unusable})"
    if card.stranger and not job.shares_gpus:
        return f"GPU {card.index} is {card.stranger}"
    if not card.has_memory(job) and card.free_bytes is None:
        return f"GPU {card.index} does not tell its free memory; name it in launch.gpus to use it"
    if not card.has_memory(job):
        free, needed = gigabytes(card.free_bytes or 0), gigabytes(job.card_memory_bytes or 0)
        return f"GPU {card.index} has {free} free of {needed} needed"
    if not card.takes_now(job):
        holder = card.leases[0]
        if not holder.pid:
            return f"job {holder.job_id} was there first"
        alone = ", which does not share it" if job.shares_gpus and not holder.shared else ""
        return f"GPU {card.index} is held by job {holder.job_id} ({holder.user}){alone}"
    return "" if _is_open(job, card, kept) else f"job {kept[card.uuid].job_id} was there first"
