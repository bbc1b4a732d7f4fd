"""Tests that the bytes of a text's tokens join into the original text, even if a character spans several tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.real_model import FILE, NAME, needs_model
from support.tiny_models import make_tokenizer

from trainer.contract.settings.tokens_of_data import TOKEN_TEXTS
from trainer.extraction.token_bytes import read_tokens, token_bytes, write_tokens

TEXTS = ["今天天气很好，我们去公园。”", "👩‍💻 is 🎉", "naïve café Ångström", "the cat sat", "  two\n\tspaces", ""]
BYTE_LEVEL = make_tokenizer("gpt2")
# Any string that can be encoded as UTF-8.
ANY = st.text(st.characters(exclude_categories=["Cs"]))


def with_byte_fallback() -> Any:
    """Return a tokenizer like SentencePiece's, with a few character tokens, and byte tokens for all other text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thecasomégà天"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = tokenizers.decoders
    tokenizer.decoder = steps.Sequence([
        steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)
    ])  # fmt: skip
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTE_FALLBACK = with_byte_fallback()


def joined(tokenizer: Any, text: str) -> bytes:
    told = token_bytes(tokenizer)
    return b"".join(told[one] for one in tokenizer(text, add_special_tokens=False)["input_ids"])


@given(st.one_of(ANY, st.sampled_from(TEXTS)))
def test_byte_level_tokens_join_into_the_original_text(text: str) -> None:
    assert joined(BYTE_LEVEL, text) == text.encode()


@given(st.one_of(ANY, st.sampled_from(TEXTS)).filter(lambda text: "▁" not in text and "<" not in text))
def test_tokens_with_byte_fallback_join_into_the_original_text(text: str) -> None:
    assert joined(BYTE_FALLBACK, text) == text.encode()


@pytest.mark.slow
@needs_model
def test_tokens_from_a_trained_tokenizer_join_into_the_original_text() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(FILE.parent), gguf_file=NAME)
    for text in TEXTS:
        assert joined(tokenizer, text) == text.encode()


def test_an_added_token_has_the_bytes_of_its_text() -> None:
    tokenizer = make_tokenizer("gpt2")
    tokenizer.add_tokens(["é天"])
    assert joined(tokenizer, "a é天<eos>") == "a é天<eos>".encode()


def test_wordpiece_words_include_the_space_before_them() -> None:
    model = tokenizers.models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2, "天": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    assert token_bytes(wrapped) == [b" [UNK]", b" the", b"s", " 天".encode()]


@pytest.mark.parametrize(
    "decoder", [None, tokenizers.decoders.BPEDecoder(), tokenizers.decoders.Replace(tokenizers.Regex("h+"), "h")]
)
def test_tokens_are_decoded_individually_if_the_tokenizer_has_a_different_decoder(decoder: Any) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "▁cat": 1}, unk_token="the"))
    if decoder:
        tokenizer.decoder = decoder
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="the")
    alone = [tokenizer.decode([number], skip_special_tokens=False) for number in range(2)]
    assert token_bytes(wrapped) == [alone[0].encode(), f" {alone[1]}".encode()]


@given(st.lists(st.one_of(st.binary(max_size=4), st.text(st.characters(exclude_categories=["Cs"])).map(str.encode))))
def test_stored_tokens_are_read_back_unchanged(tmp_path_factory: pytest.TempPathFactory, tokens: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("stored")
    write_tokens(folder, tokens)
    assert read_tokens(folder) == tokens
    # A token that is valid UTF-8 is stored as a string, as in earlier versions.
    assert [one for one in json.loads((folder / TOKEN_TEXTS).read_text()) if isinstance(one, str)] == [
        token.decode() for token in tokens if token.decode("utf-8", "ignore").encode() == token
    ]


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '[{"base64": "#"}]', '[{"hex": "e5"}]', '["\\ud800"]', "[" * 9999]
)
def test_a_file_that_is_not_a_list_of_tokens_yields_no_tokens(tmp_path: Path, content: str) -> None:
    assert read_tokens(tmp_path) == []
    (tmp_path / TOKEN_TEXTS).write_text(content)
    assert read_tokens(tmp_path) == []


def test_a_token_list_from_a_version_without_byte_tokens_is_read(tmp_path: Path) -> None:
    (tmp_path / TOKEN_TEXTS).write_text('[" the", "\\ufffd", "s"]')
    assert read_tokens(tmp_path) == [b" the", "�".encode(), b"s"]
