"""Mirrors a run to Weights & Biases, with one W&B run for each SAE; a sweep's W&B runs form a group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Literal

from trainer.contract.paths import private_folder, refuse_link
from trainer.contract.settings.series import held_out, held_out_metrics
from trainer.reporting.mirrors.base import PROJECT, Mirror, MirroredRun


class WandB(Mirror):
    """Uploads metrics if the user is logged in; otherwise writes files for `wandb sync`.

    WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and similar variables apply. If a resumed run repeats steps, W&B keeps their
    first values.
    """

    def __init__(self, run: MirroredRun) -> None:
        import wandb

        # W&B writes to this subfolder of `dir`.
        self._folder = run.folder / "wandb"
        refuse_link(self._folder)
        private_folder(self._folder)
        # Do not capture the rank's log, and upload nothing about the machine or the code.
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
                # Several runs can be open at the same time.
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
        """Do nothing, because W&B's own process sends the values."""

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


def _put_first(run: Any) -> None:
    """Show held-out values in a W&B run's summary, and values from training batches only as curves."""
    for name in held_out_metrics():
        run.define_metric(held_out(name), summary="last")
        run.define_metric(name, summary="none")


def _mode() -> Literal["offline"] | None:
    """Return None if WANDB_MODE forbids uploads or a key is known, so that W&B chooses the mode; otherwise, "offline".

    Without "offline", W&B would prompt for a key on the terminal.
    """
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return None
    with contextlib.suppress(TypeError):
        # W&B versions without `prompt` might prompt for a key here.
        return None if wandb.login(prompt=False, verify=False) else "offline"
    return None if os.environ.get("WANDB_API_KEY") else "offline"
