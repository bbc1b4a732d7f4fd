"""AMD GPUs for tests on machines without a GPU. Jobs on these GPUs run on the CPU."""

from __future__ import annotations

from sae_tui.gpu.amd import Amd


class OnCpu(Amd):
    """Reads the GPUs through AMD SMI, but runs jobs on the CPU."""

    cuda = False
