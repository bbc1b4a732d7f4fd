"""Runs the trainer's command line on CPU ranks whose first exchange hangs, as if direct GPU transfers lost data.

    python -m support.hanging_ranks join JOB.toml --out FOLDER

The ranks exchange tensors over gloo and open their connections like GPU ranks. The ranks listed in
`SAE_TUI_TEST_HANGS` hang after the last exchange that opens connections, unless transfers go through host memory. The
other ranks have then finished this exchange and wait for the hanging ranks. If `SAE_TUI_TEST_HUNG_FILE` is set, the
ranks hang in a later step instead, and create this file.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainer.cli import main
from trainer.parallel import opening, process_group
from trainer.parallel.group import DistributedGroup
from trainer.ranks import staging

HANGING, HUNG_FILE = "SAE_TUI_TEST_HANGS", "SAE_TUI_TEST_HUNG_FILE"
LIMIT_S, STEPS = 3.0, 50


class Hanging(DistributedGroup):
    """A group with an exchange that never returns on some ranks."""

    n_sums = 0

    def start_sums(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        self.n_sums += 1
        if self.n_sums > STEPS and _hangs() and (file := os.environ.get(HUNG_FILE)):
            Path(file).touch()
            threading.Event().wait()
        return super().start_sums(tensors)

    def from_owners(self, tensor: torch.Tensor, n_rows: int) -> torch.Tensor:
        rows = super().from_owners(tensor, n_rows)
        if _hangs() and HUNG_FILE not in os.environ:
            threading.Event().wait()
        return rows


def _hangs() -> bool:
    return os.environ["RANK"] in os.environ[HANGING].split() and not staging.is_staged()


if __name__ == "__main__":
    # A restarted rank shares the two cores with its peers, so it needs a longer limit.
    opening.LIMIT_S = 60.0 if staging.is_staged() or HUNG_FILE in os.environ else LIMIT_S
    process_group.__dict__.update(
        DistributedGroup=Hanging, among_neighbours=lambda *_: None, _may_hang=lambda _device: True
    )
    sys.exit(main())
