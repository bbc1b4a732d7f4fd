"""The manual pages, generated from the command parsers; `make man` writes them."""

from __future__ import annotations

import os
from pathlib import Path

from argparse_manpage.manpage import Manpage

from sae_tui.cli_commands.parser import make_parser
from trainer.contract.exits import Exit
from trainer.contract.output import SafeParser
from trainer.parser import PROGRAM
from trainer.parser import make_parser as make_trainer_parser

FOLDER = Path(__file__).parents[2] / "packaging" / "man"


def man_pages() -> dict[Path, str]:
    """Return the text of every page, which depends on neither the date nor the terminal's width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        trainer = make_trainer_parser()
        of_app = _page(make_parser(lambda *_: 0), "sae-tui", "monitor GPUs and train sparse autoencoders on them")
        of_trainer = _page(trainer, PROGRAM, "train sparse autoencoders in the foreground")
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    # Before `sae-train` existed, this was the name of the manual page for `python -m trainer`.
    also = f".so man1/{PROGRAM}.1\n"
    return {FOLDER / "sae-tui.1": of_app, FOLDER / f"{PROGRAM}.1": of_trainer, FOLDER / "sae-tui-trainer.1": also}


def _page(parser: SafeParser, name: str, summary: str) -> str:
    examples, parser.epilog = parser.epilog or "", None
    page = Manpage(parser, {"project_name": "sae-tui", "manual_title": "sae-tui", "description": summary})
    page.prog, page.date = name, ""
    page.add_section("examples", "=", _as_written(examples.removeprefix("examples:\n")))
    page.add_section("exit status", "=", "\n".join(f".TP\n.B {one:d}\n{_roff(one.meaning)}" for one in Exit))
    header, rest = str(page).split("\n", 1)
    # Left-align the text, because justification would stretch the spaces between long words.
    return f"{header}\n.ad l\n{rest}"


def _as_written(text: str) -> str:
    """Return the text formatted so that line breaks and spaces are kept."""
    return f".nf\n{_roff(text).rstrip()}\n.fi"


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n"))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in man_pages().items():
        file.write_text(text, encoding="utf-8")
        print(file)
