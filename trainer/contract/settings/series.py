"""Which series of a run are shown where: the metrics of the registry, and the few others that are shown like them."""

from __future__ import annotations

from trainer.contract import wording
from trainer.contract.settings.catalog import METRICS, Axis, MetricEntry, Series

# The metric by which runs, checkpoints and the SAEs of a sweep are judged.
CRITERION = "fvu"
LOSS = Series("loss", better="lower", curve=Axis(from_zero=False))
LR = Series("learning rate", format=".1e", curve=None, prominence="result")
HELD_OUT = "heldout_"
# Series with a value for every rank.
PER_RANK = ("rank_tokens_per_s", "step_ms", "busy_ms", "data_ms", "rank_memory_bytes")
ERROR = "_error"
# Shares of the rows so far that were left out.
SHARES_LEFT_OUT = OUTLIERS, NOT_FINITE = "outlier_fraction", "not_finite_fraction"


def held_out(name: str) -> str:
    """Return the name by which the values of a metric on held-out data are stored."""
    return f"{HELD_OUT}{name}"


def error_of(name: str) -> str:
    """Return the name by which the standard error of a series is stored, where it is known."""
    return f"{name}{ERROR}"


def held_out_metrics() -> dict[str, MetricEntry]:
    """Return the metrics that are measured on held-out data too."""
    return {name: entry for name, entry in METRICS.items() if entry.held_out}


def result_metrics() -> dict[str, Series]:
    """Return the metrics that are among the results of a run."""
    return {name: entry.series for name, entry in METRICS.items() if entry.series.prominence != "minor"}


def key_metrics() -> dict[str, Series]:
    """Return the metrics that are shown also where there is little room."""
    return {name: series for name, series in result_metrics().items() if series.prominence == "key"}


def curves() -> dict[str, Series]:
    """Return the series of which a job's screen has a curve, in the order in which it has them."""
    return {"loss": LOSS, **{name: entry.series for name, entry in METRICS.items() if entry.series.curve}}


def measured_names() -> list[str]:
    """Return the names of all results of an SAE: its metrics, and these on held-out data."""
    return [*result_metrics(), *(held_out(name) for name in held_out_metrics())]


def with_held_out(name: str) -> list[str]:
    """Return the name of a metric and, where it is measured on held-out data too, the name of that."""
    return [name, held_out(name)] if name in held_out_metrics() else [name]


def series_named(name: str) -> Series:
    """Return the series that is stored by this name; a plain one where no metric is called so."""
    entry = METRICS.get(name.removeprefix(HELD_OUT))
    return entry.series if entry else Series(name, curve=None, prominence="minor")


def log_words(value: float, series: Series) -> str:
    """Write a value as a line of the log has it."""
    return f"{value:{series.format}} {series.unit}".rstrip()


def measure(value: float, series: Series) -> str:
    """Write a value of a series, with its unit."""
    text = wording.share(value) if series.is_share else wording.number(value)
    return f"{text} {series.unit}".rstrip()
