"""`sae-tui job | stop | logs`: shows and stops jobs, and prints their logs."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sae_tui.cli_commands import cards
from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.jobs import BEFORE_METRICS, json_fields, latest_values, time_left
from sae_tui.cli_commands.output import (
    LiveLine,
    clock_time,
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
from sae_tui.cli_commands.waiting import EXITS, POLL_S, reader_of, wait_until_ended
from sae_tui.jobs.bulk import Change, unless_ended
from sae_tui.jobs.energy import energy_of, energy_words
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.output import kind_of, why_no_sae
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.view.logs import n_logs_of
from sae_tui.jobs.view.past_runs import SIZES, Forecaster, QualityForecast, mean_forecast
from sae_tui.jobs.view.reader import JobReader, JobView
from sae_tui.jobs.view.shape import dead_after_words
from trainer.contract.errors import UsageError, UserError
from trainer.contract.exits import Exit
from trainer.contract.runs.card_figures import over_seeds
from trainer.contract.runs.checkpoint_mirror import Mirrored, read_mirrored
from trainer.contract.runs.how_far import BEST_FVU, BEST_STEP, PASSES
from trainer.contract.runs.log_tail import tail
from trainer.contract.runs.report_card import Card, as_table, facts, summary, title_lines
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.series import (
    LOSS,
    SPEED,
    USAGE,
    measure,
    measured_names,
    own_series,
    series_named,
    title_of,
)
from trainer.contract.store.job_store import Control
from trainer.contract.store.seeds import by_seeds, names_layer, without_seed
from trainer.contract.store.states import JobState
from trainer.contract.wording import gibibytes, plural, ranges

if TYPE_CHECKING:
    from sae_tui.jobs.view.postmortem import Postmortem


# The report card fields in JSON output, and the facts printed for people.
_OF_CARD = (
    "architecture", "step", "tokens", "data", "figures", "recovery", "known", "twins", "spliced", "effects", "probing",
    "training", "weights", "parts", "explained",
)  # fmt: skip
_KEY_FACTS = (
    "training", "overfitting", "FVU", "dimensions", "latents by part", "latent scaling", "L0", "latents", "CE score",
    "KL score", "largest effects", "probing (AUC)", "explanations",
)  # fmt: skip


def show_job(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print one job and its events; with `--wait`, wait until it ends and return the exit code for its final state."""
    from sae_tui.jobs.view.postmortem import examine, without_repeats

    code = Exit.DONE
    if flags.wait:
        code = EXITS[wait_until_ended(context, flags.id, prints_end=False).state]
    reader = reader_of(context, flags.id)
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
        shown = json_fields(reader.view) | energy_of(reader.view, context.settings)._asdict()
        shown |= _how_far(reader) | _forecast_fields(_forecast(context, reader))
        shown |= {"mirrored": _mirrored(context, flags.id)}
        shown |= {"events": reader.events, "ranks": reader.ranks}
        show_json(shown | {"cause": examine(context.data, reader.view), "card": _card_fields(now)})
        return code
    postmortem = examine(context.data, reader.view)
    values = _field_texts(reader.view) | _best_sae_values(reader.view)
    is_program = kind_of(reader.view.config).is_program
    values |= {name: value for name, value in _how_far(reader).items() if value is not None}
    values["energy"] = energy_words(reader.view, context.settings)
    if mirrored := _mirrored(context, flags.id):
        values["mirrored"] = mirrored.words(time.time())
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


def _mirrored(context: CommandContext, job_id: int) -> Mirrored | None:
    """Return the state of the mirror of a job's checkpoints, or None if it has none."""
    mirrored = read_mirrored(context.data.run(job_id).root)
    return mirrored if mirrored and mirrored.url else None


def _forecast(context: CommandContext, reader: JobReader) -> QualityForecast | None:
    """Return the forecast for a job's SAE or, in a sweep, for the SAEs that its metrics belong to; None if unknown."""
    job = reader.view
    assert job is not None
    with contextlib.closing(Control(context.data.control_db, readonly=True)) as control:
        found = Forecaster(context.data).forecasts(job, reader.series, control.jobs([JobState.FINISHED]))
    labels = job.seeds.labels if job.seeds else [*filter(names_layer, found)] or [job.best_sae]
    return mean_forecast([found[label] for label in labels]) if found.keys() >= set(labels) else None


def _forecast_fields(forecast: QualityForecast | None) -> dict[str, Any]:
    """Return the value expected at the end, and with twice each setting; each is null if it is unknown."""
    twice = forecast.doubled if forecast else {}
    return {"forecast": forecast and forecast.end, "twice": {name: twice.get(name) for name in SIZES}}


def _forecast_texts(job: JobView, forecast: QualityForecast | None) -> Iterator[tuple[str, str]]:
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
    of_sae = {name: _field_text(job, name, value) for name, value in latest_values(job).items() if value is not None}
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
    view = reader_of(context, chosen.ids[0]).view
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
    reader = reader_of(context, flags.id)
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


def _field_title(name: str, *, is_program: bool) -> str:
    """Return the title of a field; metrics have the same titles as on screen."""
    if name == SPEED and is_program:
        return "steps/s"
    if name in (*measured_names(), *USAGE, SPEED):
        return title_of(name)
    return "ETA" if name == "eta_s" else name.removesuffix("_bytes")


def _field_texts(job: JobView) -> dict[str, object]:
    """Return the fields formatted for people; JSON contains the raw values."""
    fields = json_fields(job)
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
    before = {name: kept.pop(name) for name in BEFORE_METRICS if name in kept}
    return before | own | kept


def _field_text(job: JobView, name: str, value: Any) -> object:
    if name == "state":
        return describe_state(job).word
    if name == "eta_s":
        return time_left(job)
    if name in ("created", "started", "ended"):
        return clock_time(value)
    if name == "dead_fraction" and value is not None and (window := dead_after_words(job)):
        return f"{measure(value, series_named(name))} (silent for {window})"
    if value is not None and (name == "progress" or series_named(name).is_share):
        return f"{100 * value:.3g}%"
    if value is not None and series_named(name).unit:
        return measure(value, series_named(name))
    return gibibytes(value) if name.endswith("_bytes") and value is not None else value
