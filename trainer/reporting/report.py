"""What a run has measured: rows for the store, lines for the log."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from torch import Tensor

from trainer.contract.store.metrics_store import Row
from trainer.reporting import rank_log
from trainer.reporting.progress import Progress

# One value for every rank.
_PER_RANK = ("rank_tokens_per_s", "step_ms", "busy_ms", "data_ms", "rank_memory_bytes")


class Report:
    """The newest values of every SAE of a run by its label, which is "" where there is no sweep.

    A sweep's rows are named like `fvu@k=16`; those of its first SAE also go without a label, as the run's own.
    """

    def __init__(
        self, progress: Progress, is_main: bool, labels: list[str], expected_step_s: float | None = None
    ) -> None:
        self._progress, self._is_main = progress, is_main
        self._expected_step_s = expected_step_s
        self.values: dict[str, dict[str, float]] = {label: {} for label in labels}
        self._rate = 0.0
        self._untold: dict[str, list[tuple[str, str, str]]] = {}

    def pace(self, step: int, values: Mapping[str, float], totals: Mapping[str, Tensor]) -> None:
        """Record how fast the run and every rank is."""
        self._rate = values["tokens_per_s"]
        self._rows(step, values)
        for name in _PER_RANK:
            self._progress.rows([Row(name, step, value, rank) for rank, value in enumerate(totals[name].tolist())])

    def compare(self, step: int, step_ms: float) -> None:
        """Once: what the cost model had said of a step, beside what is measured."""
        if self._expected_step_s is None:
            return
        expected_ms, self._expected_step_s = 1000 * self._expected_step_s, None
        self._rows(step, {"expected_step_ms": expected_ms})
        said = f"a step takes {step_ms:.1f} ms, where {expected_ms:.1f} ms were expected"
        self.event("pace", said)
        rank_log.say(said)

    def learnt(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Take in what a log interval has given, by label."""
        for label, found in values.items():
            self.values[label] |= found

    def interval(self, step: int, total_steps: int) -> None:
        """Record and logs what a log interval has given."""
        for label, values in self.values.items():
            of_training = {name: value for name, value in values.items() if not name.startswith("heldout_")}
            self._sae_rows(step, label, of_training)
            shown = of_training if self._is_main else {"loss": values["loss"]}
            rank_log.say(rank_log.row(step, total_steps, shown, self._rate, label))

    def heldout(self, step: int, measured: Mapping[str, Mapping[str, float]]) -> None:
        """Record and logs what the held-out data has given."""
        for label, values in measured.items():
            self.values[label] |= values
            self._sae_rows(step, label, values)
            if self._is_main:
                found = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
                rank_log.say("  ".join([f"step {step}", *([label] if label else []), found]))

    def event(self, kind: str, message: str, label: str = "", level: str = "") -> None:
        level = level or ("warning" if kind in ("skipped", "missed_l0", "given_up") else "info")
        said = f"{message} ({label})" if label else message
        if self._is_main:
            self._progress.event(kind, said, level)
        elif label:
            # What concerns the whole run tells rank 0 itself.
            self._untold.setdefault(label, []).append((kind, said, level))

    def take_events(self) -> dict[str, list[tuple[str, str, str]]]:
        """What happened since the last call to SAEs of this rank that others do not have, by label."""
        taken, self._untold = self._untold, {}
        return taken

    def deliver(self, events: Mapping[str, Iterable[tuple[str, str, str]]]) -> None:
        """Record what other ranks had to tell of their SAEs."""
        if not self._is_main:
            return
        for of_label in events.values():
            for kind, said, level in of_label:
                self._progress.event(kind, said, level)

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
