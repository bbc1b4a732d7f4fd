"""What a run has measured: rows for the store, lines for the log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from torch import Tensor

from trainer import log
from trainer.contract.series import Row
from trainer.progress import Progress

# One value for every rank.
_PER_RANK = ("rank_tokens_per_s", "step_ms", "busy_ms", "data_ms", "rank_memory_bytes")


class Report:
    """The newest values of every SAE of a run by its label, which is "" where there is no sweep.

    A sweep's rows are named like `fvu@k=16`; those of its first SAE also go without a label, as the run's own.
    """

    def __init__(self, progress: Progress, is_main: bool, labels: list[str]) -> None:
        self._progress, self._is_main = progress, is_main
        self.values: dict[str, dict[str, float]] = {label: {} for label in labels}
        self._rate = 0.0

    def pace(self, step: int, values: Mapping[str, float], totals: Mapping[str, Tensor]) -> None:
        """Records how fast the run and every rank is."""
        self._rate = values["tokens_per_s"]
        self._rows(step, values)
        for name in _PER_RANK:
            self._progress.rows([Row(name, step, value, rank) for rank, value in enumerate(totals[name].tolist())])

    def interval(self, step: int, total_steps: int) -> None:
        """Records and logs what a log interval has given."""
        for label, values in self.values.items():
            of_training = {name: value for name, value in values.items() if not name.startswith("heldout_")}
            self._sae_rows(step, label, of_training)
            shown = of_training if self._is_main else {"loss": values["loss"]}
            log.say(log.row(step, total_steps, shown, self._rate, label))

    def heldout(self, step: int, measured: Mapping[str, Mapping[str, float]]) -> None:
        """Records and logs what the held-out data has given."""
        for label, values in measured.items():
            self.values[label] |= values
            self._sae_rows(step, label, values)
            if self._is_main:
                found = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
                log.say("  ".join([f"step {step}", *([label] if label else []), found]))

    def event(self, kind: str, message: str, label: str = "", level: str = "") -> None:
        level = level or ("warning" if kind in ("skipped", "missed_l0", "given_up") else "info")
        self._progress.event(kind, f"{message} ({label})" if label else message, level)

    def mean(self, name: str) -> float | None:
        """The mean over the run's SAEs; None before it was measured."""
        found = [values[name] for values in self.values.values() if name in values]
        return statistics.fmean(found) if found else None

    def _sae_rows(self, step: int, label: str, values: Mapping[str, float]) -> None:
        if label:
            self._rows(step, {f"{name}@{label}": value for name, value in values.items()})
        if label == next(iter(self.values)):
            self._rows(step, values)

    def _rows(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.rows([Row(name, step, value) for name, value in values.items()])
