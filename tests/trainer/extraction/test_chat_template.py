"""Tests that a faulty chat template is rejected with a one-sentence error before it uses much time or memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from trainer.contract.errors import UserError
from trainer.extraction import chat_template
from trainer.extraction.chat_template import chat_ids

CHAT = [{"role": "user", "content": "cat"}]


@pytest.fixture
def tokenizer(tiny: Callable[[str], Path]) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny("qwen3"))


def refusal(tokenizer: Any, template: str | None) -> str:
    tokenizer.chat_template = template
    with pytest.raises(UserError) as refused:
        chat_ids(tokenizer, CHAT)
    return str(refused.value)


def test_a_missing_or_failing_chat_template_produces_a_one_sentence_error(tokenizer) -> None:
    expected = "text.column: contains chats, but the model's tokenizer has no chat template"
    assert refusal(tokenizer, None) == expected
    expected = "text.column: the model's chat template rejects a chat: roles must alternate; remove this chat"
    assert refusal(tokenizer, "{{ raise_exception('roles must alternate') }}") == expected


def test_an_endless_template_produces_a_one_sentence_error_in_any_thread(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(chat_template, "_LIMIT_S", 0.2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    sentence = "text.column: the model's chat template takes more than 0.2 s for a chat; use another template"
    assert refusal(tokenizer, loops) == sentence
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(refusal(tokenizer, loops)))
    thread.start()
    thread.join()
    assert errors == [sentence]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** 7) }}",
        "{% set n = messages | length + 8 %}{{ n ** (n ** 7) > 1 }}",
        "{% set all = namespace(n=9) %}{% for _ in range(20) %}{% set all.n = all.n * all.n %}{% endfor %}",
        "{{ 5 | round(-9999999) }}",
        "{{ ('x' * 99999999) | length }}",
        "{{ [1] * 99999999 }}",
        "{{ 'x'.ljust(99999999) | length }}",
        "{{ ('%99999999d' % 1) | length }}",
        "{{ 'x' | center(width=99999999) | length }}",
    ],
)
def test_a_template_that_creates_a_huge_value_is_refused_immediately(tokenizer, template: str) -> None:
    reason = "it creates a huge number or string"
    expected = f"text.column: the model's chat template rejects a chat: {reason}; remove this chat"
    assert refusal(tokenizer, template) == expected


def test_a_template_may_use_ordinary_operators_filters_and_methods(tokenizer) -> None:
    tokenizer.chat_template = (
        "{% set m = messages[0] %}{{ '%s: %3d' % (m.role, 2 ** 10 % 7) + '-' * 3 + m.content.upper() | indent(2) }}"
        "{{ [1] + [2] * 2 }}{{ 7 // 2 * 1.5 ** 2 }}{{ m | tojson }}{{ 'a b'.split(' ', 1) | join('+') | default('x') }}"
    )
    text = "user:   2---CAT[1, 2, 2]6.75" + '{"role": "user", "content": "cat"}' + "a+b"
    assert chat_ids(tokenizer, CHAT) == tokenizer(text, add_special_tokens=False)["input_ids"]
