"""Tests for the JSON that a failing command prints for scripts."""

from __future__ import annotations

import json

import msgspec
import pytest

from trainer.contract.errors import BadUsage, JobFileError, Problem, UserError
from trainer.contract.failure import asks_for_json, failure_in, refusal, show_failure
from trainer.contract.output import SafeParser


@pytest.mark.parametrize(
    ("sentence", "field", "message", "fix"),
    [
        ("there is no job 7; `sae-tui jobs` lists them", None, "there is no job 7", "`sae-tui jobs` lists them"),
        ("--count: 1 of 2 can be had (GPU 0: busy; GPU 1: lost)", "--count", "1 of 2 can be had (GPU 0: busy; GPU 1: "
         "lost)", None),
        ("train.batch_size: takes 1 or more; make it 8", "train.batch_size", "takes 1 or more", "make it 8"),
        ("JOB.toml: is missing", "JOB.toml", "is missing", None),
        ("a sentence: with a colon", None, "a sentence: with a colon", None),
    ],
)  # fmt: skip
def test_an_error_sentence_is_split_into_field_and_message_and_fix(sentence, field, message, fix) -> None:
    failure = refusal(UserError(sentence)).error
    assert (failure.field, failure.message, failure.fix) == (field, message, fix)
    assert failure_in(msgspec.json.encode(refusal(UserError(sentence)))) == sentence


def test_the_first_of_several_problems_is_the_error_and_the_rest_are_kept(capsys) -> None:
    show_failure(JobFileError([Problem("sae.k", "is too large; take 4"), Problem("", "nothing fits")]))
    assert json.loads(capsys.readouterr().out) == {
        "error": {"field": "sae.k", "message": "is too large", "fix": "take 4"},
        "others": [{"field": None, "message": "nothing fits", "fix": None}],
    }


def test_control_characters_and_invalid_text_are_encoded_as_json(capsys) -> None:
    show_failure(UserError("file \x1b[2J\udcff is odd"))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert json.loads(out)["error"]["message"] == "file \x1b[2J? is odd"


def test_a_usage_error_prints_no_control_characters_but_json_keeps_the_full_text(capsys) -> None:
    with pytest.raises(BadUsage) as refused:
        SafeParser(prog="p").parse_args(["\x1b[2J\udcff"])
    assert "\x1b" not in refused.value.sentence
    show_failure(refused.value)
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == {"field": None, "message": "unrecognized arguments: \x1b[2J?", "fix": "see p --help"}


def test_output_in_any_other_form_is_not_read_as_a_failure() -> None:
    assert [failure_in(text) for text in ("", "{}", "[1]", b"\xff", '{"error": "x"}', "words")] == [""] * 6


def test_the_json_flag_has_an_effect_only_before_a_double_dash() -> None:
    assert asks_for_json(["gpus", "--json", "--", "x"])
    assert not asks_for_json(["gpus", "--", "--json"])
