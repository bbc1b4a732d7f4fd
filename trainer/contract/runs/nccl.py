"""What NCCL is told by its environment, where that is known to help; what the user says there counts for more."""

from __future__ import annotations

from trainer.contract.planning.hardware import Box

# Through the host's memory instead of another GPU's own.
STAGED = {"NCCL_P2P_DISABLE": "1"}
# Ranks of one machine need no network. NCCL would meet over the first interface it finds, a VPN's or a container's with
# a firewall among them, and register memory with InfiniBand, which fails where little of it may be locked.
_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def presets(box: Box) -> dict[str, str]:
    """Variables and their values for ranks that are all on this box, of which so much was measured."""
    return _ONE_HOST | (STAGED if box.peers_fail else {})
