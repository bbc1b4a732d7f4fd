"""What latents fire on, read from a file that anybody may have written or cut."""

from __future__ import annotations

import contextlib
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.contract.errors import UserError
from trainer.contract.runs.features import Features

# Two latents with two contexts of three tokens, the strongest in the middle.
IDS = [[[5, 7, 9], [-1, 7, -1]], [[9, 5, 5], [-1, -1, -1]]]
ACTS = [[[0.0, 4.0, 1.0], [0.0, 2.0, 0.0]], [[0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]]
TEXTS = {5: " the", 7: " Lämb", 9: "s"}


def flat(values: Any) -> list[Any]:
    return [one for value in values for one in flat(value)] if isinstance(values, list) else [values]


def whole(**changes: tuple[str, str, list[int], list[Any]]) -> bytes:
    """Return a file of this kind; `changes` are tensors as (type, array's code, shape, values)."""
    encoded = [text.encode() for text in TEXTS.values()]
    ends = [sum(map(len, encoded[: number + 1])) for number in range(len(encoded))]
    tensors = {
        "n_fired": ("I32", "i", [2], [3, 8]),
        "largest": ("F32", "f", [2], [4.0, 3.0]),
        "mean": ("F32", "f", [2], [2.0, 1.5]),
        "histogram": ("I32", "i", [2, 2], [1, 2, 4, 4]),
        "nearest": ("I32", "i", [2, 1], [1, 0]),
        "cosines": ("F32", "f", [2, 1], [0.25, 0.25]),
        "token_ids": ("I32", "i", [2, 2, 3], flat(IDS)),
        "acts": ("F32", "f", [2, 2, 3], flat(ACTS)),
        "n_rows": ("I64", "q", [1], [100]),
        "before": ("I64", "q", [1], [1]),
        "text_ids": ("I32", "i", [3], list(TEXTS)),
        "text_ends": ("I64", "q", [3], ends),
        "text": ("U8", "B", [ends[-1]], list(b"".join(encoded))),
    } | changes
    header, content = {}, b""
    for name, (dtype, code, shape, values) in tensors.items():
        stored = array(code, values).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(stored)]}
        content += stored
    encoded_header = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded_header)) + encoded_header + content


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "features.safetensors"
    path.write_bytes(whole())
    return path


def test_a_latent_is_told_with_its_contexts(file: Path) -> None:
    feature = Features(file).feature(0)
    assert (feature.density, feature.largest, feature.mean) == (0.03, 4.0, 2.0)
    assert (feature.histogram, feature.nearest) == ((1, 2), ((1, 0.25),))
    first, second = feature.contexts
    assert [(token.text, token.act) for token in first.tokens] == [(" the", 0.0), (" Lämb", 4.0), ("s", 1.0)]
    assert (first.at, first.act) == (1, 4.0)
    # Where the document begins or ends there are fewer tokens.
    assert ([token.text for token in second.tokens], second.at) == ([" Lämb"], 0)
    assert len(Features(file).feature(1).contexts) == 1


def test_latents_come_in_the_order_that_is_asked_for(file: Path) -> None:
    features = Features(file)
    assert (features.n_latents, features.n_rows) == (2, 100)
    assert (features.order(), features.order("largest"), features.order("latent")) == ([1, 0], [0, 1], [0, 1])
    file.write_bytes(whole(n_fired=("I32", "i", [2], [0, 8])))
    assert Features(file).order("latent") == [1]


def test_a_search_looks_at_the_tokens_on_which_latents_fire_most(file: Path) -> None:
    features = Features(file)
    assert (features.search("LÄMB"), features.search("the"), features.search("s")) == ([0], [1], [])


def test_a_token_of_unknown_text_is_told_by_its_number(file: Path) -> None:
    assert Features(file).text(6) == "[6]"


def test_there_are_no_other_latents(file: Path) -> None:
    with pytest.raises(UserError, match="there is no latent 2; the SAE has latents 0 to 1"):
        Features(file).feature(2)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Features(tmp_path / "nothing")


@pytest.mark.parametrize(
    "changes",
    [
        {"acts": ("F32", "f", [2, 3, 2], flat(ACTS))},
        {"acts": ("I32", "i", [2, 2, 3], [0] * 12)},
        {"n_fired": ("I32", "i", [3], [1, 2, 3])},
        {"before": ("I64", "q", [1], [3])},
        {"text_ends": ("I64", "q", [2], [1, 2])},
    ],
)
def test_a_file_of_another_shape_is_refused(changes: Any, file: Path) -> None:
    file.write_bytes(whole(**changes))
    with pytest.raises(UserError, match="is not what `python -m trainer eval` writes; run that again"):
        Features(file)


@settings(max_examples=150)
@given(st.data())
def test_any_damage_is_one_sentence_or_another_answer(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    content = bytearray(whole())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "features.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    with contextlib.suppress(UserError):
        features = Features(path)
        for latent in features.order("largest"):
            features.feature(latent)
        features.search("the")
