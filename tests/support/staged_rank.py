"""A rank whose direct transfers hang, as between GPUs that lose data.

RANK=0 python -m support.staged_rank FOLDER N_RANKS FAULT

Only rank 1 has the fault. With FAULT "hangs", rank 1 hangs until transfers go through host memory. With "always",
transfers through host memory hang too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.parallel import opening
from trainer.parallel.group import DistributedGroup
from trainer.parallel.waiting import waiting
from trainer.ranks import staging

CPU = torch.device("cpu")


class Lossy(DistributedGroup):
    """A group whose all-gather hangs if `hangs` is set."""

    hangs = False

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = super().gather(tensor)
        if self.hangs:
            threading.Event().wait()
        return gathered


def main(folder: Path, n_ranks: int, fault: str) -> None:
    """Open the connections. Write the pid, whether transfers go through host memory, and NCCL_P2P_DISABLE."""
    rank, opening.LIMIT_S = int(os.environ["RANK"]), 60.0 if staging.is_staged() else 3.0

    def report(**found: object) -> None:
        (folder / f"rank{rank}.json").write_text(json.dumps({"pid": os.getpid(), **found}))

    def give_up(reason: str) -> None:
        report(error=reason)
        os._exit(1)

    store: dist.Store = dist.FileStore(str(folder / "rendezvous"), n_ranks)
    if staging.is_staged():
        store = dist.PrefixStore("staged", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=timedelta(minutes=2))
    group = Lossy(None, waiting(CPU))
    group.hangs = rank == 1 and (fault == "always" or not staging.is_staged())
    opening.open_connections(
        group, dist.PrefixStore("open", store), CPU, lambda: staging.restart(give_up), timedelta(minutes=2)
    )
    if staging.is_staged() and rank == 0:
        staging.remember(folder / "box.json")
    report(staged=staging.is_staged(), variable=os.environ.get("NCCL_P2P_DISABLE"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
