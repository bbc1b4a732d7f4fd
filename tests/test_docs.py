"""Tests that the README and the docs agree with the code: commands, job files, settings, links, the generated
reference.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from support.doc_blocks import ROOT, blocks, commands, inline_commands, pages
from support.forked_commands import run_command
from support.reference import FOLDER
from support.reference import pages as generated
from support.report_cards import put_card
from support.tour import LARGEST_BYTES
from support.tui import record_job, record_metrics

from sae_tui.cli_commands.parser import make_parser as app_parser
from sae_tui.policy import read_policy
from sae_tui.settings import load_settings
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.settings.job_file import parse_any
from trainer.contract.store.states import JobState
from trainer.parser import make_parser as trainer_parser

# Other programs, whose flags are not checked.
OTHERS = {"cat", "cd", "chgrp", "chmod", "docker", "du", "eval", "export", "git", "jq", "jupyter", "loginctl", "mkdir",
          "rsync", "sky", "source", "ssh", "wandb"}  # fmt: skip
# Example values for the placeholders in commands within sentences.
STANDS_FOR = {"ID": "7", "OTHER": "9", "N": "2", "INDEX": "0", "RUN": "7", "JOB": "job", "COMMAND": "gpus"}
# Commands that a test can run because they change at most a name, tag or note, and flags that would make them run
# forever.
LOOKS = {"completion", "compare", "gpus", "job", "jobs", "logs", "metrics", "note", "recommend", "rename", "select",
         "tag", "validate"}  # fmt: skip
GOES_ON = {"--watch", "-f", "--follow"}
APP, TRAINER = app_parser(lambda *_: 0), trainer_parser()
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_generated_reference_is_up_to_date() -> None:
    written = {name: (FOLDER / name).read_text() for name in generated()}
    assert written == generated(), "make reference"


def test_every_documented_command_is_accepted_by_its_parser() -> None:
    wrong = [f"{place}: {' '.join(argv)}: {why}" for place, argv in commands() if (why := objection(argv))]
    assert not wrong, "\n".join(wrong)


def test_commands_in_running_text_are_accepted_by_their_parser() -> None:
    told = [(place, [STANDS_FOR.get(word, word) for word in argv]) for place, argv in inline_commands()]
    wrong = [f"{place}: {' '.join(argv)}: {why}" for place, argv in told if (why := objection(as_named(argv)))]
    assert not wrong, "\n".join(wrong)


def as_named(argv: list[str]) -> list[str]:
    """Add `--help` to a command that consists only of a name, or of a flag without a value."""
    n_words = 4 if argv[0] == "python" else 2
    bare = argv[:-1] if argv[-1] == "--json" else argv
    if len(bare) > n_words:
        return argv
    return [*(bare[:-1] if bare[-1].startswith("-") else bare), "--help"]


def objection(argv: list[str]) -> str:
    """Return why a command is invalid, or "" if it is valid."""
    program, *rest = argv
    if program == "sae-tui":
        return parsed_by(APP, rest)
    if program == "sae-train":
        return parsed_by(TRAINER, rest)
    if "trainer" in rest and "-m" in rest:
        return parsed_by(TRAINER, rest[rest.index("trainer") + 1 :])
    if program.startswith(".venv/bin/"):
        return ""
    if program == "python":
        return "" if rest[0] in written_files() or (ROOT / rest[0]).exists() else "no such file"
    if program == "make":
        missing = [target for target in rest if not re.search(rf"^{target}:", MAKEFILE, re.M)]
        return f"no target {missing}" if missing else ""
    if program in ("pip", "pipx", "uv", "uvx"):
        asked = {extra for word in rest for names in re.findall(r"\[([\w,]+)\]", word) for extra in names.split(",")}
        return f"no extra {asked - EXTRAS.keys()}" if asked - EXTRAS.keys() else ""
    return "" if program in OTHERS else "not a program that is known here"


def written_files() -> set[str]:
    """Return the names of the files that readers of the docs write, and the placeholder for another program's name."""
    return {block.title for block in blocks("python")} | {"train.py"}


def parsed_by(parser: argparse.ArgumentParser, argv: list[str]) -> str:
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser.parse_args(argv)
        except SystemExit as end:
            return told.getvalue().strip() if end.code else ""
        except UserError as error:
            return str(error)
    return ""


