"""Arranges GPU processes for display: grouped by job, filtered, sorted, or as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sae_tui.gpu.processes import Ancestor, ProcessDetails
from sae_tui.jobs.gpus.availability import Holders
from sae_tui.jobs.output import kind_of
from trainer.contract.store.rows import Job


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A row in the process list: a process on a GPU, a job with its processes, or a parent process without a GPU.

    `depth` is the indentation level, and `n_below` is the number of grouped processes, all of them ranks if
    `groups_ranks`. For a job, `process` contains the totals over its processes and the pid 0.
    """

    key: str
    process: ProcessDetails
    depth: int = 0
    job: Job | None = None
    rank: int | None = None
    n_below: int = 0
    groups_ranks: bool = False
    is_open: bool = False
    is_parent: bool = False


@dataclass(frozen=True, slots=True)
class ProcessOrder:
    """A sort order: the value to sort by, and whether the largest value comes first."""

    value: Callable[[ProcessDetails], Any]
    largest_first: bool = True


# The sort orders by name, in the order of the columns, starting with the default.
ORDERS: Mapping[str, ProcessOrder] = {
    "memory": ProcessOrder(lambda one: one.memory_used_bytes),
    "SM": ProcessOrder(lambda one: one.sm_percent),
    "memory bandwidth": ProcessOrder(lambda one: one.bandwidth_percent),
    "encoder": ProcessOrder(lambda one: one.encoder_percent),
    "decoder": ProcessOrder(lambda one: one.decoder_percent),
    "CPU": ProcessOrder(lambda one: one.cpu_percent),
    "host memory": ProcessOrder(lambda one: one.host_memory_bytes),
    "run time": ProcessOrder(lambda one: None if one.started is None else -one.started),
    "command": ProcessOrder(lambda one: one.command and one.command.casefold(), largest_first=False),
    "pid": ProcessOrder(lambda one: one.pid, largest_first=False),
    "user": ProcessOrder(lambda one: one.user, largest_first=False),
    "GPU": ProcessOrder(lambda one: one.gpus, largest_first=False),
    "type": ProcessOrder(lambda one: one.kind, largest_first=False),
}


def arrange(
    processes: Iterable[ProcessDetails],
    held: Holders,
    *,
    words: str = "",
    order: str = "memory",
    is_reversed: bool = False,
    opened: frozenset[str] = frozenset(),
    as_tree: bool = False,
) -> list[ProcessRow]:
    """Return the process list rows; `opened` contains the keys of the jobs whose ranks are shown."""
    found = [one for one in processes if _matches(one, held, words.casefold().split())]
    if as_tree:
        groups = _in_order([[ProcessRow(f"pid:{one.pid}", one)] for one in found], order, is_reversed)
        return _tree([head.process for (head,) in groups], held)
    groups = _in_order(_folded(found, held, opened), order, is_reversed)
    return [entry for group in groups for entry in group]


def _in_order(groups: Iterable[list[ProcessRow]], order: str, is_reversed: bool) -> list[list[ProcessRow]]:
    """Sort groups of rows by their first rows; unknown values come last, even if the order is reversed."""
    chosen, by_key = ORDERS[order], sorted(groups, key=lambda group: group[0].key)
    known = [group for group in by_key if chosen.value(group[0].process) is not None]
    unknown = [group for group in by_key if chosen.value(group[0].process) is None]
    known.sort(key=lambda group: chosen.value(group[0].process), reverse=chosen.largest_first is not is_reversed)
    return known + unknown


def _matches(process: ProcessDetails, held: Holders, words: Sequence[str]) -> bool:
    """Return whether all words match a process.

    A word like `gpu:1`, `user:ada`, `job:12` or `type:g` matches only that field.
    """
    job = _job_of(process, held)
    fields = {
        "gpu": [str(index) for index in process.gpus],
        "user": [process.user or ""],
        "job": [str(job.id), job.name] if job else [],
    }
    named = [text for texts in fields.values() for text in texts]
    # Without a colon, a letter is not treated as a type, because it would match nearly every command.
    fields["type"] = process.kind.split("+") if process.kind else []
    text = " ".join([str(process.pid), process.command or "", process.container, *named]).casefold()

    def matches(word: str) -> bool:
        field, colon, value = word.partition(":")
        return any(value == one.casefold() for one in fields[field]) if colon and field in fields else word in text

    return all(map(matches, words))


