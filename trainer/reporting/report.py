"""Reports a run's measurements as rows for the store and as lines for the log."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from torch import Tensor

from trainer.activations.heavy_dimensions import HeavyDimensions
from trainer.activations.outliers import LeftOut
from trainer.contract.runs.checkpoint_manifest import Best
from trainer.contract.runs.how_far import BEST_FVU, BEST_STEP, OVERFITTING, PASSES
from trainer.contract.runs.report_card import held_out_words
from trainer.contract.settings.declare import show
from trainer.contract.settings.series import (
    COOLED_FVU,
    HELD_OUT,
    NOT_FINITE,
    OUTLIERS,
    PER_RANK,
    log_words,
    series_named,
    title_of,
)
from trainer.contract.store.metrics_store import MetricRow
from trainer.contract.store.rows import DROPPED
from trainer.contract.store.seeds import names_layer
from trainer.contract.store.twins import without_twins
from trainer.contract.wording import DROP_ZERO_ROWS, MANY_ZERO, join_words, zero_rows
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress


class Report:
    """Keeps and reports every SAE's latest values, by label; if the run is not a sweep, the only label is "".

    In a sweep, rows have names like `fvu@k=16`. The rows of the first SAE that is not dropped are also stored without a
    label, to represent the run.
    """

    def __init__(
        self, progress: RunProgress, is_main: bool, labels: list[str], expected_step_s: float | None = None
    ) -> None:
        self._progress, self._is_main = progress, is_main
        self._expected_step_s = expected_step_s
        self.values: dict[str, dict[str, float]] = {label: {} for label in labels}
        self._rate = 0.0
        # Hooks whose outliers have been reported.
        self._reported_outliers: set[str] = set()
        self._untold: dict[str, list[tuple[str, str, str]]] = {}

    def pace(self, step: int, values: Mapping[str, float], totals: Mapping[str, Tensor]) -> None:
        """Record the run's speed and, from `totals`, every rank's speed."""
        self._rate = values["tokens_per_s"]
        self._rows(step, values)
        for name in PER_RANK:
            self._progress.rows(
                [MetricRow(name, step, value, rank) for rank, value in enumerate(totals[name].tolist())]
            )

    def compare(self, step: int, step_ms: float) -> None:
        """Report the measured step time in ms and the time predicted by the cost model, once."""
        if self._expected_step_s is None:
            return
        expected_ms, self._expected_step_s = 1000 * self._expected_step_s, None
        self._rows(step, {"expected_step_ms": expected_ms})
        message = f"{step_ms:.1f} ms per step (expected {expected_ms:.1f} ms)"
        self.event("pace", message)
        rank_log.say(message)

    def left_out(self, step: int, found: LeftOut, times: float, hook: str = "", labels: Iterable[str] = ("",)) -> None:
        """Record the fraction of rows that were left out, and report outliers once.

        With several hooks, the fractions are for `hook`, and `labels` are this hook's SAEs.
        """
        n_seen = max(1, found.n_seen)
        for label in labels:
            self._sae_rows(step, label, {OUTLIERS: found.outliers / n_seen, NOT_FINITE: found.not_finite / n_seen})
        self._report_outliers(found.outliers / n_seen, f"the rows{_at(hook)} up to step {step}", times, hook)

    def sampled(self, found: LeftOut, n_zero: int, times: float, hook: str = "") -> None:
        """Report outliers and zero rows in the first sample of a hook's rows."""
        n_seen = max(1, found.n_seen)
        of_rows = f"a sample of {n_seen:,} rows{_at(hook)}"
        self._report_outliers(found.outliers / n_seen, of_rows, times, hook)
        if n_zero > MANY_ZERO * n_seen:
            dropped = f"{DROP_ZERO_ROWS} leaves them out"
            level, remedy = ("info", "they are left out") if found.zero else ("warning", dropped)
            self.log("zero_rows", f"{zero_rows(n_zero / n_seen, of_rows)}; {remedy}", level)

    def held_out(self, n_rows: int, hold_out: str, n_texts: int, asked: str) -> None:
        """Report how many rows are held out and how they were chosen; the setting `asked` may be "auto"."""
        if not n_rows:
            return
        self.log("held_out", f"{held_out_words(n_rows, hold_out, n_texts)} (data.hold_out = {show(asked)})")

    def copies(self, sentence: str, hook: str = "") -> None:
        """Warn that some held-out rows are also training rows; `sentence` is "" if there are no such rows."""
        if sentence:
            self.warn("copies", f"{sentence}{_at(hook)}; remove repeated texts or files from the data")

    def heldout_left_out(self, found: LeftOut, hook: str = "") -> None:
        """Report how many of a hook's held-out rows are excluded from all metrics, and why."""
        reasons = {"not finite": found.not_finite, "with a huge norm": found.outliers, "zero": found.zero}
        if counted := [f"{n:,} {reason}" for reason, n in reasons.items() if n]:
            of_rows = f"{found.n_seen:,} held-out rows{_at(hook)}"
            self.log("heldout_rows", f"all measurements on {of_rows} leave out {join_words(counted)}")

    def heavy(self, found: HeavyDimensions, hook: str = "") -> None:
        """Warn about a few dimensions that account for most of the variance in a hook's rows."""
        self.warn("heavy_dimensions", f"{found.sentence()}{_at(hook)}; {found.remedy}")

    def scaled(self, sentence: str, hook: str = "") -> None:
        """Report which dimensions of a hook are left out or scaled down; `sentence` is "" if there are none."""
        if sentence:
            self.log("dimensions", f"{sentence}{_at(hook)}; this run's FVU is measured after this change")

    def _report_outliers(self, share: float, of_rows: str, times: float, hook: str) -> None:
        if not share or hook in self._reported_outliers:
            return
        self._reported_outliers.add(hook)
        norm = f"a norm of more than {times:g} times the median"
        self.warn("outliers", f"{100 * share:.2g} % of {of_rows} have {norm} and are left out (data.max_norm)")

    def warn(self, kind: str, message: str) -> None:
        """Record and log a warning about the run."""
        self.log(kind, message, "warning")

    def log(self, kind: str, message: str, level: str = "info") -> None:
        """Record and log an event about the run."""
        self.event(kind, message, level=level)
        rank_log.say(message)

    def learnt(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Store the values for a log interval, by label."""
        for label, fresh in values.items():
            self.values[label] |= fresh

    def interval(self, step: int, total_steps: int) -> None:
        """Record and log the values for a log interval."""
        for label, values in self.values.items():
            of_training = {name: value for name, value in values.items() if not name.startswith(HELD_OUT)}
            self._sae_rows(step, label, of_training)
            shown = of_training if self._is_main else {"loss": values["loss"]}
            rank_log.say(rank_log.row(step, total_steps, shown, self._rate, label))

    def heldout(self, step: int, measured: Mapping[str, Mapping[str, float]]) -> None:
        """Record and log the values measured on held-out rows, by label."""
        for label, values in measured.items():
            self.values[label] |= values
            self._sae_rows(step, label, values)
            if self._is_main:
                shown = "  ".join(
                    f"{title_of(name)} {log_words(one, series_named(name))}" for name, one in values.items()
                )
                rank_log.say("  ".join([f"step {step}", *([label] if label else []), shown]))

    def halved(self, step: int, fvus: Mapping[str, float], dropped: Mapping[str, int], results: Iterable[str]) -> None:
        """Record the FVUs of cooled-down copies, and the SAEs dropped because of them."""
        for label, fvu in fvus.items():
            self._rows(step, {f"{COOLED_FVU}@{label}": fvu})
        for label in dropped.keys() & self.values.keys():
            self._rows(step, {f"{DROPPED}@{label}": step})
            del self.values[label]
        for words in results:
            self.log("halving", f"step {step}, comparison of cooled-down copies: {words}")

    def how_far(self, step: int, best: Best | None, passes: float | None) -> None:
        """Record the number of passes over the training rows, and the best held-out FVU with its step."""
        of_best = {BEST_STEP: best.step, BEST_FVU: best.fvu} if best else {}
        self._rows(step, of_best | ({} if passes is None else {PASSES: passes}))

    def overfitting(self, message: str) -> None:
        """Warn that an SAE is overfitting."""
        self.warn(OVERFITTING, message)

    def event(self, kind: str, message: str, label: str = "", level: str = "") -> None:
        level = level or ("warning" if kind in ("skipped", "missed_l0", "given_up") else "info")
        labelled = f"{message} ({label})" if label else message
        if self._is_main:
            self._progress.event(kind, labelled, level)
        elif label:
            # Rank 0 records events about the run, which have no label.
            self._untold.setdefault(label, []).append((kind, labelled, level))

    def take_events(self) -> dict[str, list[tuple[str, str, str]]]:
        """Return the events recorded for this rank's SAEs since the last call, by label; {} on rank 0."""
        taken, self._untold = self._untold, {}
        return taken

    def deliver(self, events: Mapping[str, Iterable[tuple[str, str, str]]]) -> None:
        """Record events for other ranks' SAEs; do nothing on ranks other than 0."""
        if not self._is_main:
            return
        for of_label in events.values():
            for kind, message, level in of_label:
                self._progress.event(kind, message, level)

    def mean(self, name: str) -> float | None:
        """Return a metric's mean over the run's SAEs, except random twins, or None if it has not been measured."""
        measured = [self.values[label][name] for label in without_twins(self.values) if name in self.values[label]]
        return statistics.fmean(measured) if measured else None

    def _sae_rows(self, step: int, label: str, values: Mapping[str, float]) -> None:
        if label:
            self._rows(step, {f"{name}@{label}": value for name, value in values.items()})
        if names_layer(label):
            # The layers of a cross-layer transcoder are one SAE. The last layer completes the means.
            if label == [*self.values][-1]:
                self._rows(step, {name: mean for name in values if (mean := self.mean(name)) is not None})
        elif not label or label == next(iter(self.values)):
            self._rows(step, values)

    def _rows(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.rows([MetricRow(name, step, value) for name, value in values.items()])


def _at(hook: str) -> str:
    return f" at {hook}" if hook else ""
