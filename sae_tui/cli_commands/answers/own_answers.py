"""The JSON output about the program itself, and the table of all `sae-tui` output schemas."""

from __future__ import annotations

from sae_tui.cli_commands.answers import gpu_answers, job_answers
from trainer.contract.answers.schema import Schema, fields, list_of, word
from trainer.contract.answers.shared import answer

_SHELL = (word("bash", "zsh", "fish"), "Name of the shell.")
_SCRIPT = fields("Script for a shell", {"shell": _SHELL, "script": (str, "Text for the shell's start-up file.")})
_INSTALLED = fields(
    "With --install",
    {
        "shell": _SHELL,
        "file": (str, "Absolute path of the file that was written."),
        "changed": (bool, "Whether the file was created or changed."),
        "next": (str, 'What you still have to do, in a sentence; "" if nothing.'),
        "undo": (str, "Command that undoes the installation."),
    },
)
_LIST = fields("Without COMMAND", {"commands": (list_of(str), "Names that `sae-tui schema` accepts.")})
_ONE = {"title": "With COMMAND: a JSON Schema", "type": "object", "required": ["$schema"]}
_GUIDE = fields("Guide for an agent", {"guide": (str, "The guide, in Markdown.")})
_SERVED = fields(
    "When the server is ready",
    {
        "url": (str, "Address of the app; anyone who has it sees what you see."),
        "pid": (int, "Id of the server process; SIGINT or SIGTERM stops it."),
        "port": (int, "Port on 127.0.0.1."),
        "read_only": (bool, "Whether the browser only shows jobs and cannot change them."),
    },
)
ANSWERS: dict[str, Schema] = {
    **gpu_answers.ANSWERS,
    **job_answers.ANSWERS,
    "completion": answer("sae-tui completion --json", _SCRIPT, _INSTALLED),
    "schema": answer("sae-tui schema --json", _LIST, _ONE),
    "serve": answer("sae-tui serve --json, in the first line", _SERVED),
    "skill": answer("sae-tui skill --json", _GUIDE),
}
