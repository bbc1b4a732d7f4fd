"""`sae-tui schema`: prints the JSON Schemas for command output."""

from __future__ import annotations

import argparse

from sae_tui.cli_commands.answers import own_answers
from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say_all, show_json
from trainer.contract.answers import commands
from trainer.contract.answers.schema import Schema, as_text
from trainer.contract.errors import UsageError
from trainer.contract.exits import Exit
from trainer.contract.settings.typed import cut

# All commands report failures in the same format.
ERROR = "error"


def show_schema(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the JSON Schema for a command's output; without a command, list the commands with a schema."""
    known, asked = schemas(), " ".join(flags.words)
    if asked in known:
        say_all(as_text(known[asked]).splitlines())
    elif asked:
        raise UsageError(
            f'COMMAND: "{cut(asked)}" has no JSON Schema; `sae-tui schema` lists the commands that have one'
        )
    elif context.as_json:
        show_json({"commands": list(known)})
    else:
        say_all(known)
    return Exit.DONE


def schemas() -> dict[str, Schema]:
    """Return a dict mapping each command, such as `trainer run`, to its schema; `error` is the key for failures."""
    own = dict(sorted(own_answers.ANSWERS.items()))
    of_trainer = {f"trainer {name}": schema for name, schema in sorted(commands.ANSWERS.items()) if name != ERROR}
    return {**own, **of_trainer, ERROR: commands.ANSWERS[ERROR]}
