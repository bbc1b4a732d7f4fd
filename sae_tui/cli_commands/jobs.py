"""`sae-tui jobs | job | stop | logs`: shows and stops jobs. Also waits for jobs to end."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sae_tui.cli_commands import cards
from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import (
    UNKNOWN,
    LiveLine,
    clock_time,
    nobody_reads_for,
    say,
    show_fields,
    show_json,
    show_table,
    text,
    warn,
)
from sae_tui.cli_commands.selection import (
    MANY,
    Selection,
    change,
    change_one,
    confirm,
    refuse_without_terminal,
    select,
)
from sae_tui.jobs.bulk import Change, unless_ended
from sae_tui.jobs.energy import energy_of, energy_words
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.output import kind_of, name_of_output, why_no_sae
from sae_tui.jobs.states import ENDED, describe_state
from sae_tui.jobs.view.arrays import ArrayView, fold
from sae_tui.jobs.view.find import find, waits
from sae_tui.jobs.view.logs import n_logs_of
from sae_tui.jobs.view.past_runs import SIZES, Forecast, Forecaster, mean_forecast
from sae_tui.jobs.view.reader import JobReader, JobsReader, JobView, is_loading, judged_value, newest_value, spread_of
from sae_tui.jobs.view.shape import dead_after_words
from trainer.contract import wording
from trainer.contract.errors import UsageError, UserError
from trainer.contract.exits import Exit
from trainer.contract.progress import Progress, Reached
from trainer.contract.runs.card_figures import over_seeds
from trainer.contract.runs.how_far import BEST_FVU, BEST_STEP, PASSES
from trainer.contract.runs.log_tail import tail
from trainer.contract.runs.report_card import Card, as_table, facts, summary, title_lines
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.series import (
    LOSS,
    OF_BATCH,
    SPEED,
    USAGE,
    key_metrics,
    measure,
    measured_names,
    own_series,
    series_named,
    title_of,
)
from trainer.contract.store.job_store import Control
from trainer.contract.store.seeds import as_json, by_seeds, without_seed
from trainer.contract.store.states import JobState
from trainer.contract.wording import duration, gibibytes, plural, ranges

if TYPE_CHECKING:
    from sae_tui.jobs.view.postmortem import Postmortem

POLL_S = 0.25
WATCH_S = 1.0
RECONCILE_EVERY_S = 2.0
# The report card fields in JSON output, and the facts printed for people.
_OF_CARD = (
    "architecture", "step", "tokens", "data", "figures", "recovery", "known", "twins", "spliced", "probing", "training",
    "weights", "parts",
)  # fmt: skip
_KEY_FACTS = (
    "training", "overfitting", "FVU", "latents by part", "latent scaling", "L0", "latents", "CE score", "KL score",
    "probing (AUC)",
)  # fmt: skip
# Maps a job's final state to the exit code of a command waiting for the job.
EXITS = {
    JobState.FINISHED: Exit.DONE,
    JobState.STOPPED: Exit.STOPPED,
    JobState.FAILED: Exit.JOB_FAILED,
    JobState.LOST: Exit.JOB_LOST,
    JobState.IMPORTED: Exit.DONE,
}


def show_jobs(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the jobs matching the filter, in the requested order."""
    reader = JobsReader(context.data, reads_series=context.as_json)
    matches = _matches(context, reader, flags)
    if reader.passed_over:
        warn(reader.passed_over)
    if flags.watch:
        return _watch(context, flags, reader)
    if context.as_json:
        show_json(_rows(context, matches))
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
        rows = _rows(context, matches)
        if rows != shown and context.as_json:
            show_json(rows, in_a_line=True)
        elif rows != shown:
            say(clock_time(time.time()))
            _show_table(_entries(context, flags, matches))
        shown = rows
        if nobody_reads_for(WATCH_S):
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


def _rows(context: CommandContext, jobs: Sequence[JobView]) -> list[dict[str, Any]]:
    return [_fields(job) | energy_of(job, context.settings)._asdict() for job in jobs]


