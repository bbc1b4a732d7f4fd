"""Mirrors a run to TensorBoard event files in the run's folder, with a subfolder for each SAE in a sweep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.contract.paths import private_folder, refuse_link
from trainer.contract.settings.series import held_out, held_out_metrics, title_of
from trainer.reporting.mirrors.base import Mirror, MirroredRun

# The heading for the charts that TensorBoard shows under Custom Scalars.
HEADLINE = "held out"


class TensorBoard(Mirror):
    """Writes event files, which `tensorboard --logdir` can read during the run."""

    def __init__(self, run: MirroredRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder / "tensorboard"
        refuse_link(self._folder)
        private_folder(self._folder)
        # Drop an earlier attempt's values for the steps that this attempt repeats.
        purge = run.first_step + 1 if run.first_step else None
        self._writers = {
            label: SummaryWriter(str(self._folder / _as_folder(label)), purge_step=purge) for label in run.settings
        }

        for writer in self._writers.values():
            writer.add_custom_scalars(
                {HEADLINE: {title_of(held_out(name)): _pair(name) for name in held_out_metrics()}}
            )

    @property
    def place(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def log(self, label: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writers[label].add_scalar(name, value, step)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _pair(name: str) -> list[Any]:
    """Return a chart that shows a metric on held-out rows and on training batches."""
    return ["Multiline", [held_out(name), name]]


def _as_folder(label: str) -> str:
    """Return the name of an SAE's subfolder, or "." if the run is not a sweep."""
    return re.sub(r"[^\w.,=+-]", "_", label) or "."
