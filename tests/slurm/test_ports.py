"""Tests for the network addresses that a job on a real SLURM cluster listens on while it runs."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from trainer.contract.runs.rank_spec import EXIT_STOPPED, read_spec

pytestmark = pytest.mark.timeout(240)
# SLURM's own programs, which authenticate each caller with munge.
OF_SLURM = {"srun", "slurmstepd"}
NODES = pytest.mark.parametrize(
    "launch", [{"nodes": 1, "gpus": "cpu:2"}, {"nodes": 2, "gpus": "cpu:1"}], ids=["one-node", "two-nodes"]
)


class Reachable:
    """Records a job's programs and threads, and the addresses they listened on for TCP connections."""

    def __init__(self, slurm_id: str) -> None:
        self.slurm_id = slurm_id
        self.programs: set[str] = set()
        self.threads: set[str] = set()
        self.addresses: set[str] = set()

    def look(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.Error, OSError):
                self.programs.add(" ".join(process.cmdline()))
                self.threads |= threads_of(process)
                self.addresses |= listens_at(process)

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() not in OF_SLURM and process.environ().get("SLURM_JOB_ID") == self.slurm_id:
                    yield process


def threads_of(process: psutil.Process) -> set[str]:
    return {file.read_text().strip() for file in Path(f"/proc/{process.pid}/task").glob("*/comm")}


def listens_at(process: psutil.Process) -> set[str]:
    # The method is called `connections` in psutil 5.
    connections = getattr(process, "net_connections", None) or process.connections
    return {connection.laddr.ip for connection in connections("tcp") if connection.status == psutil.CONN_LISTEN}


def is_inner(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def test_an_open_port_and_a_tcp_store_are_detected() -> None:
    own = psutil.Process()
    with socket.create_server(("0.0.0.0", 0)):
        assert not all(map(is_inner, listens_at(own)))
    store = TCPStore("127.0.0.1", 0, is_master=True)
    assert any("tcpstore" in name for name in threads_of(own))
    assert not all(map(is_inner, listens_at(own)))
    del store


@pytest.mark.slow
@NODES
def test_ranks_meet_through_a_private_file_and_listen_only_on_loopback(submission, monkeypatch, launch) -> None:
    # The fixture sets GLOO_SOCKET_IFNAME because both nodes are on one host.
    if launch["nodes"] == 1:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    one = submission(**launch)
    one.start()
    reachable = Reachable(one.slurm_id)
    one.until_training(reachable.look)
    reachable.look()
    (met,) = one.paths.attempt(1).glob("rendezvous*")
    assert [path.stat().st_mode & 0o077 for path in (met, met.parent)] == [0, 0]
    one.attempt.ask_to_stop()
    assert one.until_ended() == [EXIT_STOPPED] * 2
    assert any("trainer rank" in program for program in reachable.programs)
    assert not [program for program in reachable.programs if "torch.distributed" in program]
    assert not [name for name in reachable.threads if "tcpstore" in name or "elastic" in name]
    assert [address for address in reachable.addresses if not is_inner(address)] == []
    assert read_spec(one.paths.attempt(1) / "ranks.json").on_one_host == (launch["nodes"] == 1)
