from __future__ import annotations

import contextlib
import time

import pytest

from sae_tui.jobs.view import past_runs
from sae_tui.jobs.view.past_runs import MOST_JOBS, MOST_POINTS, Forecaster, mean_forecast, read_runs, recipes_of
from sae_tui.jobs.view.quality import at_end
from sae_tui.jobs.view.reader import JobReader, JobsReader
from sae_tui.jobs.view.watcher import Watcher
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
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


def forecasts(box, job: Job, forecaster: Forecaster | None = None):
    with contextlib.closing(JobReader(box.data, job.id)) as reader:
        reader.poll()
        return (forecaster or Forecaster(box.data)).forecasts(reader.view, reader.series, box.control.jobs())


def write(box, job: Job, values: dict[int, float], name: str = "heldout_fvu") -> None:
    with contextlib.closing(SeriesWriter(box.data.run(job.id).metrics_db)) as writer:
        writer.write([MetricRow(name, step, value) for step, value in values.items()])


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
        {"sae": {"k_anneal_fraction": 0.5}},
        {"sae": {"normalize": "none"}},
        {"sae": {"k": 1}},
    ],
)
def test_jobs_with_another_recipe_do_not_count(box, record, sections):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain, **sections)
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert found.end is None
    assert found.words == "no forecast from the past runs here; it needs at least 3 similar ones"


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
    assert forecasts(box, box.control.job(job_id)) == {}


@pytest.mark.parametrize(
    "sae",
    [{"d_sae": None, "expansion_factor": 0.0001}, {"architecture": "jumprelu", "sparsity_coefficient": 1.0}],
    ids=["no latents", "a fixed penalty"],
)
def test_a_job_without_a_recipe_has_no_forecast_and_does_not_disturb_others(box, record, sae):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
        odd = record(0.2, gain, sae=sae)
    assert recipes_of(odd) == {}
    assert forecasts(box, record(0.3, 0.5, JobState.RUNNING, sae=sae)) == {}
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert found.end.past_runs == 3


@pytest.fixture
def look(box, monkeypatch):
    """Return a function that follows a job, polls it as the app does, and returns its details and the warnings."""
    watcher, reader = Watcher(box.data, lambda: None, readonly=True), JobsReader(box.data)
    monkeypatch.setattr(watcher, "_reconcile", str)

    def poll(job: Job):
        watcher.follow(job.id)
        watcher._look(reader)
        return watcher.detail, [(one.job_id, one.event.message) for one in watcher.news]

    return poll


def test_a_forecast_that_fails_is_reported_once_per_job_and_does_not_hide_the_job(box, record, look, monkeypatch):
    jobs = [record(0.3, 0.5, JobState.RUNNING) for _ in range(2)]
    monkeypatch.setattr(past_runs, "_forecast", lambda *_: 1 / 0)
    told = "has no forecast because of a bug in sae-tui: ZeroDivisionError('division by zero')"
    for n_evaluations in range(3):
        write(box, jobs[0], {25 + n_evaluations: 0.4})  # a new value is forecast again
        detail, warnings = look(jobs[0])
        assert (detail.view.id, detail.forecasts, warnings) == (jobs[0].id, {}, [(jobs[0].id, told)])
    assert look(jobs[1])[1] == [(job.id, told) for job in jobs]


def test_a_past_run_that_cannot_be_read_is_reported_once_but_a_deleted_one_is_not(box, record, look):
    past = [record(0.2, gain) for gain in (0.78, 0.79, 0.8, 0.81, 0.82)]
    job = record(0.3, 0.5, JobState.RUNNING)
    box.data.run(past[0].id).metrics_db.unlink()
    box.data.run(past[1].id).metrics_db.write_bytes(b"no store" * 100)
    for n_evaluations in range(2):
        write(box, job, {51 + n_evaluations: 0.3})
        detail, ((job_id, message),) = look(job)
        assert (job_id, detail.forecasts[""].end.past_runs) == (past[1].id, 3)
        assert message.startswith(
            f"is left out of forecasts: the store {box.data.run(past[1].id).metrics_db} is corrupt"
        )


def test_nothing_is_read_or_computed_again_before_something_is_new(box, record, monkeypatch):
    past = [record(0.2, gain) for gain in (0.79, 0.8, 0.81)]
    job = record(0.3, 0.5, JobState.RUNNING)
    read, computed, forecaster = [], [], Forecaster(box.data)
    monkeypatch.setattr(past_runs, "read_runs", lambda *args: read.append(1) or read_runs(*args))
    monkeypatch.setattr(past_runs, "at_end", lambda *args: computed.append(1) or at_end(*args))
    first = forecasts(box, job, forecaster)
    write(box, job, {51: 0.1}, "loss")
    assert forecasts(box, job, forecaster) == first
    assert (len(read), len(computed)) == (3, 1)
    write(box, job, {60: 0.28})
    assert forecasts(box, job, forecaster) != first
    assert (len(read), len(computed)) == (3, 2)
    box.control.update(past[0].id, ended=time.time() + 1)
    assert forecasts(box, job, forecaster)[""].end.past_runs == 3
    assert (len(read), len(computed)) == (4, 3)


