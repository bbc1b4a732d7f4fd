"""Recommends GPUs for a job."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import read_job
from sae_tui.cli_commands.output import say, show_json, show_table
from sae_tui.jobs.launch import placement
from sae_tui.jobs.launch.best_gpus import best_gpus, refusal
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.memory_need import used_before
from trainer.contract.exits import Exit
from trainer.contract.planning.check_job import propose, wanted_devices
from trainer.contract.settings.consent import Consent


def recommend(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the GPUs best suited to a job; return 1 if there are none or the driver is broken."""
    # No consent is needed, because this command runs no code from the job file.
    job = read_job(flags.job, flags.overrides, consent=Consent(to_all=True))
    if context.has_broken_driver():
        return Exit.FAILED
    gpus, past, several = context.gpus, context.past(), context.settings.multi_gpu_enabled
    here = placement.machine(gpus.choices, context.data, cuda=gpus.cuda)
    is_open = not flags.count and job.launch.gpus == "auto"
    best = best_gpus(job, here, used_before(past), several=several) if is_open else None
    count = best.count if best else flags.count or wanted_devices(job) if several else 1
    asked = job.replace("launch", gpus=f"auto:{count}", backend="local")
    look, kind = propose(asked, here, used_before(past)).outlook, launch_kind(job.kind)
    took = kind.measured(job, look, "cuda" if gpus.cuda else "cpu", past)
    # Any idle GPU suits a job whose needs are unknown.
    advice = placement.recommend(gpus.choices, look.needs_bytes or 0, count)
    if advice.gpus and (problem := refusal(asked.replace("launch", gpus=list(advice.gpus)), here, used_before(past))):
        advice = msgspec.structs.replace(advice, gpus=(), shortfall=str(problem))
    if context.as_json:
        facts: dict[str, Any] = {"memory_required": look.needs_bytes, "memory_measured": took and took.peak_bytes}
        facts |= {"mode": look.mode, "why": best.why if best else ""}
        show_json(msgspec.structs.asdict(advice) | facts)
        return Exit.DONE if advice.gpus else Exit.FAILED
    say(kind.needs(look, took))
    rows = [(f"GPU {index}", "take" if index in advice.gpus else "", why) for index, why in advice.reasons.items()]
    if rows:
        show_table(("GPU", "", "WHY"), rows)
    if advice.shortfall:
        say(advice.shortfall)
    else:
        say(f"--gpus {','.join(map(str, advice.gpus))}{f': {best.why}' if best else ''}")
    return Exit.DONE if advice.gpus else Exit.FAILED
