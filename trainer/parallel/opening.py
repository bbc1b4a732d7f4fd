"""The first exchanges between GPU ranks, which open all connections and detect GPUs that cannot communicate."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.parallel.group import Group, PeerLost

# The time limit for the first exchanges, in seconds, counted from the last rank's arrival. NCCL takes 3 to 10 s on
# eight GPUs, and hangs forever if direct transfers between the GPUs get lost.
LIMIT_S = 60.0
# The time limit for all ranks to read the verdict, `OPENED` or `HANGS`, in seconds.
READ_WITHIN_S = 10.0
POLL_S = 0.05
OPENED, HANGS = "opened", "hangs"


def open_connections(
    group: Group,
    store: dist.Store,
    device: torch.device,
    on_hang: Callable[[], object],
    patience: timedelta,
    *,
    first_has_store: bool = False,
) -> None:
    """Run every collective that training uses, on a few values; call `on_hang` if this takes more than `LIMIT_S`.

    NCCL allocates memory at the first use of each collective, up to 4 GB on eight GPUs. A later allocation could fail,
    for example at the first checkpoint in a run that has filled its GPU.

    Either all ranks call `on_hang` or none does, even if the exchange hangs on only some ranks. `on_hang` should
    terminate the process; if the main thread is stuck, another thread calls it. Wrong values are treated as a hang,
    because transfers can get lost without an error. Raise `PeerLost` if the connection to a rank breaks, or if values
    were wrong and `on_hang` returns. If `first_has_store` is true, rank 0 hosts the store, which closes when rank 0's
    process exits.
    """

    def leave() -> None:
        _await_readers(group, store, first_has_store=first_has_store)
        on_hang()

    def give_up() -> None:
        if _verdict(store, HANGS) == HANGS:
            leave()

    _meet(group, store, "begin", patience.total_seconds())
    timer = threading.Timer(LIMIT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        if not _exchange(group, device):
            _verdict(store, HANGS)
    except PeerLost:
        # The connection also breaks if another rank noticed the hang first and has already left.
        if store.check(["verdict"]) and _verdict(store, HANGS) == HANGS:
            leave()
        raise
    finally:
        timer.cancel()
    # If a rank hangs, its timer sets the verdict. The other ranks wait here until all ranks arrive or a verdict is set.
    _meet(group, store, "through", 2 * LIMIT_S, ends_early=True)
    if _verdict(store, OPENED) == HANGS:
        leave()
        raise PeerLost("the first exchange between the GPUs returned wrong values; see `sae-tui doctor --probe`")


def _verdict(store: dist.Store, found: str) -> str:
    """Return the verdict of the first rank that called this function; `found` is this rank's verdict."""
    return bytes(store.compare_set("verdict", "", found)).decode()


def _meet(group: Group, store: dist.Store, place: str, limit_s: float, *, ends_early: bool = False) -> None:
    """Wait until all ranks arrive or, with `ends_early`, until there is a verdict; raise `PeerLost` after `limit_s`.

    Poll instead of blocking, because a blocking wait on a TCP store prevents other threads from using the store.
    """
    store.set(f"{place} {group.index}", "")
    places = [f"{place} {rank}" for rank in range(group.size)]
    if not _poll(lambda: store.check(places) or (ends_early and store.check(["verdict"])), limit_s):
        raise PeerLost(f"another rank did not reach the first exchange within {limit_s:g} s")


def _await_readers(group: Group, store: dist.Store, *, first_has_store: bool) -> None:
    """On rank 0, wait until all ranks have read the verdict; on other ranks, wait until rank 0 has closed its store.

    A rank that restarted too early would try to meet the other ranks in a store that is about to close.
    """
    with contextlib.suppress(RuntimeError):
        store.set(f"read {group.index}", "")
        if group.index == 0:
            readers = [f"read {rank}" for rank in range(group.size)]
            _poll(lambda: store.check(readers), READ_WITHIN_S)
        elif first_has_store:
            # `store.check` raises an error once rank 0 has exited.
            _poll(lambda: store.check(["closed"]), 2 * READ_WITHIN_S)


def _poll(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until the condition is true; return False if it is still false after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _exchange(group: Group, device: torch.device) -> bool:
    """Run each collective once, and return whether all results are correct."""
    n = group.size
    own = torch.full((n,), float(group.index), device=device)
    of_all = torch.arange(n, device=device, dtype=torch.float32)
    total, spread = own.clone(), own.clone()
    group.sum_(total)
    group.spread_parts_([spread])
    to_owners = group.to_owners(own)
    of_first = group.collect(own[:1], [1] * n, 0)
    sum_of_indices = torch.full((n,), n * (n - 1) / 2, device=device)
    pairs = [
        (total, sum_of_indices),
        (group.part_of_sum(own), sum_of_indices[:1]),
        (spread, of_all),
        (group.gather(own[:1]).flatten(), of_all),
        (to_owners.flatten(), of_all),
        (group.from_owners(to_owners, n).flatten(), own),
    ]
    if of_first:
        pairs.append((torch.cat(of_first), of_all.cpu()))
    return all(torch.equal(found, expected) for found, expected in pairs)
