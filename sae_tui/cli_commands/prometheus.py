"""GPU and job metrics for Prometheus, formatted by the optional package prometheus-client."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sae_tui.cli_commands.output import warn
from sae_tui.gpu.base import Condition, GpuSample
from sae_tui.gpu.sensors import exported
from sae_tui.jobs.gpus.occupancy import Occupancy
from sae_tui.jobs.view.reader import JobsReader, JobView, newest_value
from trainer.contract.paths import DataDir
from trainer.contract.printable import printable
from trainer.contract.settings.series import measured_names, title_of
from trainer.contract.store.states import JobState

# A job is exported for an hour after its end, so that scraping every few minutes still collects its last values.
ENDED_S = 3600.0
J_PER_WH = 3600.0
Labels = Mapping[str, object]
Labelled = Iterable[tuple[Labels, float | None]]
_NOT_IN_A_NAME = re.compile("[^a-zA-Z0-9_]")


class PrometheusText(Collector):
    """Writes GPU and job metrics as text; a lock serialises requests from several threads."""

    def __init__(
        self,
        data: DataDir,
        samples: Callable[[], Sequence[GpuSample]],
        gpu_problem: Callable[[], object] = lambda: None,
    ) -> None:
        self._samples, self._gpu_problem = samples, gpu_problem
        self._occupancy = Occupancy(data)
        self._jobs = JobsReader(data)
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def text(self) -> str:
        """Return the current metrics as text; metrics that cannot be read are omitted."""
        with self._lock:
            self._jobs.poll()
            self._report(self._jobs.problem, self._gpu_problem())
            return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with a value."""
        yield from known(gpu_metrics(self._samples(), self._occupancy.jobs_by_uuid()))
        yield from known(job_metrics(self._jobs.jobs))
        yield gauge("sae_tui_jobs_readable", "Whether the list of jobs can be read.", [({}, not self._jobs.problem)])

    def _report(self, *problems: object) -> None:
        """Print a warning for each problem, but only once."""
        for problem in {str(problem) for problem in problems if problem} - self._reported:
            self._reported.add(problem)
            warn(problem)


def gauge(name: str, words: str, values: Labelled) -> Metric:
    """Return a metric with a sample for each non-None value; replace control characters in labels."""
    metric = Metric(name, words, "gauge")
    for labels, value in values:
        if value is not None:
            metric.add_sample(name, {key: printable(str(text)) for key, text in labels.items()}, float(value))
    return metric


def known(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Yield the metrics with a value."""
    return (metric for metric in metrics if metric.samples)


def gpu_metrics(samples: Iterable[GpuSample], jobs_by_uuid: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the GPU metrics, labelled by index, UUID and name."""
    gpus = [({"gpu": one.index, "uuid": one.uuid, "name": one.name}, one) for one in samples]

    def metric(name: str, words: str, value: Callable[[GpuSample], float | None]) -> Metric:
        return gauge(f"sae_tui_gpu_{name}", words, [(labels, value(one)) for labels, one in gpus])

    yield metric("healthy", "Whether the GPU can be read.", lambda one: one.healthy)
    for kind in (GpuSample, Condition):
        for name, sensor in exported(kind).items():
            values = [(labels, sensor.in_base_unit(one.value(name))) for labels, one in gpus]
            yield gauge(f"sae_tui_gpu_{sensor.metric}", f"{sensor.words}.", values)
    yield metric("throttled", "Whether the GPU is throttled by heat or a lack of power.", _throttled)
    held = [(labels | {"id": jobs_by_uuid[one.uuid]}, 1.0) for labels, one in gpus if one.uuid in jobs_by_uuid]
    yield gauge("sae_tui_gpu_held_by_job", "Always 1; the label `id` is the id of the job that holds the GPU.", held)


def _throttled(sample: GpuSample) -> float | None:
    reasons = sample.condition.throttled_by if sample.condition else None
    return None if reasons is None else bool(reasons)


def job_metrics(jobs: Iterable[JobView], now: float | None = None) -> Iterator[Metric]:
    """Yield metrics for jobs that are active or ended in the last hour, labelled by id and name."""
    after = (time.time() if now is None else now) - ENDED_S
    shown = [job for job in jobs if not job.state.is_final or (job.ended or 0.0) > after]
    labelled = [({"id": job.id, "name": job.name}, job) for job in shown]

    def metric(name: str, words: str, value: Callable[[JobView], float | None]) -> Metric:
        return gauge(f"sae_tui_job_{name}", words, [(labels, value(job)) for labels, job in labelled])

    states = [
        (labels | {"state": state}, job.state == state and not job.silent)
        for labels, job in labelled
        for state in JobState
    ]
    of_silent = "all are 0 if its host sends no heartbeat, since the state is then unknown"
    yield gauge("sae_tui_job_state", f"1 for the state of the job, 0 for the others; {of_silent}.", states)
    yield metric("silent", "Whether the heartbeats of the job's host are overdue.", lambda job: bool(job.silent))
    yield metric("step", "Steps done.", lambda job: job.step)
    yield metric("steps_planned", "Steps planned.", lambda job: job.total_steps)
    yield metric("tokens", "Tokens trained on.", lambda job: job.tokens)
    yield metric("tokens_per_second", "Tokens trained on per second.", _tokens_per_s)
    yield metric("loss", "Latest loss.", lambda job: job.loss)
    for name in measured_names():
        words = f"Latest {title_of(name)}."
        yield metric(_NOT_IN_A_NAME.sub("_", name), words, lambda job, name=name: newest_value(job, name))  # type: ignore[misc]
    yield metric("energy_joules", "Measured energy of its GPUs.", _energy_j)


def _tokens_per_s(job: JobView) -> float | None:
    return None if job.silent else job.tokens_per_s


def _energy_j(job: JobView) -> float | None:
    return None if job.energy_wh is None else job.energy_wh * J_PER_WH
