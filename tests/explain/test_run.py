"""Tests for runs that explain latents, against a local server that knows the truth, guesses or fails."""

from __future__ import annotations

import json
import math
import re
import statistics
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.stub_llm import WORDS, StubServer, explained_file, guesses, knows_the_truth, stub_server

from sae_tui.explain import run as run_module
from sae_tui.explain.client import Client
from sae_tui.explain.run import MOST_FAILED, Explainer, Run
from trainer.contract.errors import UserError
from trainer.contract.runs.explanations import Explanation, read_explanations, record
from trainer.contract.runs.features import Features


def features_of(folder: Path, **more: Any) -> Features:
    (folder / "features.safetensors").write_bytes(explained_file(**({"weights": "w"} | more)))
    return Features(folder / "features.safetensors")


def explained(
    folder: Path, features: Features, server: StubServer, latents: list[int] | None = None, seed: int = 0, n: int = 4
) -> list[Explanation]:
    """Explain latents, and return the stored explanations."""
    asking = Client(server.url, "stub", backoff_s=0.001, timeout_s=20.0)
    run = Run(Explainer(features, "stub", seed), asking, folder, n)
    found = [one for one in run.explain(latents or features.order()) if one]
    stored = read_explanations(folder)
    assert {one.latent: stored[one.latent] for one in found} == {one.latent: one for one in found}
    return [stored[one.latent] for one in sorted(found, key=lambda one: one.latent)]


def test_an_explainer_that_knows_the_truth_has_perfect_scores(tmp_path: Path) -> None:
    with stub_server(knows_the_truth) as server:
        found = explained(tmp_path, features_of(tmp_path), server)
    assert [one.text for one in found] == [f"the word {word}" for word in WORDS]
    assert {(one.detection, one.fuzzing, one.n_examples, one.problem, one.weights) for one in found} == {
        (1.0, 1.0, 40, "", "w")
    }
    assert all(0 < (one.detection_error or 0) < 0.1 for one in found)


def test_an_explainer_that_guesses_has_scores_at_the_level_of_chance(tmp_path: Path) -> None:
    scores: dict[str, list[float]] = {"detection": [], "fuzzing": []}
    for seed in range(8):
        with stub_server(guesses(seed)) as server:
            for one in explained(tmp_path, features_of(tmp_path), server, seed=seed, n=1):
                scores["detection"].append(one.detection or 0.0)
                scores["fuzzing"].append(one.fuzzing or 0.0)
    for values in scores.values():
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert abs(statistics.fmean(values) - 0.5) < 3 * error < 0.06


def test_a_description_of_another_latent_has_no_better_score_than_chance(tmp_path: Path) -> None:
    def wrong(prompt: str) -> str:
        return "Description: the word nonsense" if "Answer with one line" in prompt else knows_the_truth(prompt)

    with stub_server(wrong) as server:
        found = explained(tmp_path, features_of(tmp_path), server)
    assert {(one.detection, one.fuzzing) for one in found} == {(0.5, 0.5)}


def test_requests_and_scores_are_the_same_in_every_run_with_the_same_seed(tmp_path: Path) -> None:
    asked = []
    for n, latents in ((1, None), (4, [3, 1])):
        with stub_server(knows_the_truth) as server:
            explained(tmp_path, features_of(tmp_path), server, latents, n=n)
        asked.append({prompt for prompt in server.prompts if re.search(r"river|green", prompt)})
    assert asked[1] <= asked[0]
    with stub_server(knows_the_truth) as server:
        explained(tmp_path, features_of(tmp_path), server, [3], seed=1)
    assert not {*server.prompts} & asked[0]


@pytest.mark.parametrize("n_contexts", [1, 7])
def test_a_latent_with_few_texts_is_explained_but_not_scored(tmp_path: Path, n_contexts: int) -> None:
    with stub_server(knows_the_truth) as server:
        found = explained(tmp_path, features_of(tmp_path, n_contexts=n_contexts), server, [0])
    assert [(one.text, one.detection, one.fuzzing, one.n_examples, one.problem) for one in found] == [
        ("the word king", None, None, 0, "")
    ]
    assert len(server.prompts) == 1


def test_the_estimate_agrees_with_the_requests_that_are_sent(tmp_path: Path) -> None:
    features = features_of(tmp_path)
    estimate = Explainer(features, "stub").estimate(features.order())
    with stub_server(knows_the_truth) as server:
        explained(tmp_path, features, server)
    assert (estimate.n_latents, estimate.n_requests) == (12, len(server.prompts))
    sent = sum(len(prompt) for prompt in server.prompts) / 4
    assert estimate.prompt_tokens == pytest.approx(sent, rel=0.15)


def of_latent(prompt: str, latent: int) -> bool:
    return f"<<{WORDS[latent]}>>" in prompt and "Answer with one line" in prompt