def test_every_toml_block_is_a_valid_job_file_or_settings_file(tmp_path: Path) -> None:
    wrong = []
    for block in blocks("toml"):
        if block.title == "settings.toml":
            (tmp_path / block.title).write_text(block.text)
            problems = load_settings(tmp_path / block.title)[1]
        elif block.title == "policy.toml":
            file = tmp_path / "etc" / "sae-tui" / block.title
            file.parent.mkdir(parents=True)
            file.write_text(block.text)
            file.chmod(0o644)
            problems = list(read_policy(DataDir(tmp_path), tmp_path).problems)
        else:
            # Add a data section to a partial job file.
            table = tomllib.loads(block.text)
            whole = {"data": {"path": "rows"}} if "data" not in table and "kind" not in table else {}
            problems = parse_any(whole | table)[1]
        wrong += [f"{block.place}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


def test_every_python_block_compiles() -> None:
    for block in blocks("python"):
        compile(block.text, block.place, "exec")


def test_the_examples_that_train_from_python_run_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sae, crosscoder, *_ = (block for block in blocks("python") if "how-to/python.md" in block.place)
    smaller = (
        sae.text.replace("4096, 384", "256, 32").replace("8192, 384", "512, 32").replace("n_steps=500", "n_steps=5")
    )
    exec(compile(smaller.replace("d_sae=3072", "d_sae=64"), sae.place, "exec"), {})
    exec(compile(crosscoder.text.replace("n_steps=50", "n_steps=5"), crosscoder.place, "exec"), {})
    assert all((tmp_path / name / "cfg.json").exists() for name in ("my-sae", "my-crosscoder"))


def test_the_example_that_runs_commands_from_python_runs_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, block = (block for block in blocks("python") if "how-to/python.md" in block.place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "probe.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "report.py").write_text("import os; print('layer', os.environ['LAYER'])")
    exec(compile(block.text.replace("gpus=1", "gpus=0"), block.place, "exec"), {})
    assert capsys.readouterr().out.splitlines()[1:] == ["0 finished", "layer 12", ""]


def test_every_block_names_its_language() -> None:
    known = {"bash", "console", "sh", "toml", "python", "text", "json", "diff"}
    everything = blocks("", *known)
    assert [block.place for block in everything if block.language == ""] == []
    fences = sum(page.read_text().count("\n```") for page in pages())
    assert fences == 2 * len(everything)


def test_documented_read_commands_run_without_errors(tmp_path: Path) -> None:
    env = os.environ | {"SAE_TUI_DATA_DIR": str(tmp_path / "data"), "SHELL": "/bin/bash"}
    record_jobs(DataDir(tmp_path / "data"))
    job = tomli_w.dumps({"data": {"path": str(ROOT / "data/sample")}, "launch": {"gpus": "cpu"}})
    wrong = []
    for number, argv in enumerate(dict.fromkeys(tuple(argv) for _, argv in commands() if can_be_run(argv))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "job.toml").write_text(job)
        done = run_command(["--gpu-source", "simulated", *argv[1:]], env, folder, timeout=60)
        told = done.stdout + done.stderr
        wrong += [f"{' '.join(argv)}: {told}"] if done.returncode or "Traceback" in told else []
    assert not wrong, "\n".join(wrong)


def can_be_run(argv: list[str]) -> bool:
    looks = argv[0] == "sae-tui" and len(argv) > 1 and argv[1] in LOOKS and GOES_ON.isdisjoint(argv)
    return looks and "extract.toml" not in argv


def record_jobs(data: DataDir) -> None:
    """For all job ids in the documentation, record finished jobs with report cards."""
    data.create()
    for number in range(1, 14):
        job_id = record_job(
            data, f"minilm-{number}", JobState.FINISHED, step=200, world_size=2, fvu=0.2, tags=("sweep",)
        )
        record_metrics(data, job_id, steps=20)
        put_card(data.sae(job_id))


GUIDES = ROOT / "docs" / "contributing"
# Patterns that match code that depends on a job's kind.
_CLASSES = r"\b(?:ExtractJob|JobConfig|Outlook|ExtractionOutlook)\b"
BY_CLASS = re.compile(rf"isinstance\([^()]*(?:\([^()]*\))?[^()]*{_CLASSES}|\bis {_CLASSES}")
BY_NAME = re.compile(r"\bextracts\(|\b(?:ExtractJob|JobConfig)\.kind\b|\bis ExtractJob\b")
# The modules of a job kind may narrow the types of its job and outlook.
OWN_FILES = {"sae_tui/jobs/launch/kinds/training.py", "sae_tui/jobs/launch/kinds/extraction.py"}


def test_the_architecture_guide_shows_the_tested_example() -> None:
    (shown,) = (block for block in blocks("python") if block.title == "tests/support/toy_architecture.py")
    assert shown.text == (ROOT / shown.title).read_text(), "copy the file into docs/contributing/add-an-architecture.md"


@pytest.mark.slow
def test_the_example_sensor_in_the_guide_appears_in_every_view_and_json_output(tmp_path: Path) -> None:
    for name in ("sae_tui", "trainer", "data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (change,) = blocks("diff")
    apply = ["git", "apply", "-C1", "-"]
    done = subprocess.run(apply, cwd=tmp_path, input=change.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "tests")))
    env = os.environ | {"PYTHONPATH": path, "SAE_TUI_DATA_DIR": str(tmp_path / "d")}

    def run(*arguments: str) -> str:
        argv = [sys.executable, "-m", *arguments]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    gpus = "sae_tui", "--gpu-source", "simulated", "gpus"
    assert json.loads(run(*gpus, "0", "--json"))["memory_temperature_c"] == 41
    assert "memory_temperature_c  41 °C\n" in run(*gpus, "0")
    heading, first, *_ = run(*gpus).splitlines()
    assert "MEM °C" in heading
    assert "41 °C" in first
    views = json.loads(run("support.sensor_views", "memory_temperature_c"))
    for view in ("list", "two lines", "far", "card", "small card", "map"):
        assert "41°C" in views[view], view
    assert "41°C" not in views["list at 60"]
    assert "33°C" in views["list at 60"]
    assert "('memory', '41°C', 'text')" in views["page"]
    assert views["impossible"] == "None"
    assert 'sae_tui_gpu_memory_temperature_celsius{gpu="0"' in views["prometheus"]
    assert "| `memory_temperature_c` | integer or null | Temperature of the memory, in °C;" in views["reference"]


def asking(pattern: re.Pattern[str]) -> set[str]:
    sources = [path for package in ("sae_tui", "trainer") for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)) for path in sources if pattern.search(path.read_text())}


