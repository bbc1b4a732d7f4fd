"""The first exchanges of ranks on GPUs: they open all connections, and show whether GPUs reach each other at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.parallel.group import Group, PeerLost

# Seconds from when all ranks are there. NCCL takes 3 to 10 on eight GPUs; between GPUs whose direct transfers are lost,
# it waits without end.
LIMIT_S = 60.0
OPENED, HANGS = "opened", "hangs"


def open_connections(
    group: Group, store: dist.Store, device: torch.device, on_hang: Callable[[], object], patience: timedelta
) -> None:
    """Exchange a few values in each way that training does; call `on_hang` where that takes more than `LIMIT_S`.

    NCCL takes its memory for a kind of exchange at the first one, up to 4 GB on eight GPUs: here, and not at the first
    checkpoint of a run that has filled its GPU. `on_hang` runs in another thread, since this one is stuck, and has to
    end the process. Wrong values count as a hang, since lost transfers may also go unnoticed; raise `PeerLost` if
    `on_hang` returns after them.
    """
    _meet(group, store, "begin", patience)
    timer = threading.Timer(LIMIT_S, lambda: _verdict(store, HANGS) == HANGS and on_hang())
    timer.daemon = True
    timer.start()
    try:
        if not _exchange(group, device):
            _verdict(store, HANGS)
        # No rank continues before all are through, and then all do or none.
        _meet(group, store, "through", timedelta(seconds=2 * LIMIT_S))
        if _verdict(store, OPENED) == HANGS:
            on_hang()
            raise PeerLost("the first exchange of the GPUs brought wrong values; see `sae-tui doctor --probe`")
    finally:
        timer.cancel()


def _verdict(store: dist.Store, found: str) -> str:
    """Return what the first rank found that came here."""
    return bytes(store.compare_set("verdict", "", found)).decode()


def _meet(group: Group, store: dist.Store, place: str, patience: timedelta) -> None:
    """Wait until all ranks are here."""
    store.set(f"{place} {group.index}", "")
    store.wait([f"{place} {rank}" for rank in range(group.size)], patience)


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
