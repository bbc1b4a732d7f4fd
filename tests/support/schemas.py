"""The files of JSON Schemas, made of the types of answers: `make schemas` writes those that lie beside these."""

from __future__ import annotations

from pathlib import Path

from sae_tui.cli_commands.answers import own_answers
from trainer.contract.answers import commands
from trainer.contract.answers.schema import written


def schema_texts() -> dict[Path, str]:
    """Return the text of every file."""
    return written(own_answers.ANSWERS, own_answers.FOLDER) | written(commands.ANSWERS, commands.FOLDER)


if __name__ == "__main__":
    texts = schema_texts()
    for folder in {file.parent for file in texts}:
        for file in folder.glob("*.json"):
            file.unlink()
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    print(f"{len(texts)} schemas")
