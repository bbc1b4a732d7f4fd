"""The prompts for the language model that explains latents, and how its answers are read.

Each prompt is a single user message, because the chat templates of some models refuse a system message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sae_tui.jobs.features import readable
from trainer.contract.json_file import decode_as
from trainer.contract.printable import CONTROL, on_one_line
from trainer.contract.runs.explanations import cut
from trainer.contract.runs.features import ActivatingExample

# Change the version with the prompts: explanations with another version are written again.
VERSION = "v1"

EXPLAIN = """\
A feature of a language model fires on some tokens and is silent on all others. Below are texts on which it fires. \
The tokens on which it fires are marked <<like this>>. After each text, these tokens are listed with the strength \
of the feature from 1 to 10.

{texts}

What do the marked tokens, or the words before them, have in common? Answer with one line of at most 20 words that \
describes when the feature fires. Be as specific as the texts allow. Do not mention the marks, and give no examples.

Description: """

DETECT = """\
A feature of a language model fires on texts with this property:

{description}

On which of these {n} texts does it fire? Any number of them may be right.

{texts}

Answer only with a list of the numbers of these texts, like [2, 5], or with [] if it fires on none of them."""

FUZZ = """\
A feature of a language model fires on tokens with this property:

{description}

In each of these {n} texts, some tokens are marked <<like this>>. In which texts are the marked tokens the ones on \
which the feature fires? In the other texts, the wrong tokens are marked.

{texts}

Answer only with a list of the numbers of the texts with the right marks, like [2, 5], or with [] if there are none."""

AGAIN = "The answer must have the requested form: {form}. Answer again, without any other words."
DESCRIPTION_FORM, NUMBERS_FORM = "one line that starts with Description:", "a list of numbers like [2, 5]"

# A description with more words is cut off; an answer with more characters and no marked description is refused.
_MOST_WORDS, _LONGEST_PROSE = 40, 600
_SCALE = 10
_STRING = {"type": "string"}
_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL | re.IGNORECASE)
_LABELLED = re.compile(r"^[^\w\n]*(?:description|explanation)[^\w\n]*?[:：][ \t]*\n?[ \t]*(\S.*)$", re.I | re.M)
_REFUSAL = re.compile(
    r"\W*(?:i['’]?m sorry|sorry\b|i (?:can(?:no|['’])t|am unable|won['’]t)\b|as an ai\b)", re.IGNORECASE
)
_OBJECT = re.compile(r"\{[^{}]*\}")
_LIST = re.compile(r"\[([^\[\]]*)\]")
_LINE_ANSWER = re.compile(r"^\W*(?:text\W*)?(\d{1,3})\W+(yes|no|true|false|1|0)\b", re.IGNORECASE | re.MULTILINE)
_YES = {"yes", "true", "1"}
# A sentence with one of these words may list the wrong texts.
_OTHER_WORDS = {"not", "no", "none", "yes", "except", "without", "but"}


class UnreadableAnswer(Exception):
    """An answer that does not have the requested form; the message says what is wrong."""


class _TextNumbers(msgspec.Struct):
    texts: list[int]


class _Described(msgspec.Struct):
    description: str


class Prompt(NamedTuple):
    """A message for the model, the form of the answer, and the expected length of the answer in tokens.

    `schemas` are the JSON schemas for the first answer and for another one if the first cannot be read; None stands for
    a free text.
    """

    text: str
    form: str
    n_answer_tokens: int
    schemas: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]

    @property
    def n_tokens(self) -> int:
        """An estimate of the number of tokens: four bytes of UTF-8 for each."""
        return len(self.text.encode()) // 4


def explain(examples: Sequence[ActivatingExample], largest: float) -> Prompt:
    """Return the prompt that asks for a description of a latent whose largest activation is `largest`."""
    texts = []
    for example in examples:
        fires = {at for at, token in enumerate(example.tokens) if token.act > 0}
        acts = ", ".join(
            f'"{readable(example.tokens[at].text)}" {_strength(example.tokens[at].act, largest)}'
            for at in sorted(fires)
        )
        texts.append(f"{marked(example, fires)}\n   ({acts})")
    return Prompt(EXPLAIN.format(texts=_numbered(texts)), DESCRIPTION_FORM, 30, (None, _schema("description", _STRING)))


def detect(description: str, texts: Sequence[str]) -> Prompt:
    """Return the prompt that asks on which texts a latent fires."""
    return _of_texts(DETECT, description, texts)


def fuzz(description: str, texts: Sequence[str]) -> Prompt:
    """Return the prompt that asks in which texts the right tokens are marked."""
    return _of_texts(FUZZ, description, texts)


def _of_texts(template: str, description: str, texts: Sequence[str]) -> Prompt:
    filled = template.format(description=description, n=len(texts), texts=_numbered(texts))
    return Prompt(filled, NUMBERS_FORM, 8 + 2 * len(texts), (numbers_schema(len(texts)), None))


def numbers_schema(n: int) -> dict[str, Any]:
    """Return the JSON schema of an object like `{"texts": [2, 5]}` with numbers from 1 to `n`.

    OpenAI accepts only objects, and needs `required` and `additionalProperties`.
    """
    return _schema("texts", {"type": "array", "items": {"type": "integer", "enum": [*range(1, n + 1)]}, "maxItems": n})


def _schema(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}


def marked(example: ActivatingExample, at: Collection[int]) -> str:
    """Return an example's text on one line, with marks around the tokens with these indices."""
    words = []
    for number, token in enumerate(example.tokens):
        text = readable(token.text)
        if number in at and number - 1 not in at:
            # Spaces before the first marked word stay outside.
            space = len(text) - len(text.lstrip(" "))
            text = f"{text[:space]}<<{text[space:]}"
        words.append(f"{text}>>" if number in at and number + 1 not in at else text)
    return on_one_line("".join(words)).strip()


