"""Checkpoint and export writes interrupted by SIGKILL, a file size limit or missing permissions."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
from support.moments import kill_at_every_moment
from support.saes import new_sae

from trainer.checkpoints.checkpoint import Checkpoints
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import Position, damage
from trainer.saes.topk import TopK
from trainer.sharing.saelens import export_sae


def kill_saves(folder: Path) -> int:
    """Kill a run's fourth save at each of its disk calls, each time in a new folder; return the number of these
    calls.
    """
    tensors = {"/sae.W_enc": torch.ones(300, 300)}

    def save(moment: str, step: int, fvu: float) -> None:
        Checkpoints(folder / moment).save(tensors, Position(step, step), fvu)

    def three(moment: str) -> None:
        for step, fvu in ((1, 0.1), (2, 0.8), (3, 0.7)):
            save(moment, step, fvu)

    return kill_at_every_moment(three, lambda moment: save(moment, 4, 0.5))


def kill_exports(folder: Path) -> int:
    """Kill an export that replaces an earlier one at each of its disk calls; return the number of disk calls.

    Each attempt uses a new folder.
    """
    sae = new_sae(TopK, 32, 128, k=8).eval()

    def earlier(moment: str) -> None:
        export_sae(sae, folder / moment, {"training_tokens": 1})
        (folder / moment / "evals.json").write_text("mine")

    return kill_at_every_moment(earlier, lambda moment: export_sae(sae, folder / moment, {"training_tokens": 2}))


def save_until_full(folder: Path, limit: int, uid: int) -> list[str]:
    """Save a small and then a large checkpoint, with a file size limit or as another user if `limit` or `uid` is not 0.

    Return why the second save failed, and the folder's content afterwards.
    """
    if uid:
        # Use relative paths, because the other user may not have access to the parent folders.
        os.chdir(folder)
        os.setuid(uid)
        folder = Path("c")
    checkpoints, lines = Checkpoints(folder), []
    first = checkpoints.save({"small": torch.ones(50_000)}, Position(1, 1))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoints.save({"large": torch.ones(1_000_000)}, Position(2, 2))
    except UserError as error:
        lines.append(str(error))
    return [*lines, f"{sorted(file.name for file in folder.iterdir())} {damage(first)}"]
