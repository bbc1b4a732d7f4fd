"""The series of values in a run: the registered metrics and a few other series, and where they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.contract import wording
from trainer.contract.settings.catalog import ARCHITECTURES, METRICS, CurveAxis, MetricEntry, Series

# The metric used to compare runs, checkpoints and the SAEs in a sweep.
CRITERION = "fvu"
LOSS = Series("loss", better="lower", curve=CurveAxis(from_zero=False))
LR = Series("learning rate", format=".1e", prominence="result")
TOKENS_PER_S = Series("tokens/s", better="higher", format=".0f", prominence="result")
_OTHERS = {"loss": LOSS, "tokens_per_s": TOKENS_PER_S, "lr": LR}
# The speed, in the unit of the kind of job, and the peak memory, which is copied to the job's row.
SPEED, PEAK_MEMORY = "tokens_per_s", "memory_bytes"
# How a command's processes use the machine. The "steps" of these series are seconds since the job first started.
USAGE = CPU_PERCENT, HOST_MEMORY, GPU_PERCENT, GPU_MEMORY = (
    "cpu_percent",
    "host_memory_bytes",
    "gpu_percent",
    "gpu_memory_bytes",
)
# The FVU of an SAE's cooled-down copy; see `train.halving`.
COOLED_FVU = "cooled_fvu"
# Titles for other series in a run: the loss terms, and measurements of the run itself.
_TITLES = {
    "mse": "squared error",
    "inner_mse": "squared error of the inner SAEs",
    "auxk": "AuxK loss",
    "sparsity": "sparsity loss",
    "gate_l1": "L1 loss of the gate",
    "gate_mse": "squared error of the gate",
    "grad_norm": "gradient norm",
    "skipped_steps": "skipped steps",
    "outlier_fraction": "outliers left out",
    "not_finite_fraction": "rows left out as not finite",
    "memory_bytes": "highest memory of a rank, bytes",
    "step_ms": "step, ms",
    "expected_step_ms": "expected step time, ms",
    "busy_ms": "computing, ms",
    "data_ms": "waiting for data, ms",
    "rank_tokens_per_s": "tokens/s of the rank",
    "rank_memory_bytes": "memory of the rank, bytes",
    COOLED_FVU: "FVU of a cooled-down copy",
    "dropped_at_step": "step at which the SAE was dropped",
    CPU_PERCENT: "CPU, % of a core",
    HOST_MEMORY: "memory, bytes",
    GPU_PERCENT: "GPU, %",
    GPU_MEMORY: "memory of the fullest GPU, bytes",
}
HELD_OUT = "heldout_"
# Marks a value from the last batches that is shown in place of a held-out value before the first evaluation.
OF_BATCH = "~"
# Series with one value per rank.
PER_RANK = ("rank_tokens_per_s", "step_ms", "busy_ms", "data_ms", "rank_memory_bytes")
ERROR = "_error"
# The names of the series with the shares of rows left out, one per reason.
SHARES_LEFT_OUT = OUTLIERS, NOT_FINITE = "outlier_fraction", "not_finite_fraction"


def held_out(name: str) -> str:
    """Return the name under which a metric's values on held-out data are stored."""
    return f"{HELD_OUT}{name}"


def error_of(name: str) -> str:
    """Return the name under which a series' standard error is stored."""
    return f"{name}{ERROR}"


def held_out_metrics() -> dict[str, MetricEntry]:
    """Return the metrics that are also measured on held-out data."""
    return {name: entry for name, entry in METRICS.items() if entry.held_out}


def result_metrics() -> dict[str, Series]:
    """Return the metrics included in a run's results."""
    return {name: entry.series for name, entry in METRICS.items() if entry.series.prominence != "minor"}


def key_metrics() -> dict[str, Series]:
    """Return the metrics shown even if space is limited."""
    return {name: series for name, series in result_metrics().items() if series.prominence == "key"}


def curves(architectures: Sequence[str] = ()) -> dict[str, Series]:
    """Return the series drawn as curves on the job screen, most informative first.

    Curves that are redundant for all of the given architectures are left out.
    """
    of_metrics = {name: entry.series for name, entry in METRICS.items() if entry.series.curve}
    redundant = [set(ARCHITECTURES[name].redundant_curves) for name in architectures if name in ARCHITECTURES]
    left_out = set.intersection(*redundant) if redundant else set()
    found = {CRITERION: of_metrics.pop(CRITERION), **of_metrics, **_OTHERS}
    return {name: series for name, series in found.items() if name not in left_out}


def own_series(names: Iterable[str]) -> list[str]:
    """Return the series that a program reports, losses first; leave out the series measured by sae-tui."""
    return sorted(set(names) - {*USAGE, SPEED, PEAK_MEMORY}, key=lambda name: (_loss_place(name), name))


def _loss_place(name: str) -> int:
    words = name.lower()
    return 0 if words == "loss" else 3 if "loss" not in words else 1 if "train" in words else 2


def measured_names() -> list[str]:
    """Return the names of all results for an SAE: each metric, preceded by its held-out version if there is one."""
    return [each for name in result_metrics() for each in with_held_out(name)]


def with_held_out(name: str) -> list[str]:
    """Return the name of a metric, preceded by the name of its held-out version if there is one."""
    return [held_out(name), name] if name in held_out_metrics() else [name]


def series_named(name: str) -> Series:
    """Return the series stored under this name, or one with default properties if the name is unknown."""
    entry = METRICS.get(name.removeprefix(HELD_OUT))
    if entry:
        return entry.series
    return _OTHERS.get(name) or Series(_TITLES.get(name, name), curve=None, prominence="minor")


def title_of(name: str) -> str:
    """Return the title of a stored series, such as `batch FVU` for `fvu` and `held-out FVU` for `heldout_fvu`."""
    base, _, label = name.partition("@")
    is_error = base.endswith(ERROR)
    base = base.removesuffix(ERROR) if is_error else base
    where = "held-out " if base.startswith(HELD_OUT) else "batch " if base in held_out_metrics() else ""
    title = f"{where}{series_named(base).title}{', standard error' if is_error else ''}"
    return f"{title}, {label}" if label else title


def log_words(value: float, series: Series) -> str:
    """Format a value for the log."""
    return f"{value:{series.format}} {series.unit}".rstrip()


def measure(value: float, series: Series) -> str:
    """Format a value from a series, with its unit."""
    text = wording.share(value) if series.is_share else wording.number(value)
    return f"{text} {series.unit}".rstrip()
