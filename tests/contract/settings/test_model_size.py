"""Tests for reading a language model's size from its files, compared with transformers and GGUF headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import FAMILIES, make_model

from trainer.contract.settings.model_size import ModelSize, model_size


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def gguf(facts: dict[str, bytes], tensors: dict[str, list[int]]) -> bytes:
    """Return the header of a GGUF file.

    `facts` maps each key to its encoded type and value, and `tensors` maps each name to its shape.
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    described = b"".join(
        text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0) for name, sizes in tensors.items()
    )
    return head + b"".join(text(name) + value for name, value in facts.items()) + described


def whole() -> bytes:
    words = b"".join(text(word) for word in ("a", "bc"))
    return gguf(
        {
            "general.architecture": struct.pack("<I", 8) + text("llama"),
            "tokenizer.tokens": struct.pack("<IIQ", 9, 8, 2) + words,
            "tokenizer.scores": struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
            "llama.block_count": struct.pack("<II", 4, 3),
            "llama.embedding_length": struct.pack("<II", 4, 32),
            "llama.rope.scale": struct.pack("<If", 6, 1.0),
        },
        {"token_embd.weight": [32, 100], "output_norm.weight": [32]},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_size_read_from_a_folder_matches_the_loaded_model(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_model(tmp_path / family, family)
    size = model_size(str(folder))
    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    model = transformers.AutoModel.from_pretrained(folder)
    n_stored = sum(parameter.numel() for parameter in model.parameters())
    assert size
    assert (size.width, size.n_layers) == (config.hidden_size, config.num_hidden_layers)
    assert size.n_parameters == pytest.approx(n_stored, rel=0.05)


def test_the_size_read_from_a_gguf_file_matches_its_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole() + bytes(64))
    assert model_size(str(file)) == ModelSize(32 * 100 + 32, 32, 3)


@pytest.mark.parametrize(
    "write",
    [
        lambda place: None,
        lambda place: place.mkdir(),
        lambda place: (place.mkdir(), (place / "config.json").write_text("[]")),
        lambda place: (place.mkdir(), (place / "config.json").write_text("{")),
        lambda place: (place.mkdir(), (place / "config.json").write_text(json.dumps({"hidden_size": "wide"}))),
        lambda place: (place.mkdir(), (place / "config.json").write_text(json.dumps({"n_embd": 8, "n_layer": 2}))),
    ],
    ids=["missing", "empty", "list", "cut off", "no number", "no weights"],
)
def test_the_size_of_a_model_without_size_information_is_unknown(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path / "model")
    assert model_size(str(tmp_path / "model")) is None


@given(place=st.integers(0, len(whole()) - 1), byte=st.integers(0, 255), end=st.integers(0, len(whole())))
def test_reading_a_damaged_gguf_file_returns_a_size_or_none_and_never_fails(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, end: int
) -> None:
    content = bytearray(whole())
    content[place] = byte
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(content[: max(end, 1)])
    size = model_size(str(file))
    assert size is None or size.n_parameters > 0