def _folded(found: Sequence[ProcessDetails], held: Holders, opened: frozenset[str]) -> list[list[ProcessRow]]:
    """Return one group per job with several processes, and one per remaining process.

    A job's group starts with its totals over all processes. If the job is expanded, its processes follow.
    """
    of_jobs: dict[int, list[ProcessRow]] = {}
    groups: list[list[ProcessRow]] = []
    for one in found:
        job = _job_of(one, held)
        entry = ProcessRow(f"pid:{one.pid}", one, job=job, rank=_rank_of(one.pid, held))
        if job:
            of_jobs.setdefault(job.id, []).append(entry)
        else:
            groups.append([entry])
    for members in of_jobs.values():
        groups.append(members if len(members) == 1 else _job_rows(members, opened))
    return groups


def _job_rows(members: Sequence[ProcessRow], opened: frozenset[str]) -> list[ProcessRow]:
    job = members[0].job
    assert job is not None
    key = f"job:{job.id}"
    head = ProcessRow(
        key,
        _sum([one.process for one in members]),
        job=job,
        n_below=len(members),
        groups_ranks=all(one.rank is not None for one in members),
        is_open=key in opened,
    )
    in_order = sorted(members, key=lambda one: (one.rank is None, one.rank or 0))
    below = [ProcessRow(one.key, one.process, 1, one.job, one.rank) for one in in_order]
    return [head, *(below if head.is_open else [])]


def _sum(parts: Sequence[ProcessDetails]) -> ProcessDetails:
    """Return the totals over the processes, with the mean of their GPU utilisation."""
    kinds = {one.kind for one in parts}
    return ProcessDetails(
        0,
        parts[0].user,
        None,
        tuple(sorted({index for one in parts for index in one.gpus})),
        _total([one.memory_used_bytes for one in parts]),
        _mean([one.sm_percent for one in parts]),
        _total([one.cpu_percent for one in parts]),
        _total([one.host_memory_bytes for one in parts]),
        min((one.started for one in parts if one.started is not None), default=None),
        kind=parts[0].kind if len(kinds) == 1 else None,
        bandwidth_percent=_mean([one.bandwidth_percent for one in parts]),
        encoder_percent=_mean([one.encoder_percent for one in parts]),
        decoder_percent=_mean([one.decoder_percent for one in parts]),
        host_memory_percent=_total([one.host_memory_percent for one in parts]),
    )


def _mean(shares: Iterable[int | None]) -> int | None:
    known = [share for share in shares if share is not None]
    return round(sum(known) / len(known)) if known else None


def _total(values: Sequence[Any]) -> Any:
    """Return the sum of the values, or None if any value is unknown."""
    return None if None in values else sum(values)


def _tree(found: Sequence[ProcessDetails], held: Holders) -> list[ProcessRow]:
    """Return a row for every process, below its parents; in a chain of single-child parents, show only the last."""
    on_gpus = {one.pid: one for one in found}
    known: dict[int, ProcessDetails] = dict(on_gpus)
    below: dict[int, list[int]] = {}
    tops: list[int] = []
    for one in found:
        pid = one.pid
        for parent in one.ancestors:
            known.setdefault(parent.pid, _as_process(parent))
            if pid in below.setdefault(parent.pid, []):
                break
            below[parent.pid].append(pid)
            pid = parent.pid
        else:
            tops += [pid] if pid not in tops else []
    entries: list[ProcessRow] = []

    def add(pid: int, depth: int, above: Job | None = None) -> None:
        children = below.get(pid, [])
        # Skip parents with a single child, such as the nested shells of a login.
        while pid not in on_gpus and len(children) == 1 and children[0] not in on_gpus:
            pid, children = children[0], below.get(children[0], [])
        # Every process below one of a job's processes belongs to that job.
        job = _job_of(known[pid], held) or above
        number = _rank_of(pid, held)
        entries.append(ProcessRow(f"pid:{pid}", known[pid], depth, job, number, is_parent=pid not in on_gpus))
        for child in children:
            add(child, depth + 1, job)

    for top in tops:
        add(top, 0)
    return entries


def _job_of(process: ProcessDetails, held: Holders) -> Job | None:
    """Return the job whose recorded process is this process or one of its ancestors, or None if there is none."""
    return held.job_of((process.pid, *(one.pid for one in process.ancestors)))


def _rank_of(pid: int, held: Holders) -> int | None:
    """Return a recorded process's rank; a command's only recorded process is its program, not a rank."""
    job, rank = held.rank_of(pid) or (None, None)
    return None if job is None or kind_of(job.config).is_program else rank


def _as_process(parent: Ancestor) -> ProcessDetails:
    return ProcessDetails(parent.pid, parent.user, parent.command)
