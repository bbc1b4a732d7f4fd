"""Tests how ranks connect: the rendezvous, the network interface, the backend and the timeouts."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.contract.errors import UserError
from trainer.contract.runs.rank_spec import RankSpec
from trainer.parallel import process_group
from trainer.parallel.group import Group
from trainer.parallel.process_group import CPU
from trainer.ranks.training_work import meeting_place_of


@pytest.mark.parametrize(("on_one_host", "interface"), [(True, "lo"), (False, None)])
def test_only_ranks_on_the_same_host_are_bound_to_its_loopback_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_one_host: bool, interface: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(process_group, "among_neighbours", lambda *_: None)
    monkeypatch.setattr(process_group, "DistributedGroup", lambda *_: Group())
    monkeypatch.setattr(process_group, "ranks_on_node", lambda *_: 1)
    process_group.join(torch.device("cpu"), 0, 2, tmp_path / "rendezvous", on_one_host=on_one_host)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(
    ("device", "joined"),
    [(torch.device("cuda", 1), ("nccl", torch.device("cuda", 1))), (CPU, ("gloo", None))],
)
def test_each_rank_on_a_gpu_connects_through_its_own_gpu(
    device: torch.device, joined: tuple[str, torch.device | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: list[tuple[str, torch.device | None]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, device_id, **_: by.append((backend, device_id)))
    monkeypatch.setattr(process_group, "among_neighbours", lambda *_: None)
    monkeypatch.setattr(process_group, "DistributedGroup", lambda *_: Group())
    opened: list[torch.device] = []
    monkeypatch.setattr(
        process_group, "open_connections", lambda _group, _store, device, *_, **__: opened.append(device)
    )
    process_group.join(device, 1, 2, tmp_path / "rendezvous")
    assert by == [joined]
    assert opened == ([] if device == CPU else [device])


def test_every_group_of_ranks_waits_as_long_as_a_save_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, lambda *_, timeout, **__: waits.append(timeout))
    monkeypatch.setattr(process_group, "among_neighbours", lambda *arguments: waits.append(arguments[-1]))
    monkeypatch.setattr(process_group, "DistributedGroup", lambda *_: Group())
    patience = timedelta(hours=2)
    process_group.join(CPU, 0, 2, tmp_path / "rendezvous", patience=patience).part([[0, 1]])
    assert waits == [7200.0, patience, patience, 7200.0]


@pytest.mark.parametrize("ending", ["hangs", "fails"])
def test_a_rank_exits_even_if_its_peers_do_not_disconnect(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def destroy() -> None:
        if ending == "fails":
            raise RuntimeError("NCCL error: remote process exited")
        threading.Event().wait()

    monkeypatch.setattr(process_group, "among_neighbours", lambda *_: None)
    monkeypatch.setattr(process_group, "CLOSES_WITHIN_S", 0.1)
    monkeypatch.setattr(process_group, "DistributedGroup", lambda *_: Group())
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    closing = threading.Thread(target=process_group.join(CPU, 0, 2, tmp_path / "rendezvous").close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_the_error_for_a_file_system_without_locks_suggests_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        UserError, match=r"whose file system does not support locks \(Function not implemented\); mount it with"
    ):
        process_group.join(torch.device("cpu"), 0, 2, tmp_path / "rendezvous")


def test_ranks_restarted_by_slurm_use_a_new_rendezvous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RankSpec(tmp_path, tmp_path / "sae", attempt=1, world_size=2, device="cpu", by_files=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    first = meeting_place_of(spec, tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert (first, meeting_place_of(spec, tmp_path)) == (tmp_path / "rendezvous-7-0", tmp_path / "rendezvous-7-1")
