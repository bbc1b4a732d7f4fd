"""Tests for `sae-tui explain`, with real processes and a local server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Shell
from cli.test_features import record
from support.stores import put_store
from support.stub_llm import WORDS, StubServer, explained_file, knows_the_truth, stub_server

from trainer.contract.runs.explanations import EXPLANATIONS, Explanation
from trainer.contract.runs.explanations import record as store
from trainer.contract.runs.features import FEATURES

KEY = "sk-a-very-secret-key-0123456789"


@pytest.fixture
def job_id(shell: Shell) -> int:
    """Record a job whose SAE has been evaluated."""
    shell.env = {
        name: value for name, value in shell.env.items() if name not in ("OPENAI_API_KEY", "SAE_TUI_EXPLAIN_KEY")
    }
    shell.data.create()
    put_store(shell.data.control_db, "control")
    job_id = record(shell)
    put(shell.data.sae(job_id))
    return job_id


def put(folder: Path, weights: str = "w", **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FEATURES).write_bytes(explained_file(weights=weights, **more))


def flags(server: StubServer) -> tuple[str, ...]:
    return "--url", server.url, "--model", "stub"


def is_of(prompt: str, latent: int) -> bool:
    return f"<<{WORDS[latent]}>>" in prompt and "Answer with one line" in prompt


def stored(shell: Shell, job_id: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shell.data.sae(job_id) / EXPLANATIONS).read_text().splitlines()]


def test_latents_are_explained_in_the_order_of_features_and_listed(shell: Shell, job_id: int) -> None:
    assert shell.run("explain", job_id).stdout == "no latent is explained; add --url and --model to explain latents\n"
    with stub_server(knows_the_truth) as server:
        done = shell.run("explain", job_id, *flags(server), "--latents", 3)
        lines = done.stdout.splitlines()
        assert lines[0].startswith("3 latents: about 15 requests, 3")
        assert lines[1].split() == ["LATENT", "DETECTION", "FUZZING", "DESCRIPTION"]
        assert [line.split() for line in lines[2:5]] == [
            [str(n), "1.00", "±", "0.05", "1.00", "±", "0.05", "the", "word", word] for n, word in enumerate(WORDS[:3])
        ]
        assert lines[5] == "3 latents explained; mean detection 1.000 ± 0.031, fuzzing 1.000 ± 0.031 (chance 0.5)"
        assert lines[6:] == ["15 requests, 1,500 prompt tokens and 105 answer tokens; 0 failed"]
        assert len(server.prompts) == 15
        # The latents that are done are kept unless --again is given; other latents are added.
        answer = shell.json("explain", job_id, 1, 7, *flags(server))
        assert [one["text"] for one in answer["latents"]] == ["the word river", "the word night"]
        assert (answer["n_explained"], answer["n_kept"], answer["n_failed"], answer["n_requests"]) == (1, 1, 0, 5)
        assert (answer["prompt_tokens"], answer["completion_tokens"]) == (500, 35)
        assert len(server.prompts) == 20
        assert shell.json("explain", job_id, 1, *flags(server), "--again")["n_explained"] == 1
    assert [one["latent"] for one in stored(shell, job_id)] == [0, 1, 2, 7]
    assert [one["latent"] for one in shell.json("explain", job_id)["latents"]] == [0, 1, 2, 7]


def test_features_show_and_find_the_explanations(shell: Shell, job_id: int) -> None:
    with stub_server(knows_the_truth) as server:
        shell.run("explain", job_id, 2, *flags(server))
    listed = [line.split() for line in shell.run("features", job_id, "--limit", 4).stdout.splitlines()]
    assert [row[3:] for row in listed[2:6]] == [
        ["-", "-", "king"], ["-", "-", "river"], ["-", "the", "word", "seven", "seven"], ["-", "-", "green"],
    ]  # fmt: skip
    shown = shell.run("features", job_id, 2).stdout.splitlines()
    assert "explanation  the word seven" in shown
    assert "scores       detection 1.00 ± 0.05, fuzzing 1.00 ± 0.05 (chance 0.5), by stub" in shown
    assert shell.json("features", job_id, 2)["explanation"]["text"] == "the word seven"
    assert shell.json("features", job_id, 3)["explanation"] is None
    found = shell.run("features", job_id, "--search", "word").stdout.splitlines()
    assert "only in their texts or explanations: 1" in found
    assert shell.errors("features", job_id, "--search", "zebra", code=1) == [
        'sae-tui: error: no max-activating example contains a token with "zebra", and no explanation has it'
    ]


def test_explanations_of_other_weights_are_left_out_and_written_again(shell: Shell, job_id: int) -> None:
    folder = shell.data.sae(job_id)
    store(folder, Explanation(latent=0, text="old", weights="before"), Explanation(latent=1, text="new", weights="w"))
    lines = shell.run("explain", job_id).stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:2]] == ["new"]
    assert lines[-1] == "1 explanation of other weights left out; explain these latents again"
    assert "explanation" not in shell.run("features", job_id, 0).stdout
    with stub_server(knows_the_truth) as server:
        shell.run("explain", job_id, 0, *flags(server))
    assert [(one["text"], one["weights"]) for one in stored(shell, job_id)] == [("the word king", "w"), ("new", "w")]


def test_a_sweep_needs_the_label_of_an_sae(shell: Shell, job_id: int) -> None:
    folder = shell.data.sae(job_id)
    (folder / FEATURES).unlink()
    put(folder / "k=16")
    put(folder / "k=32")
    assert shell.errors("explain", job_id, code=1) == ['sae-tui: error: --sae: give one of "k=16", "k=32"']
    with stub_server(knows_the_truth) as server:
        shell.run("explain", job_id, 0, *flags(server), "--sae", "k=32")
    assert [file.parent.name for file in folder.glob(f"*/{EXPLANATIONS}")] == ["k=32"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--url", "http://localhost/v1"], 2, "--url: needs --model too, as in"),
        (["--model", "x"], 2, "--model: needs --url too, as in"),
        (["--url", "localhost", "--model", "x"], 2, "--url: must be like http://localhost:8000/v1"),
        (["--url", "http://localhost/v1", "--model", " "], 2, "--model: must be the name"),
        (["--url", "http://localhost/v1", "--model", "x", "--parallel", "999"], 2, "--parallel: must be at most 256"),
        (["99"], 1, "there is no latent 99; the SAE has latents 0 to 11"),
        (["--url", "http://127.0.0.1:1/v1", "--model", "x"], 1, "--url: http://127.0.0.1:1 cannot be reached: "),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    shell: Shell, job_id: int, arguments: list[str], code: int, sentence: str
) -> None:
    (line,) = shell.errors("explain", job_id, *arguments, code=code)
    assert line.startswith(f"sae-tui: error: {sentence}")
    assert not (shell.data.sae(job_id) / EXPLANATIONS).exists()
    answer = shell.json("explain", job_id, *arguments, code=code)
    assert [*answer] == ["error"]


def test_a_run_with_many_requests_needs_consent(shell: Shell, job_id: int) -> None:
    with stub_server(knows_the_truth) as server:
        few = shell.argv("explain", job_id, *flags(server))
        code = "import sys; from sae_tui.cli_commands import explaining; explaining.MANY_REQUESTS = 10; " \
               "from sae_tui.cli import main; sys.exit(main(sys.argv[1:]))"  # fmt: skip
        argv = [few[0], "-c", code, *few[3:]]
        refused = subprocess.run(argv, env=shell.env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert (refused.returncode, server.prompts) == (1, [])
        assert "explain asks for confirmation, which needs a terminal; in a script add --yes" in refused.stderr
        agreed = subprocess.run([*argv, "--yes"], env=shell.env, capture_output=True, text=True)
        assert agreed.returncode == 0, agreed.stderr
        assert len(server.prompts) == 60


class Held:
    """Answers truthfully, but holds back the answers about one latent until it is released."""

    def __init__(self, latent: int) -> None:
        self.latent = latent
        self.arrived, self.released = threading.Event(), threading.Event()

    def __call__(self, prompt: str) -> str:
        if is_of(prompt, self.latent):
            self.arrived.set()
            self.released.wait(60)
        return knows_the_truth(prompt)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_loses_only_the_latents_in_progress(shell: Shell, job_id: int, how: signal.Signals) -> None:
    held = Held(5)
    with stub_server(held) as server:
        process = shell.start("explain", job_id, *flags(server), "--parallel", 1)
        assert held.arrived.wait(60)
        process.send_signal(how)
        _, errors = process.communicate(timeout=30)
        held.released.set()
        if how is signal.SIGINT:
            assert process.returncode == 130
            assert errors.endswith("5 latents explained; the same command continues with the others\n")
        assert "Traceback" not in errors
        assert [one["latent"] for one in stored(shell, job_id)] == [0, 1, 2, 3, 4]
        assert [file.name for file in shell.data.sae(job_id).iterdir() if file.name.startswith(".")] == []
        server.prompts.clear()
        shell.run("explain", job_id, *flags(server))
        assert [latent for latent in range(12) if any(is_of(one, latent) for one in server.prompts)] == [*range(5, 12)]
    assert [one["text"] for one in stored(shell, job_id)] == [f"the word {word}" for word in WORDS]


def fails_from(latent: int, reply: Any) -> Callable[[str], Any]:
    return lambda prompt: reply if is_of(prompt, latent) else knows_the_truth(prompt)


def test_a_server_that_refuses_the_key_ends_the_run_in_one_sentence(shell: Shell, job_id: int) -> None:
    body = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}}).encode()
    with stub_server(fails_from(2, (401, {}, body))) as server:
        done = shell.run("explain", job_id, *flags(server), "--parallel", 1, code=1, OPENAI_API_KEY=KEY)
        assert done.stderr.splitlines() == [
            "sae-tui: error: the server answers HTTP 401: Incorrect API key provided: …; give a valid key in"
            " $SAE_TUI_EXPLAIN_KEY"
        ]
        assert "the word river" in done.stdout
        shell.json("explain", job_id, *flags(server), "--parallel", 1, code=1, OPENAI_API_KEY=KEY)


def test_a_run_in_which_every_latent_fails_has_failed(shell: Shell, job_id: int) -> None:
    with stub_server(lambda _: "I'm sorry, no.") as server:
        done = shell.run("explain", job_id, 0, 1, *flags(server), code=1)
        assert done.stdout.count("failed: the model refuses: I'm sorry, no.") == 2
        assert done.stdout.endswith("; 2 failed\n")


def test_the_key_is_in_no_file_and_no_output(shell: Shell, job_id: int) -> None:
    def repeats_the_key(prompt: str) -> Any:
        if is_of(prompt, 1):
            return f"Description: the key {KEY}"
        if is_of(prompt, 2):
            return 500, {"X-Key": KEY}, KEY.encode()
        if is_of(prompt, 3):
            return 200, {}, json.dumps({"choices": KEY}).encode()
        return knows_the_truth(prompt)

    with stub_server(repeats_the_key) as server:
        outputs = []
        for more in ((), ("--json", "--again")):
            done = shell.run("explain", job_id, 0, 1, 2, 3, *flags(server), *more, SAE_TUI_EXPLAIN_KEY=KEY)
            outputs += [done.stdout, done.stderr]
        assert {one["Authorization"] for one in server.headers} == {f"Bearer {KEY}"}
    refused = shell.run(
        "explain", job_id, "--url", "http://192.0.2.1/v1", "--model", "x", code=2, SAE_TUI_EXPLAIN_KEY=KEY
    )
    assert "without encryption to 192.0.2.1" in refused.stderr
    outputs += [refused.stdout, refused.stderr, shell.run("features", job_id, 1).stdout]
    assert [output for output in outputs if KEY in output] == []
    files = [file for file in shell.folder.rglob("*") if file.is_file()]
    assert any(file.name == EXPLANATIONS for file in files)
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []


def test_hostile_answers_reach_the_terminal_as_plain_text(shell: Shell, job_id: int) -> None:
    with stub_server(fails_from(0, "Description: a\x1b]0;title\x07b\x9b2J\u202ec")) as server:
        done = shell.run("explain", job_id, 0, *flags(server))
    assert all(char.isprintable() for line in done.stdout.splitlines() for char in line)
    assert "a ]0;title b 2J c" in done.stdout


@pytest.mark.parametrize(
    ("latent", "words"),
    [(0, ["0 of 12 latents, 1 request", "0 %"]), (3, ["3 of 12 latents, 1605 tokens", "25 %", " left"])],
)
def test_progress_is_shown_on_a_terminal(shell: Shell, job_id: int, latent: int, words: list[str]) -> None:
    held = Held(latent)
    controller, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    with stub_server(held) as server:
        argv = shell.argv("explain", job_id, *flags(server), "--parallel", 1)
        process = subprocess.Popen(argv, env=shell.env, stdout=subprocess.PIPE, stderr=terminal, text=True)
        shell.started.append(process)
        os.close(terminal)
        shown = b""
        while not all(word.encode() in shown for word in words):
            shown += os.read(controller, 4096)
        held.released.set()
        process.communicate(timeout=60)
    os.close(controller)
