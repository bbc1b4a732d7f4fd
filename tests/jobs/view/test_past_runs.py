from __future__ import annotations

import contextlib
import time

import pytest

from sae_tui.jobs.view.past_runs import Forecaster, mean_forecast, recipes_of
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

STEPS = 100
RAW = {"data": {"path": "/rows"}, "sae": {"d_sae": 64, "k": 4}, "train": {"n_steps": STEPS, "batch_size": 64}}


def config(**sections: dict) -> str:
    job, problems = parse_job({name: own | sections.get(name, {}) for name, own in RAW.items()})
    assert job, problems
    return dump_job(job)


@pytest.fixture
def record(box):
    """Record a run with a held-out FVU every 25 steps; a running one has taken half of its steps."""

    def put(
        halfway: float, gain: float, state: JobState = JobState.FINISHED, *, labels: tuple[str, ...] = ("",),
        last: int = STEPS, **sections: dict,
    ) -> Job:  # fmt: skip
        done = last if state is JobState.FINISHED else STEPS // 2
        job_id = box.record(
            state=state, config=config(**sections), d_in=8, step=done, total_steps=last, heldout_fvu=gain * halfway
        )
        box.data.run(job_id).create()
        values = {25: 1.5 * halfway, 50: halfway, 75: 0.9 * halfway, last: gain * halfway}
        rows = [
            MetricRow(f"heldout_fvu@{label}" if label else "heldout_fvu", step, value)
            for label in labels
            for step, value in values.items()
            if step <= done
        ]
        with contextlib.closing(SeriesWriter(box.data.run(job_id).metrics_db)) as writer:
            writer.write(rows, Heartbeat("training", done, last, 64 * done, time.time()))
        return box.control.job(job_id)

    return put


def forecasts(box, job: Job):
    with contextlib.closing(SeriesReader(box.data.run(job.id).metrics_db)) as reader:
        series = {key: reader.points(*key) for key in reader.series()}
    return Forecaster(box.data).forecasts(job, series, box.control.jobs())


def test_a_running_job_is_forecast_from_similar_finished_jobs(box, record):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert (found.end.heldout_fvu, found.end.past_runs) == (pytest.approx(0.3 * 0.8, rel=1e-3), 3)
    assert found.words.startswith("held-out FVU 0.240 (0.23")
    assert found.words.endswith("expected at the end, from 3 past runs")


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"lr": 0.001}},
        {"train": {"optimizer": "signum"}},
        {"train": {"decay_fraction": 0.1}},
        {"sae": {"architecture": "batch_topk"}},
        {"sae": {"freeze": "decoder"}},
        {"sae": {"k": 1}},
    ],
)
def test_jobs_with_another_recipe_do_not_count(box, record, sections):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain, **sections)
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert found.end is None
    assert "too few similar past runs" in found.words


def test_a_job_that_finished_early_or_was_launched_twice_does_not_count(box, record):
    for gain, last in ((0.8, STEPS), (0.8, STEPS), (0.79, STEPS), (0.9, 90)):
        record(0.2, gain, last=last)
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert found.end is None


def test_the_same_explicit_rate_is_similar_and_relative_to_the_automatic_rate(box, record):
    (automatic,) = recipes_of(record(0.2, 0.8)).values()
    (explicit,) = recipes_of(record(0.2, 0.8, train={"lr": 0.001})).values()
    (wider,) = recipes_of(record(0.2, 0.8, train={"lr": 0.001}, sae={"d_sae": 256})).values()
    assert automatic.lr == 1.0
    # The automatic rate falls with the square root of the width.
    assert wider.lr == pytest.approx(2 * explicit.lr)


def test_a_diverged_run_and_a_run_that_ends_early_have_no_forecast(box, record):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
    assert forecasts(box, record(1.2, 0.5, JobState.RUNNING)) == {}
    assert forecasts(box, record(0.3, 0.5, JobState.RUNNING, last=60)) == {}
    assert forecasts(box, record(0.3, 0.5, JobState.STOPPED)) == {}


def test_each_sae_of_a_sweep_is_forecast_and_counts_as_a_run(box, record):
    labels = ("seed=0", "seed=1", "seed=2")
    record(0.2, 0.8, labels=labels, train={"seed": [0, 1, 2]})
    for gain in (0.78, 0.82):
        record(0.2, gain)
    found = forecasts(box, record(0.3, 0.5, JobState.RUNNING, labels=labels, train={"seed": [0, 1, 2]}))
    assert set(found) == set(labels)
    # The three SAEs of the first sweep have the same curve.
    assert mean_forecast(list(found.values())).end.past_runs == 3


def test_a_finished_job_shows_what_twice_its_settings_would_bring(box, record):
    for k in (1, 2, 4, 8):
        record(k**-0.5, 0.5, sae={"k": k})
    (found,) = forecasts(box, record(4**-0.5, 0.501)).values()
    assert found.end is None
    assert found.doubled["k"].heldout_fvu == pytest.approx(0.25 * 2**-0.5, rel=0.01)
    assert found.doubled["k"].past_runs == 5
    assert set(found.doubled) == {"k"}


def test_a_job_of_another_kind_or_without_curves_has_no_forecast(box):
    job_id = box.record(config='kind = "command"\n[command]\nrun = "true"', d_in=8, state=JobState.FINISHED)
    assert Forecaster(box.data).forecasts(box.control.job(job_id), {}, box.control.jobs()) == {}
