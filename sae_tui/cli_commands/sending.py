"""`sae-tui run --host` and `sae-tui launch --host`: runs the command on another host."""

from __future__ import annotations

import argparse
import os

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of, read_job
from sae_tui.hosts.far_command import CommandRequest, FarCommand
from sae_tui.jobs.launch.clone import grid
from trainer.contract.paths import working_folder
from trainer.contract.settings.job_file import dump_job


def send(context: CommandContext, flags: argparse.Namespace) -> int:
    """Run the command on `--host`, and return its exit code.

    Job files are read on this host and need not exist on the other one. The paths in them are made absolute.
    """
    folder = os.path.abspath(getattr(flags, "folder", None) or working_folder())
    request = CommandRequest(flags.given, folder, _jobs(context, flags))
    prefix = "" if context.as_json else f"{flags.on_host}: "
    return FarCommand(flags.on_host, request, context.settings.ssh_command or ("ssh",), prefix=prefix).run()


def _jobs(context: CommandContext, flags: argparse.Namespace) -> list[str]:
    """Return the text of the job files; the other host applies the overrides again, with each value in a grid."""
    files = getattr(flags, "jobs", [])
    overrides = [*flags.overrides, *grid(flags.grid)[0]] if files else []
    return [dump_job(read_job(file, overrides, None, consent_of(context, flags))) for file in files]
