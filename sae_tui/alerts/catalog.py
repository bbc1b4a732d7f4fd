"""Defines the kinds of alerts: for each, a measured value, its bound, and how long the value must be out of bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from sae_tui.alerts.hysteresis import Rule
from sae_tui.gpu import faults
from sae_tui.gpu.base import Condition, GpuSample
from sae_tui.jobs.gpus.availability import Holders
from sae_tui.jobs.gpus.idle import IDLE_AFTER_S
from sae_tui.settings import Settings
from trainer.contract.wording import gibibytes

# The fallback for a GPU that does not report its throttling temperature.
USUAL_SLOWDOWN_C = 90
GIB = 1 << 30


class AlertReadings(NamedTuple):
    """The current readings: the latest sample from each GPU, the GPU holders, and the free disk space."""

    samples: Sequence[GpuSample] = ()
    held: Holders = Holders()
    free_bytes: int | None = None


class MeasuredValue(NamedTuple):
    """A measured value, its location as an id (`gpu-0`, `disk`) and in words, and the alert text.

    `value` is None if it is unknown, in which case no alert is raised. `about` contains additional fields for the
    user's command.
    """

    place: str
    place_words: str
    value: float | None
    words: str
    about: Mapping[str, str | int | None] = {}


class AlertKind(NamedTuple):
    """A kind of alert. `setting` names the setting that holds the bound or, for a flag, how long it must stay set.

    The alert is cleared once the value has been better than the bound by more than `slack` for `clear_s` seconds.
    """

    name: str
    title: str
    setting: str
    measure: Callable[[AlertReadings], Iterable[MeasuredValue]]
    bad: Literal["above", "below", "flag"]
    clear_s: float
    raise_s: float = 0.0
    slack: float = 0.0
    # For a flag: the seconds per unit of its setting, and how long the problem has already lasted when the flag is set.
    unit_s: float = 1.0
    passed_s: float = 0.0

    def rule(self, settings: Settings) -> Rule | None:
        """Return the rule for this kind of alert, or None if the setting is 0, which turns it off."""
        bound: float = getattr(settings, self.setting)
        if bound <= 0:
            return None
        if self.bad == "flag":
            return Rule(1.0, 1.0, max(0.0, bound * self.unit_s - self.passed_s), self.clear_s)
        if self.bad == "below":
            return Rule(-bound, -(bound + self.slack), self.raise_s, self.clear_s)
        return Rule(bound, bound - self.slack, self.raise_s, self.clear_s)

    def badness(self, value: float | None) -> float | None:
        """Return the value, negated if low values are bad, so that it can be compared with the rule's bounds."""
        return -value if value is not None and self.bad == "below" else value


def _on_gpu(sample: GpuSample, value: float | None, words: str, held: Holders) -> MeasuredValue:
    place = f"GPU {sample.index}"
    job = held.jobs.get(sample.uuid)
    about: dict[str, str | int | None] = {
        "gpu_index": sample.index,
        "gpu_uuid": sample.uuid,
        "job_id": job.id if job else None,
    }
    # Identify the GPU by index, because its UUID is unknown if it was lost before the app started.
    return MeasuredValue(f"gpu-{sample.index}", place, value, f"{place} {words}", about)


def _heat(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        slows_c = (sample.condition and sample.condition.slowdown_c) or USUAL_SLOWDOWN_C
        now_c = sample.temperature_c
        left_c = None if now_c is None else float(slows_c - now_c)
        yield _on_gpu(sample, left_c, f"is at {now_c} °C; it throttles at {slows_c} °C", look.held)


def _throttling(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        reasons = sample.condition.throttled_by if sample.condition else None
        words = f"is throttled: {', '.join(reasons or ())}"
        yield _on_gpu(sample, None if reasons is None else float(bool(reasons)), words, look.held)


def _lost(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        # A GPU reserved for other users does not count as lost.
        is_lost = not sample.healthy and not sample.withheld and sample.reason != faults.NO_ANSWER_YET
        yield _on_gpu(sample, float(is_lost), f"cannot be read: {sample.reason}", look.held)


def _ecc(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        count = sample.condition.ecc_uncorrected if sample.condition else None
        words = f"has uncorrected memory errors (ECC): {count} since its last reset"
        yield _on_gpu(sample, None if count is None else float(count > 0), words, look.held)


def _rows(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        condition = sample.condition or Condition()
        states = [one for one in (condition.rows_failed, condition.rows_pending) if one is not None]
        words = "could not remap a memory row" if condition.rows_failed else "needs a reset to remap memory rows"
        yield _on_gpu(sample, float(any(states)) if states else None, words, look.held)


def _xid(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        condition = sample.condition or Condition()
        xid = condition.xid if condition.xid and condition.xid.is_fatal else None
        value = None if sample.condition is None else float(bool(xid or condition.recovery))
        words = f"reports {xid.words}" if xid else f"needs {condition.recovery}, according to its driver"
        yield _on_gpu(sample, value, words, look.held)


def _memory(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        used, total = sample.memory_used_bytes, sample.memory_total_bytes
        percent = None if used is None or not total else 100 * used / total
        free = gibibytes(sample.memory_free_bytes or 0)
        yield _on_gpu(sample, percent, f"has {free} of {gibibytes(total or 0)} memory left", look.held)


def _idle(look: AlertReadings) -> Iterator[MeasuredValue]:
    for sample in look.samples:
        job, words = look.held.jobs.get(sample.uuid), look.held.idle.get(sample.uuid, "")
        name = f"job {job.id} ({job.name})" if job else "a job"
        yield _on_gpu(sample, float(bool(words)), f"is not used by {name}: {words}", look.held)


def _disk(look: AlertReadings) -> Iterator[MeasuredValue]:
    free = look.free_bytes
    words = f"the data folder's disk has {gibibytes(free or 0)} left"
    yield MeasuredValue("disk", "the data folder's disk", None if free is None else free / GIB, words)


KINDS = (
    AlertKind("heat", "heat", "alert_heat_c", _heat, "below", raise_s=10, clear_s=60, slack=5),
    AlertKind("throttling", "throttled", "alert_throttling_s", _throttling, "flag", clear_s=60),
    AlertKind("lost", "unreadable", "alert_lost_s", _lost, "flag", clear_s=10),
    AlertKind("ecc", "memory errors", "alert_errors_s", _ecc, "flag", clear_s=60),
    AlertKind("rows", "failing memory rows", "alert_errors_s", _rows, "flag", clear_s=60),
    AlertKind("xid", "fatal error", "alert_errors_s", _xid, "flag", clear_s=60),
    AlertKind("memory", "memory full", "alert_memory_percent", _memory, "above", raise_s=30, clear_s=30, slack=3),
    AlertKind(
        "idle", "held and idle", "alert_idle_minutes", _idle, "flag", clear_s=60, unit_s=60, passed_s=IDLE_AFTER_S
    ),
    AlertKind("disk", "disk full", "alert_disk_gib", _disk, "below", raise_s=30, clear_s=30, slack=1),
)