def test_of_long_past_curves_few_points_of_similar_saes_are_kept(box, record):
    values = {step: 1 / step for step in range(1, STEPS * 10 + 1)}
    fields = {"last": STEPS * 10, "train": {"n_steps": STEPS * 10, "lr": [0.001, 0.1]}}
    past = [record(0.2, 0.8, labels=("lr=0.001", "lr=0.1"), **fields) for _ in range(3)]
    for job in past:
        for label in ("lr=0.001", "lr=0.1"):
            write(box, job, values, f"heldout_fvu@{label}")
    forecaster = Forecaster(box.data)
    own = {"last": STEPS * 10, "train": {"n_steps": STEPS * 10, "lr": 0.001}}
    forecasts(box, record(0.3, 0.5, JobState.RUNNING, **own), forecaster)
    (curves,) = {tuple(run.curve for run in runs) for runs in forecaster._runs.values()}
    (curve,) = curves
    assert len(curve) == MOST_POINTS
    assert (curve[0], curve[-1]) == ((0.001, 1.0), (1.0, 0.001))
    assert set(forecaster._runs) == {(job.id, job.ended) for job in past}
    forecasts(box, record(0.3, 0.5, JobState.RUNNING, train={"lr": 0.02}), forecaster)
    assert not any(forecaster._runs.values())


def test_a_run_that_was_made_longer_is_forecast_only_from_its_first_evaluation_after_that(box, record):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
    job = record(0.3, 0.5, JobState.RUNNING)
    write(box, job, {40: 0.02, 50: 1e-4, 51: 0.015}, "lr")
    assert forecasts(box, job) == {}
    write(box, job, {75: 0.31})
    (found,) = forecasts(box, job).values()
    assert found.end.heldout_fvu == pytest.approx(0.31 * 0.8 / 0.9, rel=1e-3)


def test_of_a_past_run_that_was_made_longer_only_the_values_after_that_count(box, record):
    past = [record(0.2, gain) for gain in (0.79, 0.8, 0.81)]
    for job in past:
        write(box, job, {50: 0.15})
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert found.end is None
    job = record(0.3, 0.5, JobState.RUNNING)
    write(box, job, {75: 0.27})
    (found,) = forecasts(box, job).values()
    assert found.end.past_runs == 3


def test_jobs_of_other_kinds_do_not_hide_past_runs(box, record):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
    for _ in range(MOST_JOBS):
        box.record(config='kind = "command"\n[command]\nrun = "true"', state=JobState.FINISHED)
    (found,) = forecasts(box, record(0.3, 0.5, JobState.RUNNING)).values()
    assert found.end.past_runs == 3


def test_a_finished_job_that_was_launched_twice_counts_once(box, record):
    for k in (1, 2, 4, 8):
        record(k**-0.5, 0.5, sae={"k": k})
    (found,) = forecasts(box, record(4**-0.5, 0.5)).values()
    assert found.doubled["k"].past_runs == 4


def test_a_store_that_cannot_be_read_is_read_again_when_something_is_new(box, record, monkeypatch):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
    job, forecaster = record(0.3, 0.5, JobState.RUNNING), Forecaster(box.data)
    tries = []

    def fail(path, recipes):
        tries.append(path)
        raise StoreError("it is locked")

    with monkeypatch.context() as patch:
        patch.setattr(past_runs, "read_runs", fail)
        assert forecasts(box, job, forecaster)[""].end is None
        assert forecasts(box, job, forecaster)[""].end is None
    assert len(tries) == 3
    write(box, job, {60: 0.28})
    assert forecasts(box, job, forecaster)[""].end.past_runs == 3


def test_a_finished_run_with_a_long_curve_keeps_its_last_value(box, record):
    steps = 5000
    fields = {"last": steps, "train": {"n_steps": steps}}
    for k in (1, 2, 4, 8):
        record(k**-0.5, 0.5, sae={"k": k}, **fields)
    job = record(4**-0.5, 0.501, **fields)
    write(box, job, {step: (2 - step / steps) / 4 for step in range(1, steps)})
    (found,) = forecasts(box, job).values()
    assert found.doubled["k"].heldout_fvu == pytest.approx(0.25 * 2**-0.5, rel=0.01)


def test_a_job_that_was_asked_to_stop_or_has_an_error_has_no_forecast(box, record):
    for gain in (0.79, 0.8, 0.81):
        record(0.2, gain)
    job = record(0.3, 0.5, JobState.RUNNING)
    box.control.request(job.id, "stop")
    assert forecasts(box, job) == {}
    job = record(0.3, 0.5, JobState.RUNNING)
    box.control.update(job.id, error="a rank hangs")
    assert forecasts(box, job) == {}
