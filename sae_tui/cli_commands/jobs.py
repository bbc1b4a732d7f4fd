"""`sae-tui jobs`: lists jobs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import (
    UNKNOWN,
    clock_time,
    output_closes_within,
    say,
    show_json,
    show_table,
    warn,
)
from sae_tui.jobs.energy import energy_of
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.view.arrays import ArrayView, fold
from sae_tui.jobs.view.find import find, waits
from sae_tui.jobs.view.reader import JobsReader, JobView, is_loading, judged_value, newest_value, spread_of
from trainer.contract import wording
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.series import (
    LOSS,
    OF_BATCH,
    key_metrics,
    measure,
    measured_names,
    series_named,
)
from trainer.contract.store.seeds import as_json
from trainer.contract.store.states import JobState
from trainer.contract.wording import duration

WATCH_S = 1.0
RECONCILE_EVERY_S = 2.0


def show_jobs(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the jobs matching the filter, in the requested order."""
    reader = JobsReader(context.data, reads_series=context.as_json)
    matches = _matches(context, reader, flags)
    if reader.passed_over:
        warn(reader.passed_over)
    if flags.watch:
        return _watch(context, flags, reader)
    if context.as_json:
        show_json(json_rows(context, matches))
    elif not reader.jobs:
        say("no jobs yet; `sae-tui launch JOB.toml` starts one")
    elif not matches:
        say(f"none of the {len(reader.jobs)} jobs matches the filter")
    else:
        _show_table(_entries(context, flags, matches))
    return Exit.DONE


def _watch(context: CommandContext, flags: argparse.Namespace, reader: JobsReader) -> Exit:
    """Print the matching jobs after each change, until the output is closed."""
    shown, reconcile_at = None, time.monotonic() + RECONCILE_EVERY_S
    while True:
        matches = _matches(context, reader, flags)
        rows = json_rows(context, matches)
        if rows != shown and context.as_json:
            show_json(rows, in_a_line=True)
        elif rows != shown:
            say(clock_time(time.time()))
            _show_table(_entries(context, flags, matches))
        shown = rows
        if output_closes_within(WATCH_S):
            return Exit.UNREAD
        if time.monotonic() >= reconcile_at:
            context.mend()
            reconcile_at = time.monotonic() + RECONCILE_EVERY_S


def _matches(context: CommandContext, reader: JobsReader, flags: argparse.Namespace) -> list[JobView]:
    """Poll the reader and return the matching jobs; raise `UserError` if the jobs cannot be read."""
    reader.poll()
    if reader.problem:
        raise UserError(reader.problem)
    limit = None if _folds(context, flags) else flags.limit
    return find(reader.jobs, " ".join(flags.filter), flags.sort, limit, reverse=flags.reverse)


def _folds(context: CommandContext, flags: argparse.Namespace) -> bool:
    """Return whether each array is shown as one line; `--all`, a filter or JSON list its jobs instead."""
    return not (context.as_json or flags.all or flags.filter)


def _entries(
    context: CommandContext, flags: argparse.Namespace, jobs: Sequence[JobView]
) -> Sequence[JobView | ArrayView]:
    return fold(jobs)[: flags.limit] if _folds(context, flags) else jobs


def json_rows(context: CommandContext, jobs: Sequence[JobView]) -> list[dict[str, Any]]:
    return [json_fields(job) | energy_of(job, context.settings)._asdict() for job in jobs]


BEFORE_METRICS = ("id", "name", "state", "phase", "step", "total_steps", "progress", "eta_s", "tokens")
_AFTER_METRICS = (
    "overfitting", "tokens_per_s", "device", "gpu_ids", "gpu_uuids", "distributed", "world_size", "mode", "host",
    "user", "attempt", "waits_for", "priority", "held", "after", "array", "array_limit", "tags", "note", "created",
    "started", "ended", "error", "output_path", "estimated_memory_bytes", "peak_memory_bytes", "dropped",
)  # fmt: skip


def json_fields(job: JobView) -> dict[str, Any]:
    before, after = ({name: getattr(job, name) for name in names} for names in (BEFORE_METRICS, _AFTER_METRICS))
    of_now = {"silent": job.silent or None, "best_sae": job.best_sae or None, "evaluation": _evaluation(job)}
    of_now["seeds"] = as_json(job.seeds) if job.seeds else None
    if job.seeds and job.seeds.are_all:
        of_now["best_sae"] = None
    known = {name: value for name, value in latest_values(job).items() if value is not None}
    of_now |= {"metrics": dict(job.others) if kind_of(job.config).is_program else known}
    return before | latest_values(job) | after | of_now


