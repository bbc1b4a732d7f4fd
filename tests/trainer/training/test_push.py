"""Tests for `sae-train export --push`, which uploads exactly the exported files."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import yaml
from support.hub import TOKEN, Hub

from trainer.cli import main
from trainer.contract.runs.card_versions import weights_of
from trainer.contract.runs.checkpoint_manifest import STATE, newest_first
from trainer.contract.runs.explanations import Explanation, record
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.training.hub_card import hub_card, is_on_the_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a fake hub, and log in this process's hub client."""
    hub = Hub()
    for name, value in hub.environment(str(tmp_path / "home")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    yield hub
    hub.close()


@pytest.fixture
def make_run(make_job: Callable[..., JobConfig], make_trainer: Callable, tmp_path: Path) -> Callable[..., Path]:
    def make(**sections: Any) -> Path:
        folder, job = tmp_path / "run", make_job(**sections)
        folder.mkdir()
        (folder / "job.toml").write_text(dump_job(job))
        make_trainer(job, checkpoints=folder / "checkpoints", output=folder / "sae").run()
        return folder

    return make


def push(run: Path, out: Path, *flags: str) -> int:
    return main(["export", str(run), "--out", str(out), "--push", "my-sae", *flags])


def hashes(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_an_export_and_a_model_card_are_pushed_to_a_private_repository(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path
) -> None:
    run, out = make_run(), tmp_path / "out"
    command = ["-m", "trainer", "export", str(run), "--out", str(out), "--push", "my-sae", "--yes", "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == EXIT_FINISHED, done.stderr
    pushed = json.loads(done.stdout)["pushed"]
    sent = hub.files["ada/my-sae"]
    assert hub.private == {"ada/my-sae": True}
    assert {name: sha256(content).hexdigest() for name, content in sent.items() if name != "README.md"} == hashes(out)
    assert sorted(hashes(out)) == ["cfg.json", "sae_weights.safetensors"]
    assert pushed["files"] == [{"path": name, "bytes": len(content)} for name, content in sent.items()]
    assert (pushed["url"], pushed["private"]) == (f"{hub.url}/ada/my-sae", True)
    assert f"to {hub.url}/ada/my-sae (private, new):" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_the_command_that_opens_a_transcoder_in_circuit_tracer_is_printed(
    make_run: Callable[..., Path], hub: Hub, activations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(data={"target_path": str(activations)}, sae={"architecture": "batch_topk"})
    form = ["--format", "circuit-tracer"]
    command = "circuit-tracer attribute --transcoder_set {} --prompt 'The capital of France is' --slug {} "
    command += "--graph_file_dir graphs --server"
    assert main(["export", str(run), "--out", str(tmp_path / "local"), *form]) == EXIT_FINISHED
    note = f"note: once it is uploaded with --push OWNER/NAME, this command opens it: {command}"
    assert note.format("OWNER/NAME", "NAME") in capsys.readouterr().out
    assert push(run, tmp_path / "out", "--yes", *form) == EXIT_FINISHED
    out = capsys.readouterr().out
    assert f"open it: {command}".format("ada/my-sae", "my-sae") in out
    assert "note: once it is uploaded" not in out


def test_without_push_the_hub_is_not_contacted(make_run: Callable[..., Path], hub: Hub, tmp_path: Path) -> None:
    run = make_run()
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == EXIT_FINISHED
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--public"]) == EXIT_USAGE
    assert hub.asked == []


def test_files_that_were_already_in_the_folder_are_not_sent(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path
) -> None:
    run, out = make_run(sae={"k": [2, 3]}), tmp_path / "out"
    assert push(run, out, "--yes") == EXIT_FINISHED
    hub.files["ada/my-sae"].clear()
    (out / "private.txt").write_text("mine")
    (out / "cfg.json").write_text("mine")
    (out / "k=2" / "card.json").write_text("{}")
    assert push(run, out, "--yes", "--force") == EXIT_FINISHED
    names = [f"k={k}/{name}" for k in (2, 3) for name in ("cfg.json", "sae_weights.safetensors")]
    assert list(hub.files["ada/my-sae"]) == [*names, "README.md"]


def test_the_model_card_contains_the_figures_and_the_hub_tags(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path
) -> None:
    run = make_run()
    assert main(["eval", str(run)]) == EXIT_FINISHED
    assert push(run, tmp_path / "out", "--yes") == EXIT_FINISHED
    _, front, text = hub.files["ada/my-sae"]["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "saelens", "tags": ["sparse-autoencoder", "saelens"]}
    assert "| FVU |" in text
    assert "card.json" not in text


HOSTILE = "# x\n\n<script>alert(1)</script>\n---\nbase_model: evil\n![a](http://h/\x1b]52;c;AA\x07\u202e" + "y" * 500


def test_the_model_card_escapes_all_text_from_another_users_run(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    assert main(["eval", str(run)]) == EXIT_FINISHED
    readme = run / "sae" / "README.md"
    written = readme.read_text()
    (checkpoint,) = newest_first(run / "checkpoints")[:1]
    state = json.loads((checkpoint / STATE).read_text())
    state["origin"] = {"model_name": HOSTILE, "hook_name": HOSTILE}
    (checkpoint / STATE).write_text(json.dumps(state))
    readme.write_text(f"{written}\n<img src=x onerror=y>\x1b[2J")
    one = Explanation(latent=0, text="kings", detection=0.9, model=HOSTILE, weights=weights_of(run / "sae"))
    record(run / "sae", one)
    judged = hub_card([checkpoint], "saelens", "ada/my-sae")
    assert "\nExplanations: 1 of 64 latents described by" in judged
    readme.unlink()
    plain = hub_card([checkpoint], "saelens", "ada/my-sae")
    for card, text in ((judged, "img src"), (plain, "evil")):
        _, front, body = card.split("---\n", 2)
        assert "base_model" not in yaml.safe_load(front)
        assert text in body
        assert not re.search(r"(?<!\\)<|^(# x|---|base_model)|!\[a|[\x1b\u202e]|y{200}", body, re.MULTILINE)


def test_the_name_alone_decides_whether_a_model_counts_as_being_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = ["google/gemma-2-2b", "gpt2", "models/mine", "/models/x", "a/b.gguf", "a/b/c", "", f"a/{'x' * 300}"]
    assert [name for name in names if is_on_the_hub(name)] == ["google/gemma-2-2b"]


def test_a_user_written_model_card_is_sent_and_an_existing_card_on_the_hub_is_kept(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path
) -> None:
    run, out = make_run(), tmp_path / "out"
    assert push(run, out, "--yes") == EXIT_FINISHED
    hub.files["ada/my-sae"] |= {"README.md": b"written there"}
    assert push(run, out, "--yes", "--force") == EXIT_FINISHED
    assert hub.files["ada/my-sae"]["README.md"] == b"written there"
    (out / "README.md").write_text("mine")
    assert push(run, out, "--yes", "--force") == EXIT_FINISHED
    assert hub.files["ada/my-sae"]["README.md"] == b"mine"


def test_a_push_to_a_public_repository_needs_the_public_flag(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert push(run, tmp_path / "out", "--yes", "--public") == EXIT_FINISHED
    assert hub.private == {"ada/my-sae": False}
    capsys.readouterr()
    assert push(run, tmp_path / "other", "--yes") == EXIT_USAGE
    assert capsys.readouterr().err.endswith("is already public; add --public, or choose another name\n")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("answer", ["", "n", "what"])
def test_nothing_is_sent_unless_the_user_answers_yes_in_a_terminal(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    run, terminal = make_run(), io.StringIO(f"{answer}\n")
    assert push(run, tmp_path / "out") == EXIT_USAGE
    assert hub.asked == []
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert push(run, tmp_path / "out") == EXIT_FAILED
    assert hub.files == {}
    terminal.write("y\n")
    terminal.seek(terminal.tell() - 2)
    assert push(run, tmp_path / "out", "--force") == EXIT_FINISHED
    assert hub.files.keys() == {"ada/my-sae"}


def break_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")


def log_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (break_token, "the hub does not accept your token; log in again with `hf auth login`"),
        (log_out, "you are not logged in to the Hugging Face hub; run `hf auth login`"),
        (go_offline, "HF_HUB_OFFLINE is set, so nothing is uploaded; unset it"),
        (uninstall, "requires the hub's client; pip install 'sae-tui[hf]'"),
    ],
    ids=["refused", "logged-out", "offline", "not-installed"],
)
def test_nothing_is_exported_if_nothing_can_be_sent(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[pytest.MonkeyPatch], None],
    sentence: str,
) -> None:
    spoil(monkeypatch)
    assert push(tmp_path, tmp_path / "out", "--yes") == EXIT_USAGE
    assert capsys.readouterr().err == f"--push: {sentence}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a b", "a/b/c", "..", "-a", "a--b", "a.git", "/a", "ä", "", "x" * 100])
def test_an_invalid_repository_name_is_refused_without_contacting_the_hub(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out"), f"--push={name}", "--yes"]) == EXIT_USAGE
    assert "is not a repository name; use NAME or OWNER/NAME" in capsys.readouterr().err
    assert hub.asked == []


@pytest.mark.parametrize("place", ["/put/", "/commit/", "/repos/create", "/preupload/"])
def test_a_push_that_fails_midway_leaves_nothing_on_the_hub_and_is_reported(
    make_run: Callable[..., Path], hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    run, hub.fails_at = make_run(), place
    capsys.readouterr()
    assert push(run, tmp_path / "out", "--yes") == EXIT_FAILED
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"--push: uploading to {hub.url}/ada/my-sae failed: HTTP 507")
    assert error.endswith(f"no files were uploaded; they are still in {tmp_path / 'out'}, so try again")
    assert TOKEN not in error
    assert "signature" not in error
    assert not hub.files.get("ada/my-sae")
    hub.fails_at = ""
    assert push(run, tmp_path / "out", "--yes", "--force") == EXIT_FINISHED
    assert hub.files["ada/my-sae"].keys() == {"cfg.json", "sae_weights.safetensors", "README.md"}
