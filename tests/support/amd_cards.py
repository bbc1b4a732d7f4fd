"""Cards of AMD's that stand for CPU processes, as a job of a machine without such cards needs them."""

from __future__ import annotations

from sae_tui.gpu.amd import Amd


class OnCpu(Amd):
    """Reads them through AMD SMI, and lets jobs on them run on the CPU."""

    cuda = False
