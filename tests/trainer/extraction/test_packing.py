"""Tests that packing loses no tokens, fills each context, and starts each document piece like a new text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import make_tokenizer

from trainer.contract.errors import UserError
from trainer.extraction.packing import PADDING, ContextBatch, Tokenizer, Tokens, batches, pack, separate

# The ids of the special tokens before and after a text; no other token has these ids.
BEFORE, AFTER = 900, 901


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[Tokens], int]:
    """Draw documents with surrounding special tokens, and a context length with space for at least one more token."""
    around = draw(st.sampled_from([([], []), ([BEFORE], []), ([BEFORE], [AFTER]), ([BEFORE] * 2, [AFTER])]))
    documents = draw(st.lists(st.lists(st.integers(0, 800), max_size=40), max_size=8))
    length = draw(st.integers(len(around[0]) + len(around[1]) + 1, 24))
    return [Tokens(ids, *around) for ids in documents], length


def pieces(contexts: list[ContextBatch]) -> list[tuple[int, list[int], list[int]]]:
    """Return the document number, token ids and positions of each piece (the part of a document in one context)."""
    laid = []
    for ids, positions, documents in contexts:
        rows = zip(documents[0].tolist(), ids[0].tolist(), positions[0].tolist(), strict=True)
        for number, group in itertools.groupby(rows, key=lambda row: row[0]):
            indices = list(group)
            laid.append((number, [row[1] for row in indices], [row[2] for row in indices]))
    return laid


@pytest.mark.parametrize("lay", [pack, separate])
@given(texts())
def test_joined_pieces_equal_the_original_documents(lay, text: tuple[list[Tokens], int]) -> None:
    documents, length = text
    read: list[list[int]] = [[] for _ in documents]
    for number, ids, _ in pieces(list(lay(documents, length))):
        read[number] += [one for one in ids if one not in (BEFORE, AFTER)]
    assert read == [document.ids for document in documents]


@pytest.mark.parametrize("lay", [pack, separate])
@given(texts())
def test_each_piece_restarts_at_position_0_and_has_the_surrounding_special_tokens(lay, text) -> None:
    documents, length = text
    around = 0 if not documents else len(documents[0].before) + len(documents[0].after)
    for number, ids, positions in pieces(list(lay(documents, length))):
        document = documents[number]
        assert positions == list(range(len(ids)))
        if len(ids) > around:
            assert ids[: len(document.before)] == document.before
            assert ids[len(ids) - len(document.after) :] == document.after
        else:
            # At the end of a context, there may be space only for the special tokens around a text.
            assert ids == (document.before + document.after)[: len(ids)]


@given(texts())
def test_packed_contexts_keep_document_order_and_all_but_the_last_are_full(text) -> None:
    documents, length = text
    contexts = list(pack(documents, length))
    assert all(context.ids.shape == (1, length) for context in contexts[:-1])
    assert all(0 < context.ids.shape[1] <= length for context in contexts[-1:])
    numbers = [number for number, *_ in pieces(contexts)]
    assert numbers == sorted(numbers)


@given(texts())
def test_a_separate_context_contains_one_document_and_is_not_too_long(text) -> None:
    contexts = list(separate(*text))
    assert all(len({*context.documents[0].tolist()}) == 1 for context in contexts)
    assert all(0 < context.ids.shape[1] <= text[1] for context in contexts)


@given(texts(), st.integers(1, 5))
def test_batches_of_packed_contexts_have_no_padding_and_lose_no_tokens(text, n: int) -> None:
    contexts = list(pack(*text))
    made = list(batches(contexts, n, fills=False))
    assert all(len(batch.ids) <= n and (batch.documents != PADDING).all() for batch in made)
    rows = [
        (row.tolist(), number.tolist())
        for batch in made
        for row, number in zip(batch.ids, batch.documents, strict=True)
    ]
    assert rows == [(context.ids[0].tolist(), context.documents[0].tolist()) for context in contexts]


@given(texts(), st.integers(1, 5))
def test_shorter_contexts_in_a_batch_are_padded_on_the_right(text, n: int) -> None:
    contexts = list(separate(*text))
    made = list(batches(contexts, n, fills=True))
    assert [len(batch.ids) for batch in made[:-1]] == [n] * (len(made) - 1)
    rows = [row for batch in made for row in zip(*batch, strict=True)]
    for (ids, positions, numbers), context in zip(rows, contexts, strict=True):
        length = context.ids.shape[1]
        assert np.array_equal(ids[:length], context.ids[0])
        assert (ids[length:] == 0).all()
        assert (positions[length:] == PADDING).all()
        assert (numbers[length:] == PADDING).all()


@pytest.fixture(scope="module")
def load(tiny):
    return lambda family: Tokenizer(transformers.AutoTokenizer.from_pretrained(tiny(family)))


def test_the_special_tokens_around_a_text_are_detected_for_each_model_family(load) -> None:
    around = {family: (load(family).before, load(family).after) for family in ("gpt2", "llama", "bert")}
    assert around == {"gpt2": ([], []), "llama": ([0], []), "bert": ([0], [1])}
    assert load("gpt2").special == [0, 1, 2]


def test_texts_chats_and_token_ids_can_be_mixed(load) -> None:
    tokenizer = load("qwen3")
    chat = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "sat"}]
    text, of_chat, ids, again = tokenizer.tokens(["the cat", chat, [5, 6, 7], "the cat"])
    assert text == again
    assert ids == Tokens([5, 6, 7], [], [])
    (whole,) = tokenizer.tokens(["user: a cat<eos>assistant: sat<eos>"])
    assert of_chat == Tokens(whole.ids, [], [])


def test_batched_tokenization_keeps_the_order_of_documents(load) -> None:
    texts = [f"cat {number}" for number in range(150)]
    tokenizer = load("llama")
    one_by_one = [next(tokenizer.tokens([text])) for text in texts]
    assert list(tokenizer.tokens(texts)) == one_by_one
    assert one_by_one[0].before == [0]


def test_unpaired_surrogates_are_replaced_and_their_texts_are_counted(load) -> None:
    tokenizer = load("qwen3")
    chat = [{"role": "user", "content": "a \udc00 cat"}]
    mended, of_chat, whole, _ = tokenizer.tokens(["the \ud83d cat", chat, "a \U0001f600 cat", "the cat"])
    expected = tokenizer.tokens(["the \ufffd cat", [{"role": "user", "content": "a \ufffd cat"}], "a \U0001f600 cat"])
    assert [mended, of_chat, whole] == list(expected)
    assert tokenizer.n_mended == 2


def test_a_context_without_space_for_text_is_refused(load) -> None:
    load("bert").require_context(3)
    with pytest.raises(UserError, match=r"^text.context: must be above 2, since the model's tokenizer puts 2 special"):
        load("bert").require_context(2)


def test_a_text_longer_than_the_models_window_is_split_without_a_warning(load, capfd) -> None:
    (tokens,) = load("bert").tokens(["cat " * 5000])
    assert len(tokens.ids) >= 5000
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("added", "others", "message"),
    [
        (["<pad2>", "<user>"], ["<user>", "<end>"], "'<user>' is token {1} of the first, and {0} of the second"),
        (["<pad2>"], ["<user>"], "token {0} is '<pad2>' in the first, and '<user>' in the second"),
        (["<pad2>"], ["<pad2>", "<user>"], ""),
        ([], ["<user>"], ""),
    ],
)
def test_tokenizers_whose_added_tokens_have_conflicting_ids_differ(
    added: list[str], others: list[str], message: str
) -> None:
    one, other = make_tokenizer("gpt2"), make_tokenizer("gpt2")
    n = len(one)
    one.add_tokens(added, special_tokens=True)
    other.add_tokens(others, special_tokens=True)
    assert Tokenizer(one).differs_from(Tokenizer(other)) == message.format(n, n + 1)
