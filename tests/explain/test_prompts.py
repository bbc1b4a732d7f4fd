"""Tests for the prompts, and for reading what language models answer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.explain import prompts
from sae_tui.explain.prompts import UnreadableAnswer, description_in, numbers_in
from trainer.contract.runs.features import ActivatingExample, Token

# The digest of the prompts of each version. After a change of a prompt, add a version.
DIGESTS = {"v1": "7983c80e9a7d"}


def test_a_change_of_a_prompt_changes_its_version() -> None:
    texts = [prompts.EXPLAIN, prompts.DETECT, prompts.FUZZ, prompts.AGAIN]
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12] == DIGESTS[prompts.VERSION]


def example(*tokens: tuple[str, float]) -> ActivatingExample:
    return ActivatingExample(tuple(Token(text, act) for text, act in tokens), 1)


def test_the_prompt_shows_marked_tokens_and_their_strengths() -> None:
    one = example((" the", 0.0), (" old", 1.0), (" king", 8.0), ("\n", 0.0), (" Roy", 0.1))
    text = prompts.explain([one, one], 8.0).text
    assert '1. the <<old king>>⏎ <<Roy>>\n   (" old" 1, " king" 10, " Roy" 1)\n2. the <<' in text
    assert prompts.marked(one, ()) == "the old king⏎ Roy"


def test_a_text_cannot_add_a_line_or_a_control_character_to_a_prompt() -> None:
    one = example((" a\x1b[2J", 0.0), ("\u2028b\r\n7. c", 2.0))
    lines = prompts.detect("x", [prompts.marked(one, {1})]).text.splitlines()
    assert [line for line in lines if line[:2] in ("1.", "7.")] == ["1. a�[2J<< b⏎⏎7. c>>"]


@pytest.mark.parametrize(
    ("answer", "description"),
    [
        ("Description: names of kings", "names of kings"),
        ("names of kings", "names of kings"),
        ('**Description:** "Names of kings."\n', "Names of kings."),
        ("Let me see.\nThe texts share a king.\n\n[EXPLANATION]: names of kings", "names of kings"),
        ("<think>Description: no</think>\nDescription: names of kings", "names of kings"),
        ('{"description": "names of kings"}', "names of kings"),
        (r'{"description": "the set {\"so\", \"thus\"} of words"}', 'the set {"so", "thus"} of words'),
        ('{\n "description": "names of kin', "names of kin"),
        ("Description:\nnames of kings\n", "names of kings"),
        ("Description: names\x1b[31m of\u2029 kings\x00", "names [31m of kings"),
        ("Description: " + "king " * 10_000, " ".join(["king"] * 40) + " …"),
        ("Description: " + "k" * 10_000, "k" * 299 + "…"),
    ],
)
def test_a_description_is_found_in_answers_of_different_forms(answer: str, description: str) -> None:
    assert description_in(answer) == description


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("<think>it is about kings", "empty"),
        ("I'm sorry, but I can't help with that.", "refuses"),
        ("I cannot assist with this request.", "refuses"),
        ("As an AI language model, I have no access", "refuses"),
        ("word " * 10_000, "50,0|49,9"),
        ("...", "no words"),
    ],
)
def test_an_answer_without_a_description_is_refused_with_a_reason(answer: str, reason: str) -> None:
    with pytest.raises(UnreadableAnswer, match=reason):
        description_in(answer)


@pytest.mark.parametrize(
    ("answer", "numbers"),
    [
        ("[2, 4]", {2, 4}),
        ("[]", set()),
        ('{"texts": [2, 4, 2]}', {2, 4}),
        ('{\n  "texts": [\n   \n  ]}', set()),
        # Not one flag for each text.
        ('{"texts": [1, 1, 1, 1]}', {1}),
        ('```json\n{"texts": ["2", "4"]}\n```', {2, 4}),
        ('{"numbers": [3]}', {3}),
        ("[1, 0, 0, 1]", {1, 4}),
        ("[0,1,0,0]", {2}),
        ("[true, false, false, true]", {1, 4}),
        ('["2", "4"]', {2, 4}),
        ("```json\n[2, 4]\n```", {2, 4}),
        ("Texts [1] and so on are wrong.\nAnswer: [2, 4]", {2, 4}),
        ("<think>[1]</think>[3]", {3}),
        ("1: yes\n2: no\n3. No\n4) Yes", {1, 4}),
        ("Text 1: yes\nText 2: no\nText 3: no\nText 4: no", {1}),
        ("2, 4", {2, 4}),
        ("Texts 2 and 4.", {2, 4}),
        ("None.", set()),
        ("none of them", set()),
    ],
)
def test_numbers_are_found_in_answers_of_different_forms(answer: str, numbers: set[int]) -> None:
    assert numbers_in(answer, 4) == numbers


@pytest.mark.parametrize(
    "answer",
    ["", "I do not know", "[5]", "[0]", "[-1]", "[1.5]", "[two]", "Texts 2 and 9", "All but 2 do not fire",
     "It doesn't fire on 3", "1: yes\n2: no", "[1, 2", "nothing to say about none",
     '{"texts": [1, 2', '{"texts": [7]}', "9" * 500, "[" * 10_000],
)  # fmt: skip
def test_an_answer_without_numbers_of_texts_is_refused(answer: str) -> None:
    if answer == "[1, 2":
        assert numbers_in(answer, 4) == {1, 2}
    else:
        with pytest.raises(UnreadableAnswer):
            numbers_in(answer, 4)


@given(st.text(max_size=400) | st.text("[]{}0123456789,: \nyesno<>think/Description'\"", max_size=200))
def test_any_answer_is_read_or_refused_with_one_printable_line(answer: str) -> None:
    for read in (description_in, lambda text: numbers_in(text, 10)):
        found: object
        try:
            found = read(answer)
        except UnreadableAnswer as error:
            found = str(error)
        if isinstance(found, str):
            assert found.isprintable()
            assert 0 < len(found) <= 400
        else:
            assert isinstance(found, frozenset)
            assert all(1 <= number <= 10 for number in found)


@given(st.sets(st.integers(1, 10)), st.booleans())
def test_a_list_in_the_requested_form_is_read_exactly(numbers: set[int], as_flags: bool) -> None:
    listed = [int(number in numbers) for number in range(1, 11)] if as_flags else sorted(numbers)
    assert numbers_in(f"Answer: {json.dumps(listed)}", 10) == numbers


def test_the_documentation_shows_the_prompts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "explain.md").read_text()
    texts = (prompts.EXPLAIN, prompts.DETECT, prompts.FUZZ, prompts.AGAIN)
    assert [text for text in texts if f"```text\n{text.strip()}\n```" not in page] == []
    assert f"Version `{prompts.VERSION}`" in page
