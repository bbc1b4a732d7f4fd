"""Trackio: one run in the project of this program, the SAEs of a sweep by the groups of their metrics."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.reporting.mirrors.base import PROJECT, Mirror, MirroredRun


class Trackio(Mirror):
    """Stores locally, in TRACKIO_DIR or Hugging Face's cache, and uploads only where TRACKIO_SPACE_ID says so.

    A run is found again by its name, which ends with its id. Steps that a resumed run trains again are in it twice.
    """

    def __init__(self, run: MirroredRun) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=f"{run.name}-{run.id}",
            config=next(iter(run.settings.values())) if len(run.settings) == 1 else run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @property
    def place(self) -> str:
        return f'trackio show --project {PROJECT}, run "{self._run.name}"'

    def log(self, label: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{label}/{name}" if label else name: value for name, value in values.items()}, step=step)

    def flush(self) -> None:
        """Do nothing: a thread of Trackio writes the values."""

    def close(self) -> None:
        self._run.finish()
