"""Tests the tutorial by writing its files and running its commands in order, with fewer rows and steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_blocks import ROOT, blocks_of, commands_of
from support.real_model import FILE, needs_model

PAGE = ROOT / "docs" / "tutorial.md"
MODULES = {"sae-tui": ("-m", "sae_tui"), "sae-train": ("-m", "trainer")}
FEWER = {"20_000": "1_500", "200_000": "10_000", "1024": "256", "2304": "512"}


@pytest.mark.slow
@needs_model
@pytest.mark.timeout(900)
def test_the_tutorials_commands_lead_from_a_model_to_a_feature(tmp_path: Path) -> None:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(FILE.parents[1])]),
        "SAE_TUI_DATA_DIR": str(tmp_path / "data"),
        "HF_HUB_OFFLINE": "1",
    }
    for block in blocks_of(PAGE):
        if block.title:
            (tmp_path / block.title).write_text(fewer(block.text))
        for argv in commands_of(block) if block.language == "bash" else []:
            # Skip these commands: the packages are already installed, and the app has its own tests.
            if argv[0] != "pip" and argv != ["sae-tui"]:
                told = run(here(argv, tmp_path, env), tmp_path, env)
    assert "contexts" in told or "fires" in told


def fewer(text: str) -> str:
    for number, less in FEWER.items():
        text = text.replace(f"= {number}", f"= {less}")
    return text


def here(argv: list[str], folder: Path, env: dict[str, str]) -> list[str]:
    """Change a command so that it uses this Python, waits for jobs, names a latent that fires, and has no `--model`.

    An evaluation with the model takes minutes; `test_real_chain` tests it with fewer tokens.
    """
    program, *rest = argv
    if "--model" in rest:
        place = rest.index("--model")
        rest = rest[:place] + rest[place + 2 :]
    if "launch" in rest and "--wait" not in rest:
        rest = [*rest, "--wait"]
    if "1234" in rest:
        listed = run(here(["sae-tui", "features", "2", "--limit", "1", "--json"], folder, env), folder, env)
        rest = [str(json.loads(listed)[0]["latent"]) if word == "1234" else word for word in rest]
    return [sys.executable, *MODULES.get(program, ()), *rest]


def run(argv: list[str], folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (argv, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout
