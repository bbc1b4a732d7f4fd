"""Tests, with gloo instead of NCCL, that ranks restart with transfers through host memory if direct transfers fail."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.contract.planning.hardware import MeasuredHardware, read_box, write_box
from trainer.parallel.group import PeerLost
from trainer.parallel.opening import HANGS, open_connections
from trainer.parallel.threads import Threads, on_all
from trainer.ranks.staging import HOPELESS

N_RANKS = 2


def ranks_of(folder: Path, fault: str, **variables: str) -> tuple[list[int], list[dict[str, Any]]]:
    """Run all ranks until they exit, and return their pids and reports."""
    environment = {name: value for name, value in os.environ.items() if name != "NCCL_P2P_DISABLE"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "support.staged_rank", str(folder), str(N_RANKS), fault]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, cwd=Path(__file__).parents[2])
        for rank in range(N_RANKS)
    ]
    for process in processes:
        process.wait(90)
    return [one.pid for one in processes], [
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(N_RANKS)
    ]


@pytest.mark.slow
def test_if_transfers_hang_ranks_restart_in_place_and_use_host_memory(tmp_path: Path) -> None:
    write_box(tmp_path / "box.json", MeasuredHardware())
    pids, reported = ranks_of(tmp_path, "hangs")
    assert reported == [{"pid": pid, "staged": True, "variable": "1"} for pid in pids]
    assert read_box(tmp_path / "box.json").peers_fail


def test_ranks_that_hang_even_with_host_memory_fail_with_a_one_sentence_error(tmp_path: Path) -> None:
    _, reported = ranks_of(tmp_path, "always", NCCL_P2P_DISABLE="1")
    assert {one["error"] for one in reported} == {HOPELESS}
    assert not read_box(tmp_path / "box.json").peers_fail


class Lying(Threads):
    """A process group in which one exchange returns wrong values on one rank."""

    lies = ""

    def __getattribute__(self, name: str) -> Any:
        exchange = super().__getattribute__(name)
        if name != super().__getattribute__("lies") or super().__getattribute__("index") != 1:
            return exchange

        def lie(*arguments: Any) -> Any:
            result = exchange(*arguments)
            if result is None:
                for tensor in arguments[0] if isinstance(arguments[0], list) else arguments:
                    tensor += 1
            return None if result is None else result + 1

        return lie


EXCHANGES = ["gather", "to_owners", "from_owners", "part_of_sum", "sum_", "spread_parts_"]


@pytest.mark.parametrize("lies", ["", *EXCHANGES])
def test_every_exchange_is_tried_and_wrong_values_count_as_a_hang_on_all_ranks(lies: str) -> None:
    store, found = dist.HashStore(), []

    def open_on(group: Threads) -> None:
        if lies:
            group.__class__ = type("Lying", (Lying,), {"lies": lies})
        minute = timedelta(minutes=1)
        with pytest.raises(PeerLost, match="wrong values") if lies else contextlib.nullcontext():
            open_connections(group, store, torch.device("cpu"), lambda: found.append(group.index), minute)

    on_all(3, open_on, timeout_s=60)
    assert sorted(found) == ([0, 1, 2] if lies else [])


class Broken(Threads):
    """A process group whose connections break during an exchange, possibly because another rank noticed a hang."""

    store: dist.Store
    is_noticed = False

    def from_owners(self, *_: object) -> torch.Tensor:
        if self.is_noticed:
            self.store.compare_set("verdict", "", HANGS)
        raise PeerLost("the connection to another rank was lost")


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_rank_that_loses_a_peer_restarts_only_if_the_peer_noticed_a_hang(is_noticed: bool) -> None:
    store, found = dist.HashStore(), []

    def open_on(group: Threads) -> None:
        group.__class__ = type("BrokenHere", (Broken,), {"store": store, "is_noticed": is_noticed})
        with pytest.raises(PeerLost, match="was lost"):
            open_connections(group, store, torch.device("cpu"), lambda: found.append(group.index), timedelta(minutes=1))

    on_all(1, open_on, timeout_s=60)
    assert found == ([0] if is_noticed else [])
