"""The trainer's command line on CPUs whose first exchange hangs, as between GPUs whose direct transfers are lost.

    python -m support.hanging_ranks join JOB.toml --out FOLDER

The ranks exchange over gloo and open their connections as ranks on GPUs do. `SAE_TUI_TEST_HANGS` lists the ranks that
hang after the last exchange; they no longer do once transfers go through the host's memory. The other ranks are then
through, and wait for them.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from trainer.cli import main
from trainer.parallel import opening, process_group
from trainer.parallel.group import Ranks
from trainer.ranks import staging

HANGING = "SAE_TUI_TEST_HANGS"
LIMIT_S = 3.0


class Hanging(Ranks):
    """A group whose exchange of owned rows never returns on some ranks."""

    def from_owners(self, tensor: torch.Tensor, n_rows: int) -> torch.Tensor:
        rows = super().from_owners(tensor, n_rows)
        if os.environ["RANK"] in os.environ.get(HANGING, "").split() and not staging.is_staged():
            threading.Event().wait()
        return rows


if __name__ == "__main__":
    # A rank that starts again shares the two cores with its peers.
    opening.LIMIT_S = 60.0 if staging.is_staged() else LIMIT_S
    process_group.__dict__.update(Ranks=Hanging, among_neighbours=lambda *_: None, _may_hang=lambda _device: True)
    sys.exit(main())
