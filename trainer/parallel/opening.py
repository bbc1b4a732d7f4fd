"""The first exchanges of ranks on GPUs: they open all connections, and show whether GPUs reach each other at all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.parallel.group import Group, PeerLost

# Seconds from when all ranks are there. NCCL takes 3 to 10 on eight GPUs; between GPUs whose direct transfers are lost,
# it waits without end.
LIMIT_S = 60.0
# Seconds in which all ranks read the verdict.
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
    """Exchange a few values in each way that training does; call `on_hang` where that takes more than `LIMIT_S`.

    NCCL takes its memory for a kind of exchange at the first one, up to 4 GB on eight GPUs: here, and not at the first
    checkpoint of a run that has filled its GPU. All ranks call `on_hang` or none does, also where the exchange hangs on
    some ranks only. It has to end the process, in another thread where this one is stuck. Wrong values count as a hang,
    since lost transfers may also go unnoticed; raise `PeerLost` if `on_hang` returns after them. `first_has_store` says
    that the store closes with the process of rank 0.
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
    finally:
        timer.cancel()
    # A rank that hangs is found by its own timer; the others wait here for its verdict.
    _meet(group, store, "through", 2 * LIMIT_S, ends_early=True)
    if _verdict(store, OPENED) == HANGS:
        leave()
        raise PeerLost("the first exchange of the GPUs brought wrong values; see `sae-tui doctor --probe`")


def _verdict(store: dist.Store, found: str) -> str:
    """Return what the first rank found that came here."""
    return bytes(store.compare_set("verdict", "", found)).decode()


def _meet(group: Group, store: dist.Store, place: str, limit_s: float, *, ends_early: bool = False) -> None:
    """Wait until all ranks are here or, with `ends_early`, one has a verdict; raise `PeerLost` after `limit_s`.

    It polls, since a TCP store that waits lets no other thread use it.
    """
    store.set(f"{place} {group.index}", "")
    places = [f"{place} {rank}" for rank in range(group.size)]
    if not _poll(lambda: store.check(places) or (ends_early and store.check(["verdict"])), limit_s):
        raise PeerLost(f"another rank did not come to the first exchange within {limit_s:g} s")


def _await_readers(group: Group, store: dist.Store, *, first_has_store: bool) -> None:
    """Wait, on rank 0, until all ranks have read the verdict; on others, until a store that rank 0 has is closed.

    A rank that starts again before that would meet the others in the store that is about to close.
    """
    with contextlib.suppress(RuntimeError):
        store.set(f"read {group.index}", "")
        if group.index == 0:
            readers = [f"read {rank}" for rank in range(group.size)]
            _poll(lambda: store.check(readers), READ_WITHIN_S)
        elif first_has_store:
            # It raises once rank 0 is gone.
            _poll(lambda: store.check(["closed"]), 2 * READ_WITHIN_S)


def _poll(condition: Callable[[], object], limit_s: float) -> bool:
    """Return whether the condition came true within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _exchange(group: Group, device: torch.device) -> bool:
    """Return whether every kind of exchange brings the values that were sent."""
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
