"""Tests for exchanges between real processes, either through shared memory or over sockets as between machines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import exchanging
from support.forked import loaded_context
from torch import Tensor

from trainer.parallel import rendezvous


def run_ranks(size: int, what: str, folder: Path, *, apart: bool = False) -> list[dict[str, Tensor]]:
    """Run `size` ranks, and return the tensors that each rank saved (none if the rank was killed)."""
    place, context = folder / "rendezvous", loaded_context()
    arguments = [(rank, size, place, what, apart) for rank in range(size)]
    ranks = [context.Process(target=exchanging.main, args=of_rank) for of_rank in arguments]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
    finally:
        for rank in ranks:
            rank.kill()
    files = [Path(f"{place}.{rank}") for rank in range(size)]
    return [load_file(file) if file.exists() else {} for file in files]


@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_return_the_same_correct_values_on_all_ranks(size: int, apart: bool, tmp_path: Path) -> None:
    ranks = run_ranks(size, "exchange", tmp_path, apart=apart)
    check_sums(ranks)
    check_parts(ranks)
    check_owned(ranks)


def check_sums(ranks: list[dict[str, Tensor]]) -> None:
    """Check that sums are bit-identical on all ranks, and that gathered values equal each rank's own values."""
    size = len(ranks)
    names = [
        "matrix",
        "tiny",
        "none",
        "half",
        "double",
        "odd",
        "columns",
        "counts",
        "even",
        "uneven",
        "pair's matrix",
        "pair's vector",
    ]
    for name in names:
        total = torch.stack([rank[f"own {name}"].double() for rank in ranks]).sum(dim=0)
        rough = ranks[0][name].dtype == torch.bfloat16
        torch.testing.assert_close(
            ranks[0][name].double(), total, rtol=1e-2 if rough else 1e-6, atol=3e-2 if rough else 1e-6
        )
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
    expected = torch.stack([torch.arange(40000) * (rank + 1) for rank in range(size)])
    for rank in ranks:
        assert torch.equal(rank["gathered"], expected)
        assert rank["flags"].flatten().tolist() == [index == 1 for index in range(size)]
        assert torch.equal(rank["first"], ranks[0]["own first"])
    for name, members in (("ends", {0, size - 1}), ("last two", {size - 2, size - 1})):
        for index, rank in enumerate(ranks):
            assert float(rank[name]) == (sum(members) if index in members else index)
    # The data exceeds a connection's buffer, and only the first rank collects it.
    assert len(ranks[0]["collected"]) == size * (size + 1) // 2
    assert torch.equal(ranks[0]["collected"], torch.cat([rank["own collected"] for rank in ranks]))
    assert "collected" not in ranks[1]


def check_parts(ranks: list[dict[str, Tensor]]) -> None:
    """Check that each rank gets its own rows of a sum, in fp32 even if the inputs have 16 bits."""
    for name in ("even", "uneven", "half", "columns"):
        parts = torch.stack([rank[f"own {name}"].double() for rank in ranks]).sum(dim=0).tensor_split(len(ranks))
        for rank, part in zip(ranks, parts, strict=True):
            assert rank[f"part of {name}"].dtype == torch.float32
            torch.testing.assert_close(rank[f"part of {name}"].double(), part, rtol=1e-6, atol=1e-6)


def check_owned(ranks: list[dict[str, Tensor]]) -> None:
    """Check that owners get their rows from all ranks, and that each rank gets back the results for its own rows."""
    for name in ("alike", "unlike"):
        of_all = torch.stack([rank[f"own {name}"] for rank in ranks])
        parts = of_all.tensor_split(len(ranks), dim=1)
        for rank, part in zip(ranks, parts, strict=True):
            assert torch.equal(rank[f"owned {name}"], part)
            assert torch.equal(rank[name], rank[f"own {name}"])
    # In this case, there are fewer rows than ranks.
    assert all(torch.equal(rank["one row"], torch.ones(1, 5)) for rank in ranks)


def test_the_other_ranks_immediately_notice_that_a_rank_was_killed(tmp_path: Path) -> None:
    *others, killed = run_ranks(3, "lose", tmp_path)
    assert not killed
    assert all(float(rank["seconds"]) < 30 for rank in others)


def test_ranks_can_wait_for_file_descriptors_with_large_numbers() -> None:
    # A process reading many shards can have 2,000 files open.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    near, far = socket.socketpair()
    # The data arrives after 0.1 s, when the first rank is no longer polling but sleeping.
    late = threading.Timer(0.1, far.send, [b"."])
    try:
        moved = socket.socket(fileno=fcntl.fcntl(near.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000))
        with near, far, moved:
            late.start()
            rendezvous.ProcessBarrier([moved], 30, is_first=True).meet()
            assert far.recv(1) == b"."
    finally:
        late.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# This program opens more connections than the listen backlog can hold.
KNOCKS = """
import os, socket, sys
os.setuid(65534)
connections = [socket.socket(socket.AF_UNIX) for _ in range(300)]
for connection in connections:
    connection.connect("\\0" + sys.argv[1])
print(flush=True)
sys.exit(sum(len(connection.recv(1)) for connection in connections))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_connects_is_rejected_and_does_not_block_ranks() -> None:
    name = f"knocked-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as ours:
        door.bind("\0" + name)
        door.listen()
        argv = [sys.executable, "-c", KNOCKS, name]
        with (
            rendezvous._letting_in(door, 1) as connecting,
            subprocess.Popen(argv, stdout=subprocess.PIPE) as other_user,
        ):
            assert other_user.stdout is not None
            other_user.stdout.readline()
            ours.connect("\0" + name)
            (let_in,) = connecting.result(30)
            assert other_user.wait(30) == 0
        with let_in:
            let_in.send(b".")
            assert ours.recv(1) == b"."


CROWDS = """
import os, socket, sys, time
os.setuid(65534)
crowd = []
try:
    while True:
        crowd.append(socket.socket(socket.AF_UNIX))
        crowd[-1].setblocking(False)
        crowd[-1].connect("\\0" + sys.argv[1])
except BlockingIOError:
    print(flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_rank_waits_if_other_users_fill_the_connection_queue() -> None:
    name = f"crowded-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as ours, ThreadPoolExecutor(1) as rank:
        door.bind("\0" + name)
        door.listen()
        ours.settimeout(30)
        with subprocess.Popen([sys.executable, "-c", CROWDS, name], stdout=subprocess.PIPE) as other_users:
            assert other_users.stdout is not None
            other_users.stdout.readline()
            coming = rank.submit(rendezvous._connect, ours, "\0" + name, 30)
            with rendezvous._letting_in(door, 1) as connecting:
                (let_in,) = connecting.result(30)
            coming.result(30)
            other_users.kill()
        with let_in:
            let_in.send(b".")
            assert ours.recv(1) == b"."


def test_a_rank_may_enter_a_barrier_while_its_data_is_in_transit() -> None:
    first, other = socket.socketpair()
    with first, other, ThreadPoolExecutor(1) as rank:
        lines = (
            rendezvous.ProcessBarrier([first], 30, is_first=True),
            rendezvous.ProcessBarrier([other], 30, is_first=False),
        )
        sent = bytearray()
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += b"x" * other.send(b"x" * 1000)
        into = bytearray(len(sent))
        met = rank.submit(lines[1].meet)
        lines[0].receive_from(1, memoryview(into))
        lines[0].meet()
        met.result(30)
        assert into == sent
