"""`sae-tui eval`: writes the report cards for a job's SAEs and collects max-activating examples for their latents."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of
from sae_tui.cli_commands.output import say, show_json
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import JobFileError, UsageError
from trainer.contract.exits import Exit
from trainer.contract.output import has_done
from trainer.contract.paths import working_folder
from trainer.contract.settings.consent import code_in, problems_of, refused
from trainer.contract.settings.job_file import read_toml
from trainer.contract.settings.toml import Judged
from trainer.contract.store.rows import Job


def evaluate(context: CommandContext, flags: argparse.Namespace) -> int:
    """Start evaluating a job; with `--wait`, wait for the evaluation to end and return 0 on success, otherwise 1."""
    _refuse_contradictions(flags)
    went_well, message = evaluated(context, flags)
    if context.as_json:
        show_json({"id": flags.id, "message": message})
    else:
        say(message)
    return Exit.DONE if went_well else Exit.FAILED


def evaluated(context: CommandContext, flags: argparse.Namespace) -> tuple[bool, str]:
    """Start evaluating a job and, with `--wait`, wait for the end; return whether it went well, and a message."""
    with existing(context.data, flags.id) as control:
        job = control.job(flags.id)
    request.refuse(context.data, job)
    wants_gpu = job.device == "cuda" and not flags.cpu
    model = _model(flags.model)
    asked = request.EvaluationRequest(
        flags.id, model, _gpu(context, job) if wants_gpu else None, is_probed=flags.probe,
        waits=wants_gpu and context.gpus.cuda, gpu_source=job.gpu_source, keeps_rows=flags.keep_rows,
        is_spliced=not flags.no_splice, refine=flags.refine, allows_code=_runs_code(context, flags, model),
        has_effects=flags.effects,
    )  # fmt: skip
    since = time.time()
    message, went_well = request.evaluate(context.data, asked), True
    has_done(message)
    if flags.wait:
        with contextlib.suppress(KeyboardInterrupt):
            went_well, message = request.wait_for_end(context.data, flags.id, since)
    return went_well, message


def _refuse_contradictions(flags: argparse.Namespace) -> None:
    """Raise `UsageError` if a flag is given without another one that it needs."""
    if flags.probe and flags.model is None:
        raise UsageError("--probe: needs --model; add --model auto, or --model with an extraction's job file")
    if flags.effects and flags.model is None:
        raise UsageError("--effects: needs --model; add --model auto, or --model with an extraction's job file")
    if flags.no_splice and not (flags.probe or flags.effects):
        raise UsageError("--no-splice: needs --probe or --effects; add one of them, or leave out --no-splice")
    if flags.refine and flags.keep_rows:
        raise UsageError("--refine: is measured on rows; leave out --keep-rows")
    if flags.keep_rows and flags.model is None:
        raise UsageError("--keep-rows: leaves nothing to measure; add --model auto, or leave out --keep-rows")


def _model(given: str | None) -> str | None:
    return given if given in (None, request.AUTO) else str(working_folder() / str(given))


def _runs_code(context: CommandContext, flags: argparse.Namespace, model: str | None) -> bool:
    """Return whether the model's job file runs code; raise `JobFileError` if it would do so without consent."""
    if model in (None, request.AUTO):
        return False
    table = read_toml(Path(str(model)), judged := Judged())
    if wrong := refused(table, consent_of(context, flags), judged.distrust):
        raise JobFileError(problems_of(wrong, judged.distrust))
    return any(code_in(table))


def _gpu(context: CommandContext, job: Job) -> request.ReservedGpu | None:
    """Return an idle GPU for the evaluation, or None if all GPUs are in use or the job was trained on the CPU."""
    if job.device != "cuda":
        return None
    return request.idle_gpu(context.data, job, context.gpus.choices, context.gpus.source_name)
