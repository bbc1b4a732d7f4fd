"""`sae-tui export`: exports a job's SAE for other tools."""

from __future__ import annotations

import argparse

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json
from sae_tui.jobs.launch.exporting import export_sae
from trainer.contract.exits import Exit
from trainer.contract.progress import Progress


def export(context: CommandContext, flags: argparse.Namespace) -> int:
    """Export a job's SAE and print its path."""
    given = {"--best": flags.best, "--force": flags.force}
    arguments = ["--format", flags.format, *(flag for flag, is_given in given.items() if is_given)]
    arguments += [word for label in flags.only for word in ("--only", label)]
    arguments += ["--k", str(flags.k)] if flags.k else []
    with Progress(f"exporting job {flags.id}", to_descriptor=False) as progress:
        done = export_sae(context.data, flags.id, flags.out, arguments, on_reached=progress.reach)
    if context.as_json:
        show_json(done)
        return Exit.DONE
    for layer, step in done.layers.items():
        say(f"layer {layer} of step {step} -> {done.output_path}")
    for label, folder in ({} if done.layers else done.saes or {"SAE": done.output_path}).items():
        say(f"{label} of step {done.step} -> {folder}")
    for note in done.notes:
        say(f"note: {note}")
    return Exit.DONE
