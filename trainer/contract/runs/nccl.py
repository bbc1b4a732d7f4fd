"""Environment variables for NCCL that are known to help; those that the user sets take precedence."""

from __future__ import annotations

from trainer.contract.planning.hardware import Box

# Transfers go through the host's memory instead of directly between GPUs.
STAGED = {"NCCL_P2P_DISABLE": "1"}
# Ranks of one machine need no network. NCCL would connect over the first interface it finds, which may be a VPN's or a
# container's with a firewall, and register memory with InfiniBand, which fails where little memory may be locked.
_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def presets(box: Box) -> dict[str, str]:
    """Return variables and values for ranks that are all on one machine, of which `box` holds the measurements."""
    return _ONE_HOST | (STAGED if box.peers_fail else {})
