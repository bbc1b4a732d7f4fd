"""Writes figures of GPUs and jobs in the text format that Prometheus reads (version 0.0.4)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.view.reader import JobView, newest_value
from trainer.contract.printable import printable
from trainer.contract.settings.series import measured_names, title_of
from trainer.contract.store.states import JobState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A job that has ended is still shown for so long, so that whoever collects every minute or five has its last values.
ENDED_S = 3600.0
J_PER_WH = 3600.0
Labels = Mapping[str, object]
_OTHER = re.compile("[^a-zA-Z0-9_]")  # what no name of a metric may hold
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class Family(NamedTuple):
    """A metric: its name, what `HELP` says, and its values with their labels; None where it is not known."""

    name: str
    help: str
    values: Iterable[tuple[Labels, float | None]]
    kind: Literal["gauge", "counter"] = "gauge"


def text_of(families: Iterable[Family]) -> str:
    """Return the text of the metrics, without those of which nothing is known."""
    return "".join(line + "\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    known = [(labels, value) for labels, value in family.values if value is not None]
    if not known:
        return
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in known:
        pairs = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels.items())
        yield f"{family.name}{{{pairs}}} {float(value)!r}" if pairs else f"{family.name} {float(value)!r}"


def _escaped(label: object) -> str:
    """Return a label's value for between its quotes; names are written by others, and may hold anything."""
    return printable(str(label)).translate(_ESCAPES)


def gpu_families(samples: Iterable[GpuSample], jobs_by_uuid: Mapping[str, int]) -> Iterator[Family]:
    """Yield the figures of cards, labelled by index, UUID and name."""
    cards = [({"gpu": one.index, "uuid": one.uuid, "name": one.name}, one) for one in samples]

    def family(name: str, words: str, value: Callable[[GpuSample], float | None]) -> Family:
        return Family(f"sae_tui_gpu_{name}", words, [(labels, value(one)) for labels, one in cards])

    yield family("healthy", "Whether the GPU can be read.", lambda one: one.healthy)
    yield family("utilization_ratio", "Share of the time in which a kernel ran.", lambda one: _ratio(one.utilization))
    yield family("memory_used_bytes", "Memory in use.", lambda one: one.memory_used_bytes)
    yield family("memory_total_bytes", "All of its memory.", lambda one: one.memory_total_bytes)
    yield family("temperature_celsius", "Temperature of the chip.", lambda one: one.temperature_c)
    yield family("power_watts", "Power that it takes.", lambda one: one.power_w)
    yield family("power_limit_watts", "Most power that it may take.", lambda one: one.power_limit_w)
    yield family("throttled", "Whether heat or lack of power slow it down.", _throttled)
    held = [(labels | {"id": jobs_by_uuid[one.uuid]}, 1.0) for labels, one in cards if one.uuid in jobs_by_uuid]
    yield Family("sae_tui_gpu_held_by_job", "1, with the id of the job that has the GPU.", held)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _throttled(sample: GpuSample) -> float | None:
    reasons = sample.condition.throttled_by if sample.condition else None
    return None if reasons is None else bool(reasons)


def job_families(jobs: Iterable[JobView], now: float | None = None) -> Iterator[Family]:
    """Yield the figures of jobs that have not ended, or did so in the last hour, labelled by id and name."""
    after = (time.time() if now is None else now) - ENDED_S
    shown = [job for job in jobs if not job.state.is_final or (job.ended or 0.0) > after]
    labelled = [({"id": job.id, "name": job.name}, job) for job in shown]

    def family(name: str, words: str, value: Callable[[JobView], float | None]) -> Family:
        return Family(f"sae_tui_job_{name}", words, [(labels, value(job)) for labels, job in labelled])

    states = [
        (labels | {"state": state}, job.state == state and not job.silent)
        for labels, job in labelled
        for state in JobState
    ]
    of_silent = "of a silent job all are 0, since its state is not known"
    yield Family("sae_tui_job_state", f"1 for the state that the job is in, 0 for all others; {of_silent}.", states)
    yield family(
        "silent", "Whether the host of the job has given no sign of life for long.", lambda job: bool(job.silent)
    )
    yield family("step", "Steps made.", lambda job: job.step)
    yield family("steps_planned", "Steps that it is to make.", lambda job: job.total_steps)
    yield family("tokens", "Tokens trained on.", lambda job: job.tokens)
    yield family("tokens_per_second", "Tokens trained on per second.", _tokens_per_s)
    yield family("loss", "Newest loss.", lambda job: job.loss)
    for name in measured_names():
        words = f"Newest {title_of(name)}."
        yield family(_OTHER.sub("_", name), words, lambda job, name=name: newest_value(job, name))  # type: ignore[misc]
    yield family("energy_joules", "Energy that its GPUs took, as far as measured.", _energy_j)


def _tokens_per_s(job: JobView) -> float | None:
    return None if job.silent else job.tokens_per_s


def _energy_j(job: JobView) -> float | None:
    return None if job.energy_wh is None else job.energy_wh * J_PER_WH
