"""Environment variables for NCCL that are known to help; the user's own values take precedence."""

from __future__ import annotations

from trainer.contract.planning.hardware import MeasuredHardware

# Variables that route transfers through host memory instead of directly between GPUs.
STAGED = {"NCCL_P2P_DISABLE": "1"}
# Ranks on one machine need no network. By default, NCCL connects through the first interface that it finds, which may
# belong to a VPN or to a container behind a firewall. NCCL also registers memory with InfiniBand, which fails if the
# limit on locked memory is low.
_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def presets(box: MeasuredHardware) -> dict[str, str]:
    """Return the variables for ranks on one machine; `box` contains the speeds measured on that machine."""
    return _ONE_HOST | (STAGED if box.peers_fail else {})
