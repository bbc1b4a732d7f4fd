"""The JSON answers about the program itself, and the table of all answers of `sae-tui`."""

from __future__ import annotations

from sae_tui.cli_commands.answers import gpu_answers, job_answers
from trainer.contract.answers.schema import Schema, fields, list_of, word
from trainer.contract.answers.shared import answer

_SHELL = (word("bash", "zsh", "fish"), "Which shell.")
_SCRIPT = fields("Script for a shell", {"shell": _SHELL, "script": (str, "What belongs into its start-up file.")})
_INSTALLED = fields(
    "With --install",
    {
        "shell": _SHELL,
        "file": (str, "File that was written, an absolute path."),
        "changed": (bool, "Whether it was not there like that already."),
        "next": (str, 'What is left to do for it, in a sentence; "": nothing.'),
        "undo": (str, "Command that takes it back."),
    },
)
_LIST = fields("Without COMMAND", {"commands": (list_of(str), "What `sae-tui schema` takes.")})
_ONE = {"title": "With COMMAND: a JSON Schema", "type": "object", "required": ["$schema"]}
_GUIDE = fields("Guide for an agent", {"guide": (str, "The guide, in Markdown.")})
_SERVED = fields(
    "Once it can be reached",
    {
        "url": (str, "Address of the app; whoever has it sees what you see."),
        "pid": (int, "Process that serves it; SIGINT or SIGTERM ends it."),
        "port": (int, "Port of 127.0.0.1."),
        "read_only": (bool, "Whether nothing can be changed there."),
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
