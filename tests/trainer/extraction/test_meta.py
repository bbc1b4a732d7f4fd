"""Tests that metadata hashes identify a model or tokenizer regardless of its folder."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from trainer.extraction import meta
from trainer.extraction.meta import tokenizer_hash, weights_facts
from trainer.extraction.packing import Tokenizer

Tiny = Callable[[str], Path]
WEIGHTS = ("config.json", "model.safetensors")


def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(transformers.AutoTokenizer.from_pretrained(folder))


def test_local_weights_are_hashed_but_hub_weights_are_not(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"not what is read")
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in WEIGHTS}
    assert weights_facts(str(folder)) == {"weights_sha256": sums}
    assert weights_facts("someone/model-on-the-hub") == {}


def test_a_model_in_a_single_file_such_as_gguf_is_hashed(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    assert weights_facts(str(tmp_path / "a.gguf")) == {
        "weights_sha256": {"a.gguf": hashlib.sha256(b"weights").hexdigest()}
    }


def test_large_weights_are_hashed_by_sampling_and_labelled_accordingly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta, "WHOLE_BYTES", 1000)
    content = bytearray(40_000_000)
    (file := tmp_path / "model.gguf").write_bytes(content)
    first = weights_facts(str(file))
    assert [*first] == ["weights_sample_sha256"]
    assert weights_facts(str(file)) == first
    content[-1] = 1
    file.write_bytes(content)
    assert weights_facts(str(file)) != first


def test_a_tokenizers_hash_depends_on_its_rules_and_not_on_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "elsewhere")
    own = tokenizer_hash(tokenizer(tiny("llama")))
    assert tokenizer_hash(tokenizer(folder)) == own
    changed = transformers.AutoTokenizer.from_pretrained(folder)
    changed.add_tokens(["a new word"])
    assert tokenizer_hash(Tokenizer(changed)) != own
    changed = transformers.AutoTokenizer.from_pretrained(folder)
    changed.chat_template = "{{ messages }}"
    assert tokenizer_hash(Tokenizer(changed)) != own


def test_reading_texts_does_not_change_a_tokenizer_hash(tiny: Tiny) -> None:
    one = tokenizer(tiny("llama"))
    before = tokenizer_hash(one)
    list(one.tokens(["a text", "and a longer one"]))
    one.token_bytes()
    assert tokenizer_hash(one) == before
