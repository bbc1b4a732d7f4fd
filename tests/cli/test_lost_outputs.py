"""Tests for both programs' commands when their output is closed, on a full disk, or a pipe without a reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSED = "{}standard {} is closed; redirect it, as with {}/dev/null\n"
FULL = "{}the output cannot be written: No space left on device\n"
NAMES = {"trainer": "", "sae_tui": "sae-tui: error: "}


def opened(kind: str) -> int:
    """Open a file descriptor that accepts no output."""
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def ended(folder: Path, program: str, *words: str, **lost: str) -> tuple[int, str]:
    """Run a program whose outputs in `lost` accept nothing; return its exit code and what it wrote to the others."""
    outputs = {name: opened(kind) for name, kind in lost.items() if kind != "closed"}
    gone = [number for number, name in ((1, "stdout"), (2, "stderr")) if lost.get(name) == "closed"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "SAE_TUI_DATA_DIR": str(folder / "data")},
        preexec_fn=lambda: [os.close(number) for number in gone] and None,
        timeout=60,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | outputs,
    )
    for descriptor in outputs.values():
        os.close(descriptor)
    return done.returncode, ((done.stdout or b"") + (done.stderr or b"")).decode()


@pytest.mark.parametrize("program", NAMES)
def test_help_prints_nothing_to_a_closed_pipe_and_one_error_line_on_a_full_disk(program: str, tmp_path: Path) -> None:
    assert ended(tmp_path, program, "--help", stdout="gone") == (141, "")
    assert ended(tmp_path, program, "--help", stdout="full") == (1, FULL.format(NAMES[program]))


@pytest.mark.parametrize(("program", "words"), [("trainer", ["estimate", "none.toml"]), ("sae_tui", ["nonsense"])])
@pytest.mark.parametrize("kind", ["full", "gone"])
def test_a_usage_error_keeps_its_exit_code_if_stderr_cannot_be_written(
    program: str, words: list[str], kind: str, tmp_path: Path
) -> None:
    assert ended(tmp_path, program, *words, stderr=kind) == (2, "")


@pytest.mark.parametrize(("gone", "name", "into"), [("stdout", "output", ">"), ("stderr", "error", "2>")])
def test_no_training_starts_if_an_output_is_closed(gone: str, name: str, into: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'[data]\npath = "{ROOT}/data/sample"\n[launch]\ngpus = "cpu"\n')
    outcome = ended(tmp_path, "trainer", "run", "job.toml", "--out", "run", **{gone: "closed"})
    assert outcome == (1, CLOSED.format("", name, into))
    assert not (tmp_path / "run").exists()
    assert ended(tmp_path, "trainer", "run", "job.toml", stdout="closed", stderr="closed") == (1, "")


def test_a_command_continues_if_a_warning_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'[data]\npath = "{ROOT}/data/sample"\n[sae]\nd_sae = 96\nk = 8\n')
    code, output = ended(tmp_path, "trainer", "estimate", "job.toml", stderr="full")
    assert (code, "per process" in output or "per GPU" in output) == (0, True)


@pytest.mark.slow
def test_a_finished_command_whose_output_is_lost_exits_with_a_special_code(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'[data]\npath = "{ROOT}/data/sample"\n[sae]\nd_sae = 96\nk = 8\n')
    launch = ("launch", "job.toml", "--hold", "--set", "launch.gpus=cpu", "--json")
    code, message = ended(tmp_path, "sae_tui", *launch, stdout="full")
    assert (code, message.splitlines()[-1]) == (
        6, "sae-tui: error: job 1 is launched; the output cannot be written: No space left on device",
    )  # fmt: skip
    code, message = ended(tmp_path, "sae_tui", *launch, stdout="gone")
    assert (code, message.splitlines()[-1].split("; ")[0]) == (6, "sae-tui: error: job 2 is launched")
    code, message = ended(tmp_path, "sae_tui", "jobs", "--json", stdout="full")
    assert (code, message) == (1, FULL.format("sae-tui: error: "))
    assert [job["id"] for job in json.loads(ended(tmp_path, "sae_tui", "jobs", "--json")[1])] == [2, 1]
    for job_id in "12":
        assert ended(tmp_path, "sae_tui", "stop", job_id, "--kill")[0] == 0