def _evaluation(job: JobView) -> dict[str, Any] | None:
    """Return a job's running evaluation, or None."""
    if (now := job.evaluation) is None:
        return None
    return {
        "parts": now.parts,
        "stage": now.reached.stage,
        "progress": now.reached.share,
        "eta_s": now.reached.left_s,
        "device": now.device,
        "gpu_ids": [] if now.gpu_index is None else [now.gpu_index],
        "waits_for": now.waits_for or None,
        "started": now.began,
    }


def latest_values(job: JobView) -> dict[str, float | None]:
    """Return a dict mapping the loss and each metric to the latest value."""
    return {name: newest_value(job, name) for name in ("loss", *measured_names())}


def _show_table(entries: Sequence[JobView | ArrayView]) -> None:
    """Print the jobs as a table; omit the columns for tags and wait reasons if they would be empty."""
    jobs = [job for entry in entries for job in (entry.jobs if isinstance(entry, ArrayView) else [entry])]
    trains = any(not kind_of(job.config).is_program for job in jobs)
    of_saes = ("K", "D_SAE", *(series_named(name).title.upper() for name in _listed())) if trains else ()
    headings: tuple[str, ...] = ("ID", "NAME", "STATE", "STEP", "DONE", *of_saes)
    headings += ("TOKENS/S" if trains else "STEPS/S", "ETA", "ON")
    left_out = [None] * (len(headings) - 5)
    rows = [
        (*_array_row(entry), *left_out) if isinstance(entry, ArrayView) else _row(entry, trains=trains)
        for entry in entries
    ]
    for heading, words in (("LOSS", _loss), ("TAGS", _tags), ("WAITS", waits)):
        cells = ["" if isinstance(entry, ArrayView) else words(entry) for entry in entries]
        if any(cells):
            headings = (*headings, heading)
            rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
    show_table(headings, rows)


def _loss(job: JobView) -> str:
    """Return the loss that a program reported, or ""."""
    return measure(job.loss, LOSS) if kind_of(job.config).is_program and job.loss is not None else ""


def _tags(job: JobView) -> str:
    return " ".join(f"#{tag}" for tag in job.tags)


def _array_row(array: ArrayView) -> tuple[object, ...]:
    """Return an array row's first cells: its jobs by state and its name in one cell, and the share that finished."""
    return (array.id, f"{array.words} · {array.name}", None, None, wording.done(array.progress))


def _row(job: JobView, *, trains: bool) -> tuple[object, ...]:
    """Return a job's row; unless `trains`, leave out the values that only SAEs have."""
    on = ",".join(map(str, job.gpu_ids)) or (f"any {job.gpus_wanted}" if job.any_gpus else "cpu")
    is_slow = job.tokens_per_s is None or (kind_of(job.config).is_program and job.tokens_per_s < 100)
    rate = job.tokens_per_s if is_slow else round(job.tokens_per_s or 0)
    is_unknown = job.state is JobState.IMPORTED or (kind_of(job.config).is_program and not job.total_steps)
    done = None if is_unknown else wording.done(job.progress)
    step = None if job.state is JobState.IMPORTED else job.step
    values = (job.k, job.d_sae, *(_judged_text(job, name) for name in _listed())) if trains else ()
    state = job.phase if is_loading(job) else describe_state(job).word
    return (job.id, job.name, state, step, done, *values, rate, time_left(job), on)


def _listed() -> list[str]:
    """Return the metrics shown in the jobs list."""
    return list(dict.fromkeys([*key_metrics(), "dead_fraction"]))


def _judged_text(job: JobView, name: str) -> str:
    """Return a metric on held-out data or, before the first evaluation, on the last batches, marked as such."""
    value, is_of_batch = judged_value(job, name)
    if value is None:
        return UNKNOWN
    series, spread = series_named(name), spread_of(job, name)
    words = spread_words(spread, series, "±") if spread else measure(value, series)
    return f"{OF_BATCH * is_of_batch}{words}"


def time_left(job: JobView) -> str:
    """Return the estimated time left, such as `12 min`, from the remaining steps and the recent speed."""
    return UNKNOWN if job.eta_s is None else duration(job.eta_s)
