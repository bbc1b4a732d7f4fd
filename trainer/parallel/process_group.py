"""The connection between all of a run's ranks, independent of how the work is split."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.contract.errors import UserError
from trainer.contract.process import boot_id
from trainer.parallel.group import DistributedGroup, Group, peers_expected
from trainer.parallel.opening import open_connections
from trainer.parallel.shared_memory import SharedRanks, among_neighbours
from trainer.parallel.two_level import TwoLevelGroup
from trainer.parallel.waiting import HostWaiting, Waiting, waiting

# The time limit for ranks to meet, and for each exchange unless the caller allows more time.
TIMEOUT = timedelta(minutes=10)
# The time limit for ranks to disconnect after a run, in seconds.
CLOSES_WITHIN_S = 10.0
CPU = torch.device("cpu")
UNMET = "the ranks could not find each other"


class World:
    """All ranks in a run; this base class is for single-process runs."""

    def __init__(self, device: torch.device, group: Group | None = None, time: Waiting | None = None) -> None:
        self.device, self.group, self.waiting = device, group or Group(), time

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def ranks_on_node(self) -> int:
        """The number of consecutive ranks on each node; all ranks, if nodes have different numbers of ranks."""
        return self.size

    @property
    def nodes(self) -> int:
        return self.size // self.ranks_on_node

    def part(self, groups: Sequence[Sequence[int]]) -> Group:
        """Connect the ranks of each group in `groups`, and return this rank's group; this is a collective call.

        If none of `groups` contains this rank, return a group that contains only this rank.
        """
        return Group()

    def neighbours(self, groups: Sequence[Sequence[int]]) -> Group:
        """Like `part`, but connect each group through shared memory.

        Return a group of only this rank if the ranks are on several machines or there is too little shared memory.
        """
        return Group()

    def close(self) -> None:
        """Disconnect from the other ranks."""


class Connected(World):
    """Several processes that find each other through a store that no other code uses."""

    def __init__(
        self, device: torch.device, store: dist.Store, group: Group, time: Waiting, patience: timedelta
    ) -> None:
        super().__init__(device, group, time)
        self._store, self._time, self._patience, self._n_parts = store, time, patience, 0

    def neighbours(self, groups: Sequence[Sequence[int]]) -> Group:
        self._n_parts += 1
        members = next(members for members in groups if self.group.index in members)
        # Use a separate timer: another thread uses this group, and its waiting time is not part of a step's waiting
        # time.
        return self._by_memory(members, CPU, HostWaiting()) or Group()

    def _by_memory(self, members: Sequence[int], device: torch.device, time: Waiting) -> SharedRanks | None:
        """Return a group of `members` that uses shared memory, or None if this is impossible."""
        store = dist.PrefixStore(f"part {self._n_parts} of rank {members[0]}", self._store)
        index = members.index(self.group.index)
        return open_shared_memory(store, device, len(members), index, time, self._patience)


class Neighbours(Connected):
    """CPU ranks on one machine; they communicate through shared memory and therefore open no port."""

    def part(self, groups: Sequence[Sequence[int]]) -> Group:
        self._n_parts += 1
        members = next((members for members in groups if self.group.index in members), None)
        if members is None:
            return Group()
        with peers_expected(UNMET):
            group = self._by_memory(members, self.device, self._time)
        if group is None:
            raise UserError(f"{UNMET}, since this machine has too little shared memory; stop other processes")
        return group


class TorchGroup(Connected):
    """Ranks on GPUs or on several machines, connected by `torch.distributed`."""

    def __init__(
        self,
        device: torch.device,
        store: dist.Store,
        group: Group,
        time: Waiting,
        patience: timedelta,
        ranks_on_node: int = 0,
    ) -> None:
        super().__init__(device, store, group, time, patience)
        self._ranks_on_node = ranks_on_node or group.size
        if self.nodes > 1:
            with peers_expected(UNMET):
                self.group = self._by_levels([range(group.size)], group)

    @property
    def ranks_on_node(self) -> int:
        return self._ranks_on_node

    def part(self, groups: Sequence[Sequence[int]]) -> Group:
        self._n_parts += 1
        own = Group()
        with peers_expected(UNMET):
            # Every rank must create every group.
            for members in groups:
                connected = dist.new_group(list(members), timeout=self._patience)
                if self.group.index in members:
                    own = self._by_memory(members, self.device, self._time) or DistributedGroup(connected, self._time)
            return self._by_levels(groups, own) if self.nodes > 1 else own

    def _by_levels(self, groups: Sequence[Sequence[int]], own: Group) -> Group:
        """Return this rank's group `own` in a form that sums inside each node first, if that sends less between nodes.

        All groups must have the same number of ranks, at least two, on each of several nodes.
        """
        by_node = [[[*ranks] for _, ranks in itertools.groupby(members, self._node_of)] for members in groups]
        sizes = {len(ranks) for nodes in by_node for ranks in nodes}
        if self.device.type == "cuda" or len(sizes) > 1 or sizes == {1} or min(map(len, by_node)) == 1:
            return own
        between = None
        for members in (same for nodes in by_node for same in zip(*nodes, strict=True)):
            connected = dist.new_group([*members], timeout=self._patience)
            between = connected if self.group.index in members else between
        self._n_parts += 1
        here = next((ranks for nodes in by_node for ranks in nodes if self.group.index in ranks), None)
        if here is None or between is None or not isinstance(own, DistributedGroup):
            return own
        inner = self._by_memory(here, self.device, self._time)
        # If a node has too little shared memory, no rank uses it.
        all_share = bool(own.gather(torch.tensor([int(inner is not None)])).min())
        return TwoLevelGroup(own.group, self._time, inner, between) if inner and all_share else own

    def _node_of(self, rank: int) -> int:
        return rank // self.ranks_on_node

    def close(self) -> None:
        # NCCL may hang or fail here because other ranks have already disconnected. This is harmless, because all work
        # is complete by now.
        closing = threading.Thread(target=_disconnect, name="disconnect", daemon=True)
        closing.start()
        closing.join(CLOSES_WITHIN_S)


def _disconnect() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def open_shared_memory(
    store: dist.Store, device: torch.device, size: int, index: int, time: Waiting, patience: timedelta
) -> SharedRanks | None:
    """Return a group for exchanging CPU tensors through shared memory, or None on GPUs or on several machines.

    All ranks must call this.
    """
    if device.type == "cuda":
        return None
    return among_neighbours(store, size, index, time, patience.total_seconds())


def join(
    device: torch.device,
    rank: int,
    world_size: int,
    rendezvous: Path | None,
    *,
    on_one_host: bool = True,
    patience: timedelta = TIMEOUT,
    on_hang: Callable[[], object] = lambda: None,
    attempt: str = "",
) -> World:
    """Connect this rank to the other ranks, and return the `World` of all ranks.

    Ranks meet through the file `rendezvous`, which must be accessible to all ranks. Without `rendezvous`, ranks meet
    through torchrun's environment variables, on any host. An exchange fails if a rank keeps other ranks waiting for
    longer than `patience`. On GPUs, `on_hang` is called if the first exchanges hang. If ranks restart after a hang,
    `attempt` must be a new string.
    """
    if world_size == 1:
        return World(device)
    if rendezvous:
        _need_locks(rendezvous)
    time = waiting(device)
    with peers_expected(UNMET):
        store = _store(rank, world_size, rendezvous)
        if attempt:
            store = dist.PrefixStore(attempt, store)
        if group := open_shared_memory(dist.PrefixStore("all", store), device, world_size, rank, time, patience):
            return Neighbours(device, store, group, time, patience)
        if rendezvous and on_one_host:
            # Use the loopback interface, because other hosts need no access. By default, gloo looks up the host's name,
            # which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        on_gpu = device.type == "cuda"
        # With `device_id`, NCCL connects the ranks once, and subgroups and pairs of ranks reuse these connections.
        # Without `device_id`, each subgroup would connect at its first exchange, which takes half a second and GPU
        # memory.
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=patience,
            device_id=device if on_gpu else None,
        )
        ranks = DistributedGroup(None, time)
        if _may_hang(device):
            # Without `rendezvous`, torchrun's agent hosts the store or, in older versions, rank 0.
            first_has_store = not rendezvous and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            opening = dist.PrefixStore("open", store)
            open_connections(ranks, opening, device, on_hang, patience, first_has_store=first_has_store)
        on_node = 0 if rendezvous and on_one_host else ranks_on_node(store, rank, world_size)
        return TorchGroup(device, store, ranks, time, patience, on_node)


def ranks_on_node(store: dist.Store, rank: int, world_size: int) -> int:
    """Return how many consecutive ranks are on each node, or 0 if this number differs; all ranks must call this.

    Ranks are on one node if they run on the same kernel and in the same network namespace.
    """
    store.set(f"node of {rank}", f"{boot_id()} {os.readlink('/proc/self/ns/net')}")
    nodes = [store.get(f"node of {other}") for other in range(world_size)]
    counts = [len([*ranks]) for _, ranks in itertools.groupby(nodes)]
    return counts[0] if len({*counts}) == 1 and len({*nodes}) == len(counts) else 0


def _may_hang(device: torch.device) -> bool:
    """Return whether ranks on a device use NCCL, whose first exchanges can hang and allocate memory."""
    return device.type == "cuda"


def _store(rank: int, world_size: int, rendezvous: Path | None) -> dist.Store:
    """Return the store that ranks use to exchange messages before they are connected."""
    if rendezvous:
        # Do not create the store from a file:// URL, because a # or ? in the path would truncate the URL.
        store: dist.Store = dist.FileStore(str(rendezvous), world_size)
    else:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    return store


def _need_locks(rendezvous: Path) -> None:
    """Raise `UserError` if `rendezvous` is on a file system that lacks locks, which ranks need to write to the file."""
    descriptor = os.open(rendezvous, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        reason = (
            f"the ranks cannot meet in {rendezvous.parent}, whose file system does not support locks ({error.strerror})"
        )
        raise UserError(
            f"{reason}; mount it with locks, or put the data folder on another file system (--data-dir)"
        ) from None
    finally:
        os.close(descriptor)
