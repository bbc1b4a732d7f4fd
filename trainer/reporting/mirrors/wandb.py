"""Weights & Biases: a run for each SAE, in a group named like the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Literal

from trainer.contract.paths import private_folder, refuse_link
from trainer.contract.settings.series import held_out, held_out_metrics
from trainer.reporting.mirrors.base import PROJECT, Mirror, MirroredRun


class WandB(Mirror):
    """Uploads where the user is logged in, and else writes files that `wandb sync` uploads.

    WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and the like hold. Of steps that a resumed run trains again W&B keeps the
    values that it has.
    """

    def __init__(self, run: MirroredRun) -> None:
        import wandb

        # Where W&B writes below the folder that it is told.
        self._folder = run.folder / "wandb"
        refuse_link(self._folder)
        private_folder(self._folder)
        # The log of a rank stays as it is, and nothing is told of the machine or the code.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        self._runs = {}
        mode = _mode()
        for number, (label, table) in enumerate(run.settings.items()):
            self._runs[label] = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=f"{run.id}-{number}" if label else run.id,
                name=f"{run.name} {label}".strip(),
                group=f"{run.name}-{run.id}" if label else None,
                config=table,
                dir=str(run.folder),
                mode=mode,
                resume="allow",
                # Several at a time.
                reinit="create_new",
                settings=settings,
            )

            if table.get("data", {}).get("held_out_tokens") != 0:
                _put_first(self._runs[label])

    @property
    def place(self) -> str:
        first = next(iter(self._runs.values()))
        if first.offline:
            return f"offline; `wandb sync {self._folder}/offline-run-*` uploads it"
        return str(first.url or "nowhere, since W&B is disabled")

    def log(self, label: str, step: int, values: Mapping[str, float]) -> None:
        self._runs[label].log(dict(values), step=step)

    def flush(self) -> None:
        """Do nothing: a process of W&B has the values."""

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


def _put_first(run: Any) -> None:
    """Have W&B show held-out values in the summary of a run; values of batches are shown as curves only."""
    for name in held_out_metrics():
        run.define_metric(held_out(name), summary="last")
        run.define_metric(name, summary="none")


def _mode() -> Literal["offline"] | None:
    """Return None, so that W&B's own settings hold, where the user has chosen a mode or is logged in; else "offline".

    W&B would ask for a key on a terminal.
    """
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return None
    with contextlib.suppress(TypeError):
        # Before `prompt` was there it could ask.
        return None if wandb.login(prompt=False, verify=False) else "offline"
    return None if os.environ.get("WANDB_API_KEY") else "offline"
