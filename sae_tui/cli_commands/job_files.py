"""Reads the job files named on the command line, and applies the settings given by flags."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.settings.consent import NO_CONSENT, Consent, problems_of, refused
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import apply_override, bases_of, load_any, parse_any, read_toml, to_table
from trainer.contract.settings.sections import CHOSEN
from trainer.contract.settings.toml import Judged


def consent_of(context: CommandContext, flags: argparse.Namespace) -> Consent:
    """Return which code in job files may run, according to the flags and settings."""
    settings = context.settings
    names = (settings.python, *settings.trusted_code)
    return Consent(flags.allow_code, names)


def read_job(path: Path, overrides: Sequence[str], gpus: str | None = None, consent: Consent = NO_CONSENT) -> AnyJob:
    """Return the job from a job file, with `--set` and `--gpus` applied; raise `JobFileError` listing all problems.

    A command without a name is named after its command line, just as with `run` and in the launch form.
    """
    from sae_tui.jobs.launch.kinds.command import with_own_name

    judged = Judged(pipes=True)
    job = load_any(path, overrides_of(overrides, gpus), read=judged)
    _refuse_code(job, consent, overrides, judged)
    return with_own_name(job)


def _refuse_code(job: AnyJob, consent: Consent, overrides: Sequence[str], judged: Judged) -> None:
    if wrong := refused(to_table(job), consent.given(overrides), judged.distrust):
        raise JobFileError(problems_of(wrong, judged.distrust))


def examine_job(
    path: Path, overrides: Sequence[str], gpus: str | None, consent: Consent
) -> tuple[AnyJob | None, list[Problem], list[Problem]]:
    """Return the job without its invalid settings, the problems in its settings, and the problems with refused code.

    The returned job also omits settings that would run refused code, so that all other settings can be checked.
    """
    judged = Judged(pipes=True)
    raw = read_toml(path, judged)
    for override in overrides_of(overrides, gpus):
        apply_override(raw, override)
    bases = bases_of(path)
    refusals = refused(raw, consent.given(overrides), judged.distrust)
    job, problems = parse_any(raw, bases)
    wrong = {problem.path for problem in problems} | {code.path for code in refusals}
    for path_of in wrong:
        section, _, key = path_of.rpartition(".")
        table = raw.get(section) if section else raw
        if isinstance(table, dict):
            table.pop(key, None)
    if wrong:
        job = _with_known_entries(raw, wrong, bases)
    return job and job.with_paths(bases), problems, problems_of(refusals, judged.distrust)


def _with_known_entries(raw: dict[str, Any], wrong: Collection[str], bases: Sequence[Path]) -> AnyJob | None:
    """Return a job in which each unknown architecture, optimizer and source is replaced with one that fits the rest.

    Return None if there is no such job.
    """
    unknown = {section: field for section, (field, _) in CHOSEN.items() if f"{section}.{field}" in wrong}
    for words in itertools.product(*(CHOSEN[section][1] for section in unknown)):
        for (section, field), word in zip(unknown.items(), words, strict=True):
            raw[section][field] = word
        job, _ = parse_any(raw, bases)
        if job is not None:
            return job
    return None


def overrides_of(overrides: Sequence[str], gpus: str | None) -> list[str]:
    """Return the `--set` overrides, with `--gpus` appended as one more override."""
    return [*overrides, *([f"launch.gpus={gpus_value(gpus)}"] if gpus else [])]


def gpus_value(gpus: str) -> str:
    """Return a `--gpus` value as TOML: `0,1` as a list, and `auto:2` or `cpu` as a string."""
    return f"[{gpus}]" if gpus.replace(",", "").replace(" ", "").isdecimal() else f'"{gpus}"'
