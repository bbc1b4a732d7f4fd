"""`sae-tui doctor`: reports what would prevent training on this machine, and estimates a job's requirements."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of, read_job
from sae_tui.cli_commands.output import UNKNOWN, say, show_json, show_table
from sae_tui.doctor.advice import JobReport, job_report, report_without_forecast
from sae_tui.doctor.base import FOLDER_LIMIT_S, CheckedMachine, Finding
from sae_tui.doctor.environments import both
from sae_tui.doctor.examine import CHECKS, PROBES, SELF_TEST, examine, level_words, summary
from sae_tui.doctor.queue_service import check_queue_service, install
from sae_tui.jobs.gpus.availability import choices
from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source
from sae_tui.jobs.launch.best_gpus import refusal
from sae_tui.jobs.launch.placement import machine
from sae_tui.jobs.launch.ways import Way
from sae_tui.threads import on_thread
from trainer.contract.exits import Exit
from trainer.contract.planning.hardware import read_box
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.job import AnyJob, JobConfig
from trainer.contract.wording import duration, gibibytes

LEVEL_WIDTH, SUBJECT_WIDTH = 10, 15
INDENT = " " * (LEVEL_WIDTH + SUBJECT_WIDTH)
LEGEND = "* the mode selected by the job's parallel.mode; SPEED-UP: in tokens/s, relative to one device"


def doctor(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print each finding as soon as it is available; return 1 if any of them is an error."""
    job: AnyJob | None = None
    python = ""
    is_silent = bool(context.hung) or not _has_settings(context)
    if not is_silent:
        job = read_job(flags.job, flags.overrides, flags.gpus, consent_of(context, flags)) if flags.job else None
        own = job.launch.python if job and job.needs_trainer else None
        python = context.settings.python if own is None else own
    source = gpu_source(context.source_name, Occupancy(context.data), count=context.gpu_count)
    box = CheckedMachine(context.data, source, python=python)
    box.is_silent = is_silent
    findings = []
    asked = (*CHECKS, *(PROBES if flags.probe else ()), *(SELF_TEST if flags.self_test else ()))
    if flags.install_service:
        install(box)
        asked = (check_queue_service,)
    for finding in examine(box, asked):
        findings.append(finding)
        if not context.as_json:
            _show(finding)
    # Read the speeds only after the probe has measured them.
    report = _report(context, flags, job, box) if job and not box.is_silent else None
    findings += report.findings if report else ()
    failed = any(finding.level == "error" for finding in findings)
    if context.as_json:
        show_json(_as_json(findings, report) | {"environments": both(box)})
    else:
        if report:
            _show_job(report)
        say()
        say(summary(findings))
    return Exit.FAILED if failed else Exit.DONE


def _report(context: CommandContext, flags: argparse.Namespace, job: AnyJob, box: CheckedMachine) -> JobReport:
    gpus = box.gpus
    here = choices(gpus.samples, Occupancy(context.data).holders())
    if not KINDS[job.kind].trains:
        return report_without_forecast(job, here, context.data, cuda=gpus.cuda)
    busy = () if job.launch.share else [choice.index for choice in here if choice.state == "busy"]
    speeds = read_box(context.data.box_file)
    training = cast(JobConfig, job)
    refused = partial(refusal, machine=machine(here, context.data, cuda=gpus.cuda))
    price = flags.price_per_gpu_hour
    return job_report(training, gpus.samples, price, speeds=speeds, cuda=gpus.cuda, busy=busy, refusal=refused)


def _has_settings(context: CommandContext) -> bool:
    """Read the settings; return False if their disk does not respond."""
    try:
        on_thread(lambda: context.settings).result(FOLDER_LIMIT_S)
    except TimeoutError:
        return False
    return True


def _as_json(findings: Iterable[Finding], report: JobReport | None) -> dict[str, Any]:
    all_findings = list(findings)
    return {
        "ok": not any(finding.level == "error" for finding in all_findings),
        "findings": all_findings,
        "job": report,
    }


def _show(finding: Finding) -> None:
    """Print a finding and its remedy, wrapped to the terminal width if standard output is a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    head = f"{level_words(finding):<{LEVEL_WIDTH}} {finding.subject:<{SUBJECT_WIDTH - 1}}"
    _wrap(finding.sentence, width, f"{head} ", f"{INDENT} ")
    _wrap(finding.remedy, width, f"{INDENT} → ", f"{INDENT}   ")


def _wrap(text: str, width: int, first: str, other: str) -> None:
    for line in textwrap.wrap(text, width, initial_indent=first, subsequent_indent=other, break_on_hyphens=False):
        say(line)


def _show_job(report: JobReport) -> None:
    say()
    say(f"{report.name}:")
    if report.rows:
        _show_rows(report)
        say()
    for finding in report.findings:
        _show(finding)


def _show_rows(report: JobReport) -> None:
    on_gpus = any(row.n_gpus for row in report.rows)
    headings: list[str] = [
        "GPUS" if on_gpus else "PROCESSES",
        "MODE",
        "MEMORY",
        "TIME",
        "TOKENS/S",
        "SPEED-UP",
        "EFFICIENCY",
    ]
    costs = [f"{row.cost:.2f}" for row in report.rows if row.cost is not None]
    columns: list[list[Any]] = [[_cells(row)[index] for row in report.rows] for index in range(len(headings))]
    columns += [costs] if costs else []
    columns.append([_here(row) for row in report.rows])
    headings += [*(["COST"] if costs else []), "HERE"]
    show_table(headings, zip(*columns, strict=True))
    say(LEGEND)


def _cells(row: Way) -> tuple[object, ...]:
    mode = f"hybrid of {row.latent_ranks}" if row.mode == "hybrid" else row.mode
    return (
        row.ranks,
        f"{mode} *" if row.chosen else mode,
        gibibytes(row.memory_bytes),
        duration(row.seconds),
        f"{row.tokens_per_s:,.0f}",
        f"{row.speed_up:.1f}×",
        f"{100 * row.efficiency:.0f}%",
    )


def _here(row: Way) -> str:
    if row.fits is None:
        return UNKNOWN
    if row.fits_now:
        return f"fits on GPU {','.join(map(str, row.gpus))}" if row.gpus else "fits"
    return "fits when free" if row.fits else "does not fit"
