"""Two "nodes" on this host: network namespaces that are joined by a link whose speed can be limited.

A process in one namespace cannot reach the abstract sockets of another one, so ranks on different nodes cannot share
memory, just like on different machines. A token bucket of the kernel limits the link.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

INTERFACE = "sae0"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


def obstacle() -> str:
    """Return why no nodes can be simulated on this machine, or "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root here"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    name = f"sae-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespace can be created: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Node:
    """A network namespace with one interface, `INTERFACE`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs a command on this node."""
        return ["ip", "netns", "exec", self.name, *argv]

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a rank on this node."""
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        return subprocess.Popen(self.command(*argv), env=os.environ | own, text=True, stderr=subprocess.PIPE)

    def enter(self) -> None:
        """Move this process, which must not have started threads, to this node."""
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self.name}").open("rb") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns failed")

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this node has sent to the other one, including headers."""
        file = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
        return int(subprocess.run(self.command("cat", str(file)), check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def two_nodes(bits_per_s: float | None = None) -> Iterator[tuple[Node, Node]]:
    """Yield two nodes; each sends at most `bits_per_s`."""
    stem = f"sae-{os.getpid()}-{next(_numbers)}"
    nodes = Node(f"{stem}-a"), Node(f"{stem}-b")
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
        _run("ip", "link", "add", INTERFACE, "netns", nodes[0].name, "type", "veth",
             "peer", "name", INTERFACE, "netns", nodes[1].name)  # fmt: skip
        for number, node in enumerate(nodes, 1):
            _run("ip", "-n", node.name, "addr", "add", f"10.83.0.{number}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", node.name, "link", "set", interface, "up")
            if bits_per_s:
                limit = ["rate", f"{bits_per_s:.0f}bit", "burst", "256kb", "latency", "50ms"]
                _run("tc", "-n", node.name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)


def enter_node_of(nodes: Sequence[Node], on_node: int, rank: int) -> None:
    """Move a rank's process to its node; each node has `on_node` consecutive ranks. Ranks on nodes meet in a file."""
    os.environ["SLURM_JOB_ID"] = "1"
    nodes[rank // on_node].enter()


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)