BROKEN: dict[str, tuple[Any, str, int]] = {
    "a refusal": ("I'm sorry, I can't help with that.", "the model refuses: I'm sorry", 2),
    "an empty answer": ("", "the answer is empty", 0),
    "ten thousand words": ("word " * 10_000, "characters and no description", 2),
    "damaged JSON": ((200, {}, b'{"choices": [{'), "not a chat completion", 0),
    "an error of the server": ((500, {}, b"crash"), "HTTP 500: crash", 0),
    "a prompt that is too long": ((400, {}, b'{"error": "too long"}'), "HTTP 400: too long", 0),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_failed_latent_is_recorded_with_its_reason_and_the_run_continues(tmp_path: Path, case: str) -> None:
    reply, reason, n_unparsed = BROKEN[case]

    def answer(prompt: str) -> Any:
        return reply if of_latent(prompt, 1) else knows_the_truth(prompt)

    features = features_of(tmp_path)
    with stub_server(answer) as server:
        found = explained(tmp_path, features, server, [0, 1, 2])
    assert [one.text for one in found] == ["the word king", "", "the word seven"]
    assert reason in found[1].problem
    assert (found[1].n_unparsed, found[1].detection) == (n_unparsed, None)
    # The next run tries the failed latent again, and only this one.
    assert Explainer(features, "stub").missing(tmp_path, [0, 1, 2, 3]) == [1, 3]


def test_an_answer_without_the_requested_form_is_asked_for_once_more(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def answer(prompt: str) -> str:
        first = prompt.partition("\n\nThe answer must have")[0]
        seen[first] += 1
        return "I do not know." if "numbers of" in prompt and seen[first] == 1 else knows_the_truth(first)

    with stub_server(answer) as server:
        (found,) = explained(tmp_path, features_of(tmp_path), server, [0])
    assert (found.detection, found.fuzzing, found.n_unparsed, found.problem) == (1.0, 1.0, 4, "")


def test_a_server_may_bind_answers_to_a_schema(tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        form = server.bodies[-1].get("response_format")
        # A description is bound only the second time, and a score only the first time.
        assert (form is None) == (("Answer with one line" in prompt) != ("Answer again" in prompt))
        first = knows_the_truth(prompt.partition("\n\nThe answer must have")[0])
        if "Answer with one line" in prompt:
            return json.dumps({"description": f"the word {WORDS[0]}"}) if form else "word " * 500
        if form is None:
            return first
        items = form["json_schema"]["schema"]["properties"]["texts"]["items"]
        assert len(items["enum"]) == len(re.findall(r"^\d+\. ", prompt, re.MULTILINE))
        return '{"texts": [' + " " * 50 if "wrong tokens" in prompt else json.dumps({"texts": json.loads(first)})

    with stub_server(answer) as server:
        (found,) = explained(tmp_path, features_of(tmp_path), server, [0], n=1)
    assert (found.text, found.detection, found.n_unparsed, found.problem) == ("the word king", 1.0, 3, "")


def test_a_scorer_that_cannot_answer_keeps_the_description(tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        return "Who knows?" if "wrong tokens" in prompt else knows_the_truth(prompt)

    with stub_server(answer) as server:
        (found,) = explained(tmp_path, features_of(tmp_path), server, [0])
    assert (found.text, found.detection, found.fuzzing) == ("the word king", 1.0, None)
    assert found.problem == "the answer is not a list of numbers: Who knows?"


def test_many_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    with (
        stub_server(lambda _: "") as server,
        pytest.raises(UserError, match="10 latents in a row failed; the last one"),
    ):
        explained(tmp_path, features_of(tmp_path), server, n=1)
    assert len(read_explanations(tmp_path)) == MOST_FAILED


def test_an_unusable_server_ends_the_run_and_keeps_what_is_done(tmp_path: Path) -> None:
    def answer(prompt: str) -> Any:
        return (401, {}, b"expired") if of_latent(prompt, 5) else knows_the_truth(prompt)

    features = features_of(tmp_path)
    with stub_server(answer) as server, pytest.raises(UserError, match="HTTP 401: expired"):
        explained(tmp_path, features, server, n=1)
    assert list(read_explanations(tmp_path)) == [0, 1, 2, 3, 4]


def test_the_given_number_of_latents_is_explained_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=20)

    def answer(prompt: str) -> str:
        if "Answer with one line" in prompt:
            together.wait()
        return knows_the_truth(prompt)

    with stub_server(answer) as server:
        assert len(explained(tmp_path, features_of(tmp_path), server, n=3)) == 12


def test_an_error_in_a_thread_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "choose", lambda *_: 1 / 0)
    with stub_server(knows_the_truth) as server, pytest.raises(ZeroDivisionError):
        explained(tmp_path, features_of(tmp_path), server, n=2)


def test_explanations_by_another_model_or_for_other_weights_are_missing(tmp_path: Path) -> None:
    features = features_of(tmp_path)
    with stub_server(knows_the_truth) as server:
        explained(tmp_path, features, server, [0, 1])
    assert Explainer(features, "stub").missing(tmp_path, [0, 1, 2]) == [2]
    assert Explainer(features, "other").missing(tmp_path, [0, 1, 2]) == [0, 1, 2]
    later = features_of(tmp_path, weights="later")
    assert Explainer(later, "stub").missing(tmp_path, [0, 1, 2]) == [0, 1, 2]
    assert later.feature(0).explanation is None


def test_explanations_are_stored_together_only_in_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_stored = []

    def slow(folder: Path, *explanations: Explanation) -> None:
        record(folder, *explanations)
        n_stored.append(len(explanations))
        # As long as with a large file.
        threading.Event().wait(0.5)

    monkeypatch.setattr(run_module, "record", slow)
    with stub_server(knows_the_truth) as server:
        features = features_of(tmp_path)
        explained(tmp_path, features, server, [0, 1, 2])
        assert n_stored == [1, 1, 1]
        n_stored.clear()
        monkeypatch.setattr(run_module, "LARGE_FILE", 0)
        assert len(explained(tmp_path, features, server)) == sum(n_stored) == 12
    assert n_stored[0] == 1
    assert len(n_stored) < 12