def _strength(act: float, largest: float) -> int:
    return max(1, min(_SCALE, round(_SCALE * act / largest))) if largest > 0 else 1


def _numbered(texts: Sequence[str]) -> str:
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def description_in(answer: str) -> str:
    """Return the description in an answer, on one line; raise `UnreadableAnswer` if it has none."""
    text = _THOUGHT.sub("", answer).strip()
    if not text:
        raise UnreadableAnswer("the answer is empty")
    if _REFUSAL.match(text):
        raise UnreadableAnswer(f"the model refuses: {_shortened(text)}")
    found = _LABELLED.findall(text)
    for inner in (*_OBJECT.findall(text), text):
        with contextlib.suppress(ValueError):
            found.append(decode_as(inner.encode(), _Described).description)
    if not found and len(text) > _LONGEST_PROSE:
        raise UnreadableAnswer(f"the answer has {len(text):,} characters and no description")
    description = _shortened(found[-1] if found else next(filter(str.strip, text.splitlines())))
    if not any(char.isalnum() for char in description):
        raise UnreadableAnswer("the answer has no words")
    return description


def _shortened(text: str) -> str:
    """Return a text on one line, without control characters and quotation marks around it, cut to `_MOST_WORDS`."""
    words = CONTROL.sub(" ", text[: 100 * _MOST_WORDS]).split()
    shown = on_one_line(" ".join(words[:_MOST_WORDS])).strip("\"'`*_{}“” ")
    return cut(f"{shown} …" if len(words) > _MOST_WORDS else shown)


def numbers_in(answer: str, n: int) -> frozenset[int]:
    """Return the numbers from 1 to `n` in an answer; raise `UnreadableAnswer` if it does not list such numbers.

    The answer may follow `numbers_schema`. It may also be a list, a list with 0 or 1 for each text, a line with yes or
    no for each text, or a short sentence.
    """
    text = _THOUGHT.sub("", answer).strip()
    if not text:
        raise UnreadableAnswer("the answer is empty")
    for inner in reversed(_OBJECT.findall(text)):
        with contextlib.suppress(ValueError):
            numbers = frozenset(decode_as(inner.encode(), _TextNumbers).texts)
            if all(1 <= number <= n for number in numbers):
                return numbers
    for inner in reversed(_LIST.findall(text)):
        if (found := _listed(inner, n)) is not None:
            return found
    lines = {int(number): word.lower() in _YES for number, word in _LINE_ANSWER.findall(text)}
    if lines.keys() == set(range(1, n + 1)):
        return frozenset(number for number, is_right in lines.items() if is_right)
    if text.count("{") > text.count("}"):
        raise UnreadableAnswer("the answer is cut off; raise --max-tokens")
    return _in_sentence(text, n)


def _listed(inner: str, n: int) -> frozenset[int] | None:
    """Return the numbers in the text between brackets, or None if it is not a list of numbers from 1 to `n`."""
    words = [word.strip(" \"'\n\t").lower() for word in inner.split(",")] if inner.strip() else []
    if len(words) == n > 1 and all(word in ("0", "1", "true", "false") for word in words):
        return frozenset(number for number, word in enumerate(words, 1) if word in _YES)
    if not all(re.fullmatch(r"\d{1,3}", word) for word in words):
        return None
    numbers = frozenset(map(int, words))
    return numbers if all(1 <= number <= n for number in numbers) else None


def _in_sentence(text: str, n: int) -> frozenset[int]:
    """Return the numbers in a short sentence without a negation, such as `Texts 2 and 5.`; "none" means no number."""
    words = re.findall(r"[a-z']+|\d+", text.lower())
    numbers = {int(word) for word in words if word.isdecimal() and len(word) < 4}
    if not numbers and words in (["none"], ["none", "of", "them"], ["none", "of", "the", "texts"]):
        return frozenset()
    is_plain = len(words) <= 4 + 2 * n and not _OTHER_WORDS & {*words} and not re.search(r"n['’]t\b|-\d|\d\.\d", text)
    if not numbers or not is_plain or not all(1 <= one <= n for one in numbers):
        raise UnreadableAnswer(f"the answer is not a list of numbers: {_shortened(text)}")
    return frozenset(numbers)
