"""Tests for `sae-train extract`: its output, its exit codes, and bit-identical files after any interruption."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tomli_w
import torch

from trainer.cli import main
from trainer.contract.process import STOP_SIGNALS
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from trainer.extraction.language_model import LanguageModel

ROOT = Path(__file__).parents[3]
KILLED = (-signal.SIGKILL, -signal.SIGALRM)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the signal handlers that a command replaces."""
    numbers = (signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def job_file(tiny: Callable[[str], Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an extraction job file to the working folder."""
    monkeypatch.chdir(tmp_path)
    table = {
        "kind": "extract",
        "model": {"path": str(tiny("gpt2")), "hooks": ["resid_post.1", "mlp_out.0"]},
        "text": {"path": str(corpus), "context": 32},
        "extract": {"n_tokens": 600, "batch_tokens": 64, "shard_rows": 100},
        "launch": {"gpus": "cpu"},
    }
    file = tmp_path / "job.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def test_the_json_output_contains_the_folders_and_counts_of_dropped_rows(
    job_file: Path, tmp_path: Path, capsys
) -> None:
    assert main(["extract", str(job_file), "--json"]) == EXIT_FINISHED
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result.keys() == {"state", "outputs", "n_tokens", "left_out", "tokens_per_s"}
    assert (result["state"], result["n_tokens"]) == ("finished", 600)
    folders = {hook: f"{tmp_path}/activations/{hook}" for hook in ("resid_post.1", "mlp_out.0")}
    assert result["outputs"] == folders
    assert result["left_out"]["first tokens"] > 10
    assert result["tokens_per_s"] > 0


def test_a_finished_extraction_is_reported_again_without_loading_the_model(
    job_file: Path, tmp_path: Path, tiny, capsys
) -> None:
    moved = Path(shutil.copytree(tiny("gpt2"), tmp_path / "model"))
    asked = ["extract", str(job_file), "--set", "model.path=model"]
    assert main(asked) == EXIT_FINISHED
    first = capsys.readouterr().out
    assert f"mlp_out.0: {tmp_path}/activations/mlp_out.0\n" in first
    assert "finished: 600 rows for each hook, " in first
    assert "\nleft out: " in first
    (moved / "model.safetensors").unlink()
    assert main(asked) == EXIT_FINISHED
    again = capsys.readouterr()
    assert "finished: 600 rows for each hook\n" in again.out
    assert "loading" not in again.err


def test_each_hook_is_listed_with_its_transformer_lens_and_module_names(job_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["extract", str(job_file), "--set", 'model.hooks=["resid_post.1", "h.0.mlp"]']) == EXIT_FINISHED
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"resid_post.1: {tmp_path}/activations/resid_post.1")
    assert lines[at + 1] == "  also called blocks.1.hook_resid_post and h.1"
    # A hook specified by its module path has no other names.
    assert lines[at + 2 : at + 4] == [f"h.0.mlp: {tmp_path}/activations/h.0.mlp", lines[-2]]


class Gate(BaseHTTPRequestHandler):
    """A fake Hugging Face hub where every model is gated."""

    def do_HEAD(self) -> None:
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to this model is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.mark.slow
def test_the_error_for_a_gated_model_names_its_licence_page_and_the_login_command(
    job_file: Path, tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gate) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        command = [sys.executable, "-m", "trainer", "extract", str(job_file), "--set", "model.path=someone/gated"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        hub.shutdown()
    assert done.returncode == EXIT_FAILED
    licence = "accept its licence at https://huggingface.co/someone/gated and log in with `hf auth login`"
    assert done.stderr.splitlines()[-1] == f'model.path: "someone/gated" is gated; {licence}'


def test_a_text_that_ends_early_is_reported(job_file: Path, capsys) -> None:
    assert main(["extract", str(job_file), "--set", "extract.n_tokens=1M"]) == EXIT_FINISHED
    assert "the text ran out before the 1,000,000 rows of extract.n_tokens" in capsys.readouterr().out


def test_unpaired_surrogates_in_texts_are_replaced_and_reported(job_file: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "the cat \\ud83d sat on the mat"}\n' * 30)
    text = f"text.path={tmp_path / 'broken.jsonl'}"
    assert main(["extract", str(job_file), "--set", text, "--set", "extract.n_tokens=50"]) == EXIT_FINISHED
    assert "unpaired surrogates in 30 documents were replaced with U+FFFD\n" in capsys.readouterr().err


def test_a_missing_tokenizer_or_a_git_lfs_pointer_produces_a_one_sentence_error(
    job_file: Path, tmp_path: Path, tiny, capsys
) -> None:
    bare, pointers = tmp_path / "bare", tmp_path / "pointers"
    for folder in (bare, pointers):
        shutil.copytree(tiny("gpt2"), folder)
    for pattern in ("*token*", "*vocab*", "*merges*"):
        for file in bare.glob(pattern):
            file.unlink()
    (pointers / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n")
    pointer = f"{pointers / 'model.safetensors'} is a git-lfs pointer and not the file itself; run `git lfs pull`"
    for folder, sentence in ((bare, f"{bare} has no tokenizer; copy"), (pointers, pointer)):
        assert main(["extract", str(job_file), "--set", f"model.path={folder}"]) == EXIT_FAILED
        assert f"model.path: {sentence}" in capsys.readouterr().err


def test_if_packing_is_impossible_the_use_of_one_document_per_context_is_reported(job_file: Path, tiny, capsys) -> None:
    assert main(["extract", str(job_file), "--set", f"model.path={tiny('bert')}"]) == EXIT_FINISHED
    assert "using one document per context, since this model cannot mask packed documents\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "code", "sentence"),
    [
        ("model.hooks=['resid_post.3']", EXIT_FAILED, "model.hooks: resid_post.3: the model has blocks 0 to 2"),
        ("model.hooks=['h.0.mpl']", EXIT_FAILED, 'model.hooks: the model has no module "h.0.mpl"; it has wte, wpe'),
        ("text.path=none.txt", EXIT_FAILED, "text.path: there is nothing at "),
        ("text.column=prose", EXIT_FAILED, "text.column: row 0 of "),
        (
            "text.context=65",
            EXIT_FAILED,
            "text.context: must be at most 64, the model's context length, not 65",
        ),
        ("extract.n_tokens=0", EXIT_USAGE, "extract.n_tokens: must be "),
        ("extract.rows=5", EXIT_USAGE, "extract.rows: is not a known setting"),
        ("launch.gpus=[0]", EXIT_USAGE, 'launch.gpus: there is no GPU here; use "cpu" or "auto" instead of [0]'),
        ("extract.output=job.toml", EXIT_USAGE, "extract.output: "),
    ],
)
def test_bad_input_produces_a_one_sentence_error(
    job_file: Path, override: str, code: int, sentence: str, capsys, no_gpus
) -> None:
    assert main(["extract", str(job_file), "--set", override]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading ")]
    assert len(lines) == 1
    assert lines[0].startswith(sentence)


def test_running_out_of_memory_produces_a_one_sentence_error(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(LanguageModel, "rows", lambda *_: torch.empty(2**50))
    assert main(["extract", str(job_file)]) == EXIT_FAILED
    sentence = "extract.batch_tokens: out of memory; use fewer than 64, or a shorter text.context\n"
    assert capsys.readouterr().err.endswith(f"\n{sentence}")


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.ranks.foreground_extraction.visible_gpus", list)


def test_run_refuses_extraction_jobs_and_extract_refuses_training_jobs(job_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["run", str(job_file)]) == EXIT_USAGE
    assert 'kind: is "extract" and not "train"; ' in capsys.readouterr().err
    (training := tmp_path / "training.toml").write_text('[data]\npath = "activations/mlp_out.0"\n')
    assert main(["extract", str(training)]) == EXIT_USAGE
    assert 'kind: is "train" and not "extract"; ' in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_job_can_read_an_extracted_hooks_folder(job_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["extract", str(job_file)]) == EXIT_FINISHED
    (training := tmp_path / "training.toml").write_text(
        '[data]\npath = "activations/mlp_out.0"\n[sae]\nd_sae = 64\nk = 4\n'
        '[train]\nbatch_size = 64\nn_steps = 4\n[launch]\ngpus = "cpu"\n'
    )
    assert main(["run", str(training), "--json"]) == EXIT_FINISHED
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["steps"], result["tokens"]) == (4, 256)
    config = json.loads((Path(result["output_path"]) / "cfg.json").read_text())
    assert "blocks.0.hook_mlp_out" in json.dumps(config)


def digests(output: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, except for lock files and temporary files left by a killed process."""
    files = [file for file in output.rglob("[!.]*") if file.is_file() and file.name != "run.lock"]
    return {str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("output", [[], ["url"]], ids=["folder", "url"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_an_extraction_killed_at_any_moment_still_ends_up_with_the_same_files(
    job_file: Path, tmp_path: Path, dtype: str, output: list[str]
) -> None:
    (root := tmp_path / "killed").mkdir()
    job_file.write_text(job_file.read_text().replace("[extract]", f'[extract]\ndtype = "{dtype}"'))
    command = [sys.executable, ROOT / "tests/support/killed_extractions.py", job_file, root, "0", "6", *output]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *killed, interrupted = json.loads(done.stdout.splitlines()[-1])
    for codes in killed:
        assert codes[-1] == EXIT_FINISHED
        assert all(code in KILLED for code in codes[:-1])
    assert interrupted == [EXIT_STOPPED, EXIT_FINISHED]
    whole = digests(root / "whole")
    assert len(whole) == 1 + 2 * (6 + 2)
    for name in [*map(str, range(6)), "interrupted"]:
        assert digests(root / name) == whole, (name, killed)
