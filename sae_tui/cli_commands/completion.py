"""Completion of commands, flags and job ids in bash, zsh and fish; argcomplete asks this program for the words."""

from __future__ import annotations

import argparse
import os

from sae_tui.cli_commands.context import Context
from sae_tui.cli_commands.output import show_json, text
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.view.reader import JobsReader
from trainer.contract.output import show_text

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "sae-tui"
# Set by the shell while it asks.
_ASKED = "_ARGCOMPLETE"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit, where the shell asks for completions; else do nothing, at no cost."""
    if _ASKED in os.environ:
        import argcomplete

        # Complete also the flags that only the help of the whole program describes.
        argcomplete.autocomplete(parser, print_suppressed=True)


def job_ids(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Return the id of every job with its name and state."""
    reader = JobsReader(Context(parsed_args).data)
    reader.poll()
    return {str(job.id): f"{text(job.name)} ({describe_state(job).word})" for job in reader.jobs}


def show_script(context: Context, flags: argparse.Namespace) -> int:
    """Print the code that belongs into the shell's start-up file."""
    import argcomplete

    script = argcomplete.shell_integration.shellcode([PROGRAM], shell=flags.shell)
    if context.as_json:
        show_json({"shell": flags.shell, "script": script})
    else:
        show_text(script)
    return 0
