"""Tests for `features --text`, `steer` and `sae_tui.load`, with a real process and a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.cells import cell_len
from support.features import features_file
from support.model_saes import write_sae
from support.tiny_models import make_model

import sae_tui
from sae_tui.cli_commands.interaction import _show_strongest, _side_by_side
from trainer.contract.answers.interaction import FiringLatent, Generate, Steered, TextToken
from trainer.contract.errors import UserError
from trainer.contract.runs.features import FEATURES

HOOK = "blocks.1.hook_resid_post"
# In the model's units, as evaluations write them.
SCALED = features_file(acts_scale=("F32", "f", [1], [0.5]))


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saes")
    place = write_sae(folder / "sae", make_model(folder / "gpt2", "gpt2"), HOOK)
    (place / FEATURES).write_bytes(SCALED)
    return place


def test_the_strongest_latents_of_each_token_are_printed(shell, sae: Path) -> None:
    done = shell.run("features", sae, "--text", "the dog ran")
    title, *lines = done.stdout.splitlines()
    assert title.split() == ["TOKEN", "STRONGEST", "LATENTS", "(ACTIVATION)"]
    assert lines[0].startswith("(the)")
    assert lines[-1].startswith("(…) first and special tokens")
    tokens = shell.json("features", sae, "--text", "the dog ran")["tokens"]
    assert "".join(token["text"] for token in tokens) == "the dog ran"
    assert [token["is_counted"] for token in tokens] == [False] + [True] * (len(tokens) - 1)
    own = shell.run("features", sae, "0", "--text", "the dog ran").stdout.splitlines()
    acts = [next((one["act"] for one in token["latents"] if not one["latent"]), 0.0) for token in tokens]
    assert [float(line.split()[0]) for line in own[: len(tokens)]] == pytest.approx(acts, abs=0.006)


def test_wide_and_combining_characters_do_not_shift_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a", " 天", "🙂", "\u0301", "e\u0301", "\u200d", "\u202eb", "שלום", "\ud800"]
    _show_strongest([TextToken(one, (FiringLatent(7, 1.0),), is_counted=len(one) > 1) for one in texts])
    _, *lines = capsys.readouterr().out.splitlines()
    assert len({cell_len(line.removesuffix("7 (1.00)")) for line in lines}) == 1
    assert len(lines) == len(texts)
    lines = _side_by_side("天地玄黄" * 9 + "\n🙂 and more words", "short", 61)
    assert {cell_len(line.partition("│")[0]) for line in lines} == {30}
    assert "".join(line[:30].partition(" ")[0] for line in lines[1:-1]) == "天地玄黄" * 9


def test_a_prompt_is_continued_with_and_without_steering(shell, sae: Path) -> None:
    arguments = ["steer", sae, 0, 1, "--prompt", "the dog ran over the hill", "--tokens", 4]
    done = shell.run(*arguments, "--strength", 3)
    assert "WITHOUT STEERING" in done.stdout
    assert "NEXT TOKEN" in done.stdout
    assert "KL divergence" in done.stdout
    answer = shell.json(*arguments, "--strength", 3)
    assert answer["n_tokens"] == 4
    assert max(one["kl"] for one in answer["kl"]) > 0
    ablated, zero = shell.json(*arguments, "--ablate"), shell.json(*arguments, "--strength", 0)
    assert ablated == zero != answer
    unchanged = shell.json(*arguments, "--strength", 0, "--add")
    assert unchanged["plain"] == unchanged["steered"] == answer["plain"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["steer", "SAE", 2, "--prompt", "a cat"], 1, "latent 2 does not exist; the SAE has latents 0 to 1"),
        (["steer", "SAE", 0, "--prompt", ""], 1, "the text is empty; enter at least one word"),
        (["steer", "SAE", 0, "--prompt", "a cat", "--chat"], 1, "has no chat template"),
        (["steer", "SAE", 0, "--prompt", "a", "--model", "/nowhere"], 1, "the language model: there is nothing at"),
        (["steer", "SAE", 0, "--prompt", "a", "--tokens", 5000], 2, "--tokens: must be at most 4,096, not 5,000"),
        (["steer", "SAE", 0, "--prompt", "a", "--temperature", "hot"], 2, "--temperature: must be a number from 0"),
        (["steer", "SAE", 0, "--prompt", "a", "--strength", "inf"], 2, "--strength: must be a number such as 2"),
        (["steer", "SAE", 0, "--prompt", "a", "--sae", "k=2"], 1, "--sae: the run has only one SAE"),
        (["features", "SAE", 2, "--text", "a cat"], 1, "latent 2 does not exist; the SAE has latents 0 to 1"),
        (["steer", "SAE", 0, "--prompt", "a cat", "--strength", 1e39], 1, "not finite; use a smaller strength"),
        (["features", "SAE", "--text", "a\udcff"], 1, "contains bytes that are not UTF-8; leave them out"),
        (
            ["steer", "SAE", 0, "--prompt", "a", "--part", "B"],
            1,
            "--part: there is no part B; the SAE is no crosscoder",
        ),
        (["steer", "SAE", 0, "--prompt", "a", "--part", "2"], 2, "--part: must be the letter of a part, such as B"),
        (["features", "SAE", "--chat"], 2, "--chat: needs --text"),
        (["features", "SAE", "--text", "a", "--search", "b"], 2, "--search: cannot be combined with --text"),
        (["steer", "/nowhere", 0, "--prompt", "a"], 1, "/nowhere has no exported SAE"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    words: list[Any], code: int, sentence: str, shell, sae: Path
) -> None:
    done = shell.run(*(sae if word == "SAE" else word for word in words), code=code)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_requests_and_answers_are_lines_of_json(sae: Path) -> None:
    requests = [
        "nonsense",
        '{"request": "read", "text": "the cat"}',
        '{"request": "generate", "prompt": "the dog ran", "latents": [{"latent": 1, "strength": 2}], "n_tokens": 2}',
        '{"request": "generate", "prompt": "the dog ran", "latents": []}',
    ]
    argv = [sys.executable, "-m", "trainer", "interact", str(sae), "--device", "cpu"]
    done = subprocess.run(argv, input="\n".join(requests) + "\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["ready", "refused", "text", "continued", "continued", "generated", "refused"]


def test_ctrl_c_ends_a_generation_and_keeps_it(sae: Path) -> None:
    words = ["steer", str(sae), "0", "--prompt", "the dog ran over the hill", "--tokens", "20", "--json", "--add"]
    words += ["--temperature", "1", "--seed", "3"]
    code = f"""
