"""AMD GPUs for machines without any: jobs on them run on the CPU."""

from __future__ import annotations

from sae_tui.gpu.amd import Amd


class OnCpu(Amd):
    """Reads the GPUs through AMD SMI, and runs jobs on them on the CPU."""

    cuda = False
