"""`sae-tui schema`: what the answers in JSON look like."""

from __future__ import annotations

import argparse
from pathlib import Path

import trainer.contract.answers
from sae_tui.cli_commands import answers
from sae_tui.cli_commands.context import Context
from sae_tui.cli_commands.output import say, say_all, show_json
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.settings.knobs import cut

# What went wrong looks the same, whichever command failed.
ERROR = "error"


def show_schema(context: Context, flags: argparse.Namespace) -> int:
    """Print the JSON Schema of a command's answer; without a command list those that have one."""
    files, asked = schema_files(), " ".join(flags.words)
    if asked in files:
        say_all(files[asked].read_text(encoding="utf-8").splitlines())
    elif asked:
        raise UserError(f'COMMAND: nothing in JSON is known of "{cut(asked)}"; `sae-tui schema` lists all')
    elif context.as_json:
        show_json({"commands": list(files)})
    else:
        for name in files:
            say(name)
    return Exit.DONE


def schema_files() -> dict[str, Path]:
    """Return the file of every answer by its command, such as `gpus` or `trainer run`, and by `error`."""
    own, of_trainer = (
        {file.stem: file for file in sorted(Path(package.__path__[0]).glob("*.json"))}
        for package in (answers, trainer.contract.answers)
    )
    error = of_trainer.pop(ERROR)
    return {**own, **{f"trainer {name}": file for name, file in of_trainer.items()}, ERROR: error}