def show_job(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print one job and its events; with `--wait`, wait until it ends and return the exit code for its final state."""
    from sae_tui.jobs.view.postmortem import examine, without_repeats

    code = Exit.DONE
    if flags.wait:
        code = EXITS[wait_until_ended(context, flags.id, is_told=False).state]
    reader = _reader(context, flags.id)
    assert reader.view is not None
    if flags.against:
        cards.show_differences(context, flags.id, flags.card, flags.against)
        return code
    if flags.card:
        cards.show_card(context, flags.id, flags.card)
        return code
    if flags.cards:
        cards.show_cards(context, reader.view)
        return code
    now = list(whole_cards(context.data.sae(flags.id)).values())
    if context.as_json:
        shown = _fields(reader.view) | energy_of(reader.view, context.settings)._asdict()
        shown |= _how_far(reader) | _forecast_fields(_forecast(context, reader))
        shown |= {"events": reader.events, "ranks": reader.ranks}
        show_json(shown | {"cause": examine(context.data, reader.view), "card": _card_fields(now)})
        return code
    postmortem = examine(context.data, reader.view)
    values = _field_texts(reader.view) | _best_sae_values(reader.view)
    is_program = kind_of(reader.view.config).is_program
    values |= {name: value for name, value in _how_far(reader).items() if value is not None}
    values["energy"] = energy_words(reader.view, context.settings)
    values |= dict(_forecast_texts(reader.view, _forecast(context, reader)))
    if postmortem:
        values["error"] = postmortem.error
    show_fields((_field_title(name, is_program=is_program), value) for name, value in values.items())
    _show_cards(now)
    if postmortem:
        _show_cause(postmortem, reader.view)
    if reader.events:
        say()
        show_table(
            ("TIME", "EVENT", "MESSAGE"),
            [
                (clock_time(event.timestamp), event.kind, event.message)
                for event in without_repeats(reader.events, reader.view.error if postmortem else None)
            ],
        )
    return code


def _how_far(reader: JobReader) -> dict[str, float | int | None]:
    """Return the number of passes over the training rows, and the step and value of the lowest held-out FVU."""
    curves = {name: reader.series.get((name, 0)) for name in (PASSES, BEST_STEP, BEST_FVU)}
    newest = {name: points[-1].value if points else None for name, points in curves.items()}
    step = newest[BEST_STEP]
    return newest | {BEST_STEP: None if step is None else int(step)}


def _forecast(context: CommandContext, reader: JobReader) -> Forecast | None:
    """Return the forecast for a job's SAE or, in a sweep, for the SAEs that its metrics belong to; None if unknown."""
    job = reader.view
    assert job is not None
    with contextlib.closing(Control(context.data.control_db, readonly=True)) as control:
        found = Forecaster(context.data).forecasts(job, reader.series, control.jobs([JobState.FINISHED]))
    labels = job.seeds.labels if job.seeds else [job.best_sae]
    return mean_forecast([found[label] for label in labels]) if found.keys() >= set(labels) else None


def _forecast_fields(forecast: Forecast | None) -> dict[str, Any]:
    """Return the value expected at the end, and with twice each setting; each is null if it is unknown."""
    twice = forecast.doubled if forecast else {}
    return {"forecast": forecast and forecast.end, "twice": {name: twice.get(name) for name in SIZES}}


def _forecast_texts(job: JobView, forecast: Forecast | None) -> Iterator[tuple[str, str]]:
    """Yield the lines about the forecasts for a job's SAE, as pairs (title, text)."""
    if forecast is None:
        return
    if job.total_steps is None or job.step < job.total_steps:
        yield "forecast", forecast.words
        if forecast.end is None:
            return
    if not forecast.doubled:
        yield "twice the size", "unknown: the past runs on this data do not determine it"
    now = forecast.end.heldout_fvu if forecast.end else job.heldout_fvu
    for name, estimate in forecast.doubled.items():
        runs = f"by a power law fitted to {plural(estimate.past_runs, 'run')} on this data"
        yield f"twice {SIZES[name]}", f"held-out FVU {now:#.3g} → {estimate.words}, {runs}"


def _card_fields(shown: Sequence[Card]) -> list[dict[str, Any]]:
    """Return each SAE's measurements, without the max-activating examples shown by `sae-tui features`."""
    tables = map(as_table, shown)
    return [{"sae": table["label"], **{name: table[name] for name in _OF_CARD}} for table in tables]


def _show_cards(shown: Sequence[Card]) -> None:
    """Print a report card's key facts; for a sweep, print one row per SAE."""
    if not shown:
        return
    say()
    if len(shown) > 1:
        show_table(("SAE", "REPORT CARD"), [(card.label, summary(card)) for card in shown])
        by_label = {card.label: card for card in shown}
        for group, labels in by_seeds(by_label).items():
            main = [one for one in over_seeds(by_label, labels[0]) if one[0].series.prominence == "key"]
            figures = ", ".join(f"{one.series.title} {spread_words(spread, one.series)}" for one, spread in main)
            if figures:
                say(text(f"{' '.join(filter(None, [group, plural(len(labels), 'seed')]))}: {figures}"))
        return
    _, rows, *when = title_lines(shown[0])
    say(f"Report card, {text(rows)}:")
    for line in when:
        say(text(line))
    show_fields((title, value) for title, value in facts(shown[0]) if _is_key(title))


def _is_key(title: str) -> bool:
    return title in _KEY_FACTS or title.startswith("part ")


def _best_sae_values(job: JobView) -> dict[str, object]:
    """Return the metrics for a sweep's best SAE with its label, such as `0.1463 (k=32)`; return {} for other jobs.

    For a sweep over seeds, return the means over the seeds, such as `0.1463 ± 0.0008 (3 seeds)`.
    """
    if not job.best_sae:
        return {}
    of_sae = {name: _field_text(job, name, value) for name, value in _values(job).items() if value is not None}
    label = job.best_sae
    if seeds := job.seeds:
        label = ", ".join(filter(None, [without_seed(label), seeds.count_words]))
        series = {name: LOSS if name == "loss" else series_named(name) for name in of_sae}
        of_sae |= {name: spread_words(seeds.spreads[name], series[name]) for name in of_sae if name in seeds.spreads}
    return {name: f"{text(value)} ({label})" for name, value in of_sae.items()}


def _show_cause(postmortem: Postmortem, job: JobView) -> None:
    """Print the remedy, the exception and log from the first rank that failed, and how the other ranks ended."""
    advice = [postmortem.remedy] if postmortem.remedy else []
    if postmortem.resumes:
        advice.append(f"`sae-tui resume {job.id}` {postmortem.resumes}")
    if advice:
        say()
        say(f"What to do: {'; '.join(advice)}")
    for title, lines in (
        ("Exception", postmortem.traceback),
        (f"Last lines of {_whose_log(job, postmortem.rank or 0)}", postmortem.log),
    ):
        if lines:
            say()
            say(f"{title}:")
            for line in lines:
                say(f"  {line}")
    for other in postmortem.others:
        say(other)


def stop(context: CommandContext, flags: argparse.Namespace) -> int:
    if flags.kill and flags.finish:
        raise UsageError("--finish: cannot be combined with --kill; leave out one of them")
    if flags.evaluation and (flags.kill or flags.finish):
        raise UsageError(
            "--evaluation: cannot be combined with --kill or --finish, which act on the job; leave them out"
        )
    from sae_tui.jobs import edits

    chosen = select(context, flags.ids)
    if flags.evaluation:
        from sae_tui.jobs.evaluation.request import stop as stop_evaluation

        act: Change = lambda data, _, job_id: stop_evaluation(data, job_id)  # noqa: E731
    else:
        act = unless_ended(edits.finish if flags.finish else edits.kill if flags.kill else edits.stop)
        _confirm_stop(context, flags, chosen)
    if not (chosen.is_single and context.as_json):
        return change(context, chosen, act, "asked to stop")
    message = change_one(context.data, chosen.ids[0], act)
    view = _reader(context, chosen.ids[0]).view
    show_json({"id": chosen.ids[0], "state": view.state if view else None, "message": message})
    return Exit.DONE


def _confirm_stop(context: CommandContext, flags: argparse.Namespace, chosen: Selection) -> None:
    """Ask for confirmation before stopping `MANY` or more jobs that have started."""
    started = [job.id for job in chosen.jobs.values() if not job.state.is_final and job.state != JobState.QUEUED]
    if len(started) < MANY or flags.yes or context.as_json:
        return
    refuse_without_terminal("stop")
    what = "Kill" if flags.kill else "Finish" if flags.finish else "Stop"
    confirm(f"{what} {len(started)} running jobs ({ranges(sorted(started))})?", "no job was stopped")


def show_logs(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the last log lines from a rank; with `-f`, follow the log until the job ends."""
    reader = _reader(context, flags.id)
    assert reader.view is not None
    _refuse_other_logs(reader.view, flags)
    run = context.data.run(flags.id)
    path = run.evaluation_log if flags.evaluation else run.log(flags.rank)
    if flags.follow:
        _follow_log(reader, path, flags)
        return Exit.DONE
    lines = tail(path, flags.lines)
    if context.as_json:
        show_json({"id": flags.id, "rank": flags.rank, "lines": lines})
        return Exit.DONE
    for line in lines:
        say(line)
    if not lines:
        who = "the evaluation" if flags.evaluation else _whose_log(reader.view, flags.rank)
        warn(f"{who} of job {flags.id} has written nothing")
    return Exit.DONE


def _whose_log(job: JobView, rank: int) -> str:
    return "the program" if kind_of(job.config).is_program else f"rank {rank}"


def _refuse_other_logs(job: JobView, flags: argparse.Namespace) -> None:
    """Raise `UserError` if the job does not have the requested log."""
    n_logs = n_logs_of(job)
    if flags.rank >= n_logs:
        instead = f"give --rank 0 to {n_logs - 1}" if n_logs > 1 else "leave --rank out"
        raise UserError(f"job {job.id} has no rank {flags.rank}; {instead}")
    if flags.evaluation and (words := why_no_sae(job)):
        raise UserError(f"--evaluation: {words}")


def _follow_log(reader: JobReader, path: Path, flags: argparse.Namespace) -> None:
    """Print a log until its job has ended; on a terminal, the unfinished line is updated in place."""
    lines, follower = LogFollower.from_end(path, flags.lines)
    last = LiveLine()
    while True:
        last.say_above(lines)
        last.show(follower.unfinished)
        ended = reader.view is None or reader.view.state.is_final
        if flags.evaluation:
            ended = reader.view is None or reader.view.evaluation is None
        if not ended:
            time.sleep(POLL_S)
            reader.poll()
        lines = follower.new_lines()
        if ended:
            break
    last.say_above([*lines, *filter(None, [follower.unfinished])])


def wait_for(context: CommandContext, *job_ids: int, began: str = "is launched", leaves: str = "running") -> int:
    """Wait until all jobs have ended and return the worst exit code; Ctrl-C does not affect the jobs."""
    if not context.as_json:
        for job_id in job_ids:
            say(f"job {job_id} {began}; Ctrl-C leaves it {leaves}")
    ended = [wait_until_ended(context, job_id) for job_id in job_ids]
    if context.as_json:
        rows = _rows(context, ended)
        show_json(rows if len(rows) > 1 else rows[0])
    return max(EXITS[view.state] for view in ended)


def _what_came_of(view: JobView) -> str:
    """Return why a job failed or its output path, or "" if there is neither."""
    if view.error:
        return f": {view.error}"
    return f"; its {name_of_output(view)} in {view.output_path}" if view.output_path else ""


def wait_until_ended(context: CommandContext, job_id: int, *, is_told: bool = True) -> JobView:
    """Wait until the job has ended, print how it ended if `is_told`, and return it.

    Raise `UserError` if the job is deleted in the meantime.
    """
    reader = _reader(context, job_id)
    reconcile_at = time.monotonic() + RECONCILE_EVERY_S
    with Progress(f"job {job_id}", to_descriptor=False) as progress:
        while reader.view and not reader.view.state.is_final:
            progress.reach(_reached(reader.view))
            time.sleep(POLL_S)
            if time.monotonic() >= reconcile_at:
                context.mend()
                reconcile_at = time.monotonic() + RECONCILE_EVERY_S
            reader.poll()
    if reader.view is None:
        raise UserError(f"job {job_id} was deleted during --wait")
    view = reader.view
    reader.close()
    if is_told and not context.as_json:
        say(f"job {job_id} {ENDED[view.state]}{_what_came_of(view)}")
    return view


def _reached(job: JobView) -> Reached:
    """Return a job's progress: why it is waiting, its phase before the first step, or its step."""
    if job.state == JobState.QUEUED:
        return Reached(f"waits: {waits(job)}")
    if not job.step or not job.total_steps:
        return Reached(job.phase or describe_state(job).word)
    kind = kind_of(job.config)
    rate = f" at {job.tokens_per_s:,.0f} {kind.rate}" if job.tokens_per_s else ""
    return Reached(f"{kind.unit} {job.step:,} of {job.total_steps:,}{rate}", job.progress, job.eta_s)


def _reader(context: CommandContext, job_id: int) -> JobReader:
    """Return a reader that has polled the job once; raise `UserError` if the job does not exist."""
    reader = JobReader(context.data, job_id, mends=True)
    reader.poll()
    if reader.view is None:
        raise UserError(reader.problem or f"there is no job {job_id}; `sae-tui jobs` lists them")
    return reader


_BEFORE_METRICS = ("id", "name", "state", "phase", "step", "total_steps", "progress", "eta_s", "tokens")
_AFTER_METRICS = (
    "overfitting", "tokens_per_s", "device", "gpu_ids", "gpu_uuids", "distributed", "world_size", "mode", "host",
    "user", "attempt", "waits_for", "priority", "held", "after", "array", "array_limit", "tags", "note", "created",
    "started", "ended", "error", "output_path", "estimated_memory_bytes", "peak_memory_bytes", "dropped",
)  # fmt: skip


def _fields(job: JobView) -> dict[str, Any]:
    before, after = ({name: getattr(job, name) for name in names} for names in (_BEFORE_METRICS, _AFTER_METRICS))
    of_now = {"silent": job.silent or None, "best_sae": job.best_sae or None, "evaluation": _evaluation(job)}
    of_now["seeds"] = as_json(job.seeds) if job.seeds else None
    if job.seeds and job.seeds.are_all:
        of_now["best_sae"] = None
    known = {name: value for name, value in _values(job).items() if value is not None}
    of_now |= {"metrics": dict(job.others) if kind_of(job.config).is_program else known}
    return before | _values(job) | after | of_now


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


def _values(job: JobView) -> dict[str, float | None]:
    """Return a dict mapping the loss and each metric to the latest value."""
    return {name: newest_value(job, name) for name in ("loss", *measured_names())}


def _field_title(name: str, *, is_program: bool) -> str:
    """Return the title of a field; metrics have the same titles as on screen."""
    if name == SPEED and is_program:
        return "steps/s"
    if name in (*measured_names(), *USAGE, SPEED):
        return title_of(name)
    return "ETA" if name == "eta_s" else name.removesuffix("_bytes")


def _field_texts(job: JobView) -> dict[str, object]:
    """Return the fields formatted for people; JSON contains the raw values."""
    fields = _fields(job)
    del fields["best_sae"], fields["seeds"], fields["evaluation"], fields["metrics"]
    if kind_of(job.config).is_program:
        fields = _with_own_metrics(job, fields)
    if not job.overfitting:
        del fields["overfitting"]
    if kind_of(job.config).is_program:
        fields = {name: value for name, value in fields.items() if name not in measured_names()}
    fields |= {"evaluation": job.evaluation.words} if job.evaluation else {}
    if not job.silent:
        del fields["silent"]
    return {name: _field_text(job, name, value) for name, value in fields.items()}


def _with_own_metrics(job: JobView, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, replacing an SAE's metrics and tokens with what the program reports, losses first."""
    own = {name: job.others[name] for name in [*own_series(job.others), *USAGE] if name in job.others}
    kept = {name: value for name, value in fields.items() if name not in ("loss", "tokens", *measured_names())}
    before = {name: kept.pop(name) for name in _BEFORE_METRICS if name in kept}
    return before | own | kept


def _field_text(job: JobView, name: str, value: Any) -> object:
    if name == "state":
        return describe_state(job).word
    if name == "eta_s":
        return _time_left(job)
    if name in ("created", "started", "ended"):
        return clock_time(value)
    if name == "dead_fraction" and value is not None and (window := dead_after_words(job)):
        return f"{measure(value, series_named(name))} (silent for {window})"
    if value is not None and (name == "progress" or series_named(name).is_share):
        return f"{100 * value:.3g}%"
    if value is not None and series_named(name).unit:
        return measure(value, series_named(name))
    return gibibytes(value) if name.endswith("_bytes") and value is not None else value


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
    return (job.id, job.name, state, step, done, *values, rate, _time_left(job), on)


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


def _time_left(job: JobView) -> str:
    """Return the estimated time left, such as `12 min`, from the remaining steps and the recent speed."""
    return UNKNOWN if job.eta_s is None else duration(job.eta_s)
