"""Reads the runs in a comparison, even while they are in progress; each result is immutable."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from sae_tui.compare.run import ComparedRun, ComparedSae, Curve, Sample
from trainer.contract.paths import DataDir
from trainer.contract.settings.series import SPEED, own_series, result_metrics, with_held_out
from trainer.contract.store.job_store import Control


class Comparison(msgspec.Struct, frozen=True):
    """All data shown by a screen or command that compares runs; `curves` holds the curves of `metric`."""

    saes: tuple[ComparedSae, ...] = ()
    metrics: tuple[str, ...] = ()
    metric: str = ""
    curves: tuple[Curve, ...] = ()


class CopiedRun(NamedTuple):
    """A job from another host, copied to a data folder on this host."""

    data: DataDir
    job_id: int
    host: str


class Runs:
    """Keeps the files of several runs open. Methods may be called from any thread; a lock serialises the calls."""

    def __init__(self, data: DataDir, job_ids: Sequence[int], copied: CopiedRun | None = None) -> None:
        """Open the runs in a data folder and, if given, a copied run."""
        control = Control(data.control_db, readonly=True)
        self._runs = [(ComparedRun(data, job_id), control) for job_id in job_ids]
        self._controls = [control]
        if copied:
            self._controls.append(Control(copied.data.control_db, readonly=True))
            self._runs.append((ComparedRun(copied.data, copied.job_id, copied.host), self._controls[-1]))
        self._lock = threading.Lock()

    def read(self, metric: str) -> Comparison:
        """Return the current state of the runs, with the curves of a metric; if no run has it, use the first metric."""
        with self._lock:
            saes = self._poll()
            metrics = _in_order({name for run, _ in saes for name in run.metrics})
            metric = metric if metric in metrics else next(iter(metrics), "")
            curves = [run.curve(metric, sae, place) for place, (run, sae) in enumerate(saes)]
            return Comparison(tuple(sae for _, sae in saes), metrics, metric, tuple(filter(None, curves)))

    def all_values(self, metric: str = "") -> Iterator[tuple[ComparedSae, str, Sample]]:
        """Yield (SAE, metric, sample) for every value of a metric, or of all metrics."""
        with self._lock:
            for run, sae in self._poll():
                for name in [metric] if metric else _in_order(run.metrics):
                    yield from zip(itertools.repeat(sae), itertools.repeat(name), run.all_values(name, sae))

    def close(self) -> None:
        with self._lock:
            for control in self._controls:
                control.close()
            for run, _ in self._runs:
                run.close()

    def _poll(self) -> list[tuple[ComparedRun, ComparedSae]]:
        """Return the SAEs from all runs that still exist, each with its run."""
        return [(run, sae) for run, control in self._runs if run.poll(control) for sae in run.saes]


def _in_order(metrics: set[str]) -> tuple[str, ...]:
    """Return the result metrics in their usual order, followed by the other metrics sorted by name."""
    results = [name for metric in result_metrics() for name in with_held_out(metric)]
    first = [*results, "loss", SPEED, "lr"]
    others = metrics.difference(first)
    minor = others - {*own_series(others)}
    return (*(name for name in first if name in metrics), *own_series(others), *sorted(minor))