def test_only_the_modules_for_a_job_kind_check_a_jobs_class() -> None:
    # Both modules use the parsed TOML table of a job file, not a job.
    by_table = {"sae_tui/jobs/output.py", "sae_tui/jobs/launch/resume.py"}
    assert asking(BY_CLASS) - OWN_FILES - by_table == set()


def test_the_job_kind_guide_names_every_module_that_checks_a_jobs_kind() -> None:
    guide = (GUIDES / "add-a-job-kind.md").read_text()
    assert [path for path in sorted(asking(BY_NAME)) if f"`{path}`" not in guide] == []


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", *sorted(GUIDES.glob("*.md"))], ids=lambda page: page.name)
def test_every_file_named_in_a_guide_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:sae_tui|trainer|tests|data)/[\w/.-]+)`", page.read_text()))
    # In the guides, new files are named `x` or, as in the example, `loudest`.
    new = {path for path in named if Path(path).stem in ("x", "loudest")}
    assert sorted(path for path in named - new if not any(ROOT.glob(f"{path}*"))) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_link_target_exists(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.slow
def test_the_site_can_be_built_and_loads_nothing_external(tmp_path: Path) -> None:
    program = shutil.which("mkdocs", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("mkdocs is not installed")
    site = tmp_path / "site"
    argv = [program, "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200,
                          env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:)?//|<link[^>]+href=\"?(https?:)?//[^>]+stylesheet"
    )
    assert [page for page in site.rglob("*.html") if loaded.search(page.read_text())] == []


def test_the_animation_is_small_and_self_contained() -> None:
    film = (ROOT / "docs" / "tour.svg").read_text()
    assert len(film.encode()) < LARGEST_BYTES
    assert re.findall(r"<script|<image|<foreignObject|@import|@font-face|href|url\(|on\w+=", film) == []
    # Without animation, one of the pictures is visible.
    assert {"visibility:visible", "visibility:hidden"} <= set(re.findall(r"visibility:\w+", film))
    assert 'visibility="visible"' in film
    assert "prefers-reduced-motion" in film
