"""Mirrors a run to Trackio as one run; a sweep's metrics are grouped by SAE."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.reporting.mirrors.base import PROJECT, Mirror, MirroredRun


class Trackio(Mirror):
    """Stores metrics locally, in TRACKIO_DIR or the Hugging Face cache; uploads them only if TRACKIO_SPACE_ID is set.

    A resumed run is found by its name, which ends with the run's id. Repeated steps are stored twice.
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
        """Do nothing, because a Trackio thread writes the values."""

    def close(self) -> None:
        self._run.finish()
