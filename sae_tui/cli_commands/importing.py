"""`sae-tui import`: imports an SAE from another tool as a job."""

from __future__ import annotations

import argparse

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json
from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.launch.importing import import_sae
from trainer.contract.exits import Exit
from trainer.contract.output import has_done
from trainer.contract.progress import Progress


def take_in(context: CommandContext, flags: argparse.Namespace) -> int:
    """Create a job from the SAE in a folder, and print the commands for using it."""
    settings = [word for override in flags.overrides for word in ("--set", override)]
    arguments = [*settings, *(["--format", flags.format] if flags.format else [])]
    arguments += [word for one in flags.config for word in ("--config", one)]
    arguments += ["--transcoder"] if flags.transcoder else []
    source = name_elsewhere(context.gpus.source_name, len(context.gpus.choices))
    python = context.settings.python
    with Progress("importing", to_descriptor=False) as progress:
        job_id, imported = import_sae(
            context.data, flags.folder, flags.data, arguments, gpu_source=source, tags=flags.tag, python=python,
            on_reached=progress.reach,
        )  # fmt: skip
    has_done(f"imported {flags.folder} as job {job_id}")
    if context.as_json:
        facts = {name: getattr(imported, name) for name in ("architecture", "notes", "check", "warnings")}
        show_json({"id": job_id, "format": imported.form, **facts})
        return Exit.DONE
    say(f"job {job_id}: {imported.architecture} SAE, read as {imported.form}; {imported.check}")
    for doubt in imported.warnings:
        say(f"warning: {doubt}")
    for note in imported.notes:
        say(f"note: {note}")
    say(f"`sae-tui eval {job_id}` writes its report card, `sae-tui compare {job_id} ID` compares it with another job")
    return Exit.DONE