import os, signal, sys, threading
from sae_tui.cli_commands import interaction
from sae_tui.jobs.interaction import Interaction
whole = Interaction.ask
def ask(self, request):
    for number, answer in enumerate(whole(self, request)):
        if not number:
            # As a terminal does: to all processes in the group.
            os.killpg(os.getpgid(0), signal.SIGINT)
        yield answer
Interaction.ask = ask
from sae_tui.cli import main
sys.exit(main({words!r}))
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert done.returncode == 0, done.stderr
    assert 1 <= json.loads(done.stdout)["n_tokens"] <= 20


def test_an_abandoned_request_never_answers_the_next_one(sae: Path) -> None:
    with sae_tui.load(sae) as latents:
        latents.read("the dog")
        answers = latents._running().ask(Generate("the dog ran over the hill", (Steered(0, 2.0),), n_tokens=20))
        next(answers)
        answers.close()  # type: ignore[attr-defined]
        assert "".join(token.text for token in latents.read("a small cat")) == "a small cat"


def test_the_process_ends_without_an_error_if_no_request_comes(sae: Path) -> None:
    argv = [sys.executable, "-m", "trainer", "interact", str(sae), "--device", "cpu", "--idle", "1"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(120) == 0, process.stderr and process.stderr.read()


def test_an_sae_is_loaded_with_its_latents_and_its_model(sae: Path) -> None:
    with sae_tui.load(sae) as latents:
        assert len(latents) == 2
        assert latents[0].contexts[0].tokens[1].text == " Lämb"
        assert [one.latent for one in latents.search("lämb")] == [0]
        rows = torch.randn(3, 32)
        assert latents.sae.encode(rows).shape == (3, 2)
        assert latents.sae.reconstruct(rows).shape == (3, 32)
        assert "".join(token.text for token in latents.read("the dog ran")) == "the dog ran"
        (process,) = (one for one in psutil.Process().children() if "interact" in one.cmdline())
        assert latents.steer("the dog ran over the hill", [0, 1], 3, n_tokens=2).n_tokens == 2
        with pytest.raises(IndexError, match="latents 0 to 1, not 2"):
            latents[2]
    assert not process.is_running()
    with pytest.raises(UserError, match="has no exported SAE"):
        sae_tui.load(sae.parent / "gpt2")
