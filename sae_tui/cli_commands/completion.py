"""Completion of commands, flags and job ids in bash, zsh and fish; argcomplete asks this program for the words."""

from __future__ import annotations

import argparse
import os

from sae_tui.cli_commands.context import Context
from sae_tui.cli_commands.output import show_json, text
from sae_tui.jobs.states import shown
from sae_tui.jobs.view.reader import JobsReader
from trainer.contract.output import show_text

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "sae-tui"
# Set by the shell while it asks.
_ASKED = "_ARGCOMPLETE"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and ends, where it is the shell that asks; else costs nothing."""
    if _ASKED in os.environ:
        import argcomplete

        # Also the flags that the help of a command leaves to the help of the program.
        argcomplete.autocomplete(parser, print_suppressed=True)


def job_ids(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """The ids of all jobs with what tells them apart."""
    reader = JobsReader(Context(parsed_args).data)
    reader.poll()
    return {str(job.id): f"{text(job.name)} ({shown(job).word})" for job in reader.jobs}


def show_script(context: Context, flags: argparse.Namespace) -> int:
    """What belongs into the shell's start-up file."""
    import argcomplete

    script = argcomplete.shellcode([PROGRAM], shell=flags.shell)
    if context.as_json:
        show_json({"shell": flags.shell, "script": script})
    else:
        show_text(script)
    return 0
