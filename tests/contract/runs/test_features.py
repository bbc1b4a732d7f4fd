"""Tests for reading feature files that may be truncated or written by an untrusted user."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.features import ACTS, MOVED, OF_PARTS, SCALING, SPREAD, TEXTS, features_file, flat

from trainer.contract.errors import UserError
from trainer.contract.runs.features import Features, is_of_weights


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "features.safetensors"
    path.write_bytes(features_file())
    return path


def test_a_feature_is_read_with_its_statistics_and_contexts(file: Path) -> None:
    feature = Features(file).feature(0)
    assert (feature.density, feature.largest, feature.mean) == (0.03, 4.0, 2.0)
    assert (feature.histogram, feature.nearest) == ((1, 2), ((1, 0.25),))
    first, second = feature.contexts
    assert [(token.text, token.act) for token in first.tokens] == [(" the", 0.0), (" Lämb", 4.0), ("s", 1.0)]
    assert (first.at, first.act) == (1, 4.0)
    # An example at the start or end of a document has fewer tokens.
    assert ([token.text for token in second.tokens], second.at) == ([" Lämb"], 0)
    assert len(Features(file).feature(1).contexts) == 1


def test_promoted_tokens_are_included_if_the_file_has_them(file: Path) -> None:
    assert Features(file).feature(0).promoted == ()
    file.write_bytes(features_file(**MOVED))
    feature = Features(file).feature(0)
    assert [(one.text, one.logit) for one in (*feature.promoted, *feature.suppressed)] == [(" Lämb", 1.5), ("s", -2.5)]
    # An evaluation writes either all four tensors of promoted tokens or none, so an incomplete set is ignored.
    file.write_bytes(features_file(promoted=MOVED["promoted"]))
    assert Features(file).feature(0).promoted == ()


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("shape", [[1, 2], [2], []])
def test_promoted_token_tensors_of_the_wrong_shape_are_refused(file: Path, name: str, shape: list[int]) -> None:
    kind, code, _, values = MOVED[name]
    file.write_bytes(features_file(**(MOVED | {name: (kind, code, shape, values if shape else values[:1])})))
    with pytest.raises(UserError, match="was not written by `sae-train eval`"):
        Features(file)


def test_tokens_that_form_one_character_are_merged_and_show_the_largest_activation(file: Path) -> None:
    file.write_bytes(features_file(SPREAD))
    features = Features(file)
    (first, second), (third,) = features.feature(0).contexts, features.feature(1).contexts
    assert ([(one.text, one.act) for one in first.tokens], first.at) == ([(" 天", 4.0), ("气", 1.0)], 0)
    # The most active token is kept, even if it contains only part of a character.
    assert ([one.text for one in second.tokens], second.at, second.act) == (["�"], 0, 2.0)
    assert ([(one.text, one.act) for one in third.tokens], third.at) == ([("气", 0.0), (" �", 3.0), (" ", 0.0)], 1)


@pytest.mark.parametrize(
    ("words", "latents"), [("天气", [0]), ("天", [0]), ("气", [0, 1]), ("气天", []), (" 天气", [0])]
)
def test_a_search_finds_text_that_spans_tokens(file: Path, words: str, latents: list[int]) -> None:
    file.write_bytes(features_file(SPREAD))
    assert Features(file).search(words) == latents


def test_a_search_across_tokens_ignores_case_and_sorts_by_activation(file: Path) -> None:
    file.write_bytes(features_file({5: b"L\xc3", 7: b"\xa4M", 9: b"B"}))
    features = Features(file)
    assert [features.search(words) for words in ("lämb", "LÄMB", "mb", "bl", "ä")] == [[0], [0], [0], [1], [0]]


def test_a_search_across_tokens_checks_only_the_most_frequent_latents(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.contract.runs.features._MOST_JOINED", 1)
    file.write_bytes(features_file(SPREAD, n_fired=("I32", "i", [2], [1, 2])))
    assert Features(file).search("天气") == []
    file.write_bytes(features_file(SPREAD, n_fired=("I32", "i", [2], [2, 1])))
    assert [Features(file).search(words) for words in ("天气", "气")] == [[0], [1, 0]]


def test_a_token_with_a_partial_character_is_shown_as_bytes(file: Path) -> None:
    file.write_bytes(features_file(SPREAD, **MOVED))
    assert [one.text for one in Features(file).feature(0).promoted] == ["\\xa9"]


def test_latents_are_sorted_as_requested(file: Path) -> None:
    features = Features(file)
    assert (features.n_latents, features.n_rows) == (2, 100)
    orders = [features.order(by) for by in ("density", "largest", "latent")]
    assert orders == [[1, 0], [0, 1], [0, 1]]
    file.write_bytes(features_file(n_fired=("I32", "i", [2], [0, 8])))
    assert Features(file).order("latent") == [1]
    assert [Features(file).families.count(one) for one in ("silent", "dense")] == [1, 0]


@pytest.mark.parametrize(
    ("fired", "order"),
    [
        # There are 100,000 rows, and the two latents' maximum activations are 4 and 3. In the first case, both latents
        # fire on 0.01 % to 1 % of the rows; in the next three, at least one latent is rarer or denser.
        ((10, 1000), [0, 1]),
        ((9, 10), [1, 0]),
        ((1001, 10), [1, 0]),
        ((5, 6), [0, 1]),
        # The densest latent comes last, even after a rare one.
        ((20_000, 2000), [1, 0]),
        ((2000, 3), [1, 0]),
    ],
)
def test_sparse_latents_come_first_and_dense_latents_last(file: Path, fired: tuple[int, int], order: list[int]) -> None:
    file.write_bytes(features_file(n_fired=("I32", "i", [2], [*fired]), n_rows=("I64", "q", [1], [100_000])))
    assert Features(file).order() == order
    assert Features(file).families.count("dense") == (max(fired) > 10_000)


@pytest.mark.parametrize(
    ("fired", "token", "position", "family"),
    [
        (0, 1.0, 1.0, "silent"),
        (10_001, 1.0, 0.0, "dense"),
        (10_000, 0.95, 0.95, "token"),
        (10_000, 0.9, 0.95, "position"),
        (10, 0.95, 0.0, "token"),
        # A few activations on the same token prove nothing.
        (9, 1.0, 1.0, "rare"),
        (9, 0.0, 0.0, "rare"),
        (10, 0.9, 0.9, "other"),
    ],
)
def test_the_family_of_a_latent_depends_on_when_it_fires(
    file: Path, fired: int, token: float, position: float, family: str
) -> None:
    shares = {"token_share": ("F32", "f", [2], [token, 0.5]), "position_share": ("F32", "f", [2], [position, 0.5])}
    rows = ("I64", "q", [1], [100_000])
    file.write_bytes(features_file(n_fired=("I32", "i", [2], [fired, 500]), n_rows=rows, **shares))
    assert Features(file).families == [family, "other"]
    assert Features(file).feature(0).family == family
    assert Features(file).search(f"family:{family}") == (
        [0] if fired and family != "other" else [0, 1][: 2 * (fired > 0)]
    )


def test_without_shares_the_token_family_is_empty_and_searching_for_it_is_refused(file: Path) -> None:
    assert Features(file).families == ["other", "other"]
    with pytest.raises(UserError, match="family:token is unknown for this SAE"):
        Features(file).search("family:token")
    assert Features(file).search("family:other") == [0, 1]
    file.write_bytes(features_file(token_share=("F32", "f", [1], [0.5]), position_share=("F32", "f", [2], [0.5, 0.5])))
    with pytest.raises(UserError, match="was not written by"):
        Features(file)


def test_cosines_of_nearest_decoder_directions_are_counted_in_bins(file: Path) -> None:
    assert Features(file).nearest_histogram == [0, 0, 0, 2, *[0] * 8]
    file.write_bytes(features_file(cosines=("F32", "f", [2, 1], [-0.5, 1.0])))
    assert Features(file).nearest_histogram == [1, *[0] * 10, 1]
    file.write_bytes(features_file(cosines=("F32", "f", [2, 1], [float("nan"), 0.5])))
    assert sum(Features(file).nearest_histogram) == 1


def test_a_search_separates_latents_that_fire_on_a_word_from_ones_that_fire_near_it(file: Path) -> None:
    features = Features(file)
    assert features.search_apart("the") == ([1], [0])
    assert features.search_apart("cow") == ([], [])


def test_a_search_lists_latents_that_fire_on_a_token_before_ones_that_fire_near_it(file: Path) -> None:
    features = Features(file)
    latents = [features.search(words) for words in ("LÄMB", "the", "s", "cow")]
    # As in the order "sparse", latent 0 is listed before latent 1, which fires more often.
    assert latents == [[0], [1, 0], [0, 1], []]


@pytest.mark.parametrize("ends", [[2, 3, 99], [-5, 2, -1], [5, 0, 3]])
def test_a_corrupt_index_does_not_break_a_search(file: Path, ends: list[int]) -> None:
    latents = ("I32", "i", [5], [7, -1, 2**30, 0, 1])
    file.write_bytes(features_file(index_ends=("I64", "q", [3], ends), index_latents=latents))
    assert {latent for words in ("the", "s") for latent in Features(file).search(words)} <= {0, 1}


def test_a_token_with_unknown_text_is_shown_as_its_id(file: Path) -> None:
    assert Features(file).text(6) == "[6]"


def test_a_latent_out_of_range_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match="there is no latent 2; the SAE has latents 0 to 1"):
        Features(file).feature(2)


def test_a_missing_file_raises_a_user_error(tmp_path: Path) -> None:
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
def test_a_file_with_tensors_of_the_wrong_shape_is_refused(changes: Any, file: Path) -> None:
    file.write_bytes(features_file(**changes))
    with pytest.raises(UserError, match="was not written by `sae-train eval`; run the command again"):
        Features(file)


@settings(max_examples=150)
@given(st.data())
def test_reading_a_damaged_file_raises_a_user_error_or_returns_different_values(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    content = bytearray(features_file(data.draw(st.sampled_from([TEXTS, SPREAD]))))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "features.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    with contextlib.suppress(UserError):
        features = Features(path)
        for latent in features.order("largest"):
            features.feature(latent)
        for words in ("the", "天气"):
            features.search(words)


def test_a_file_with_a_deeply_nested_header_matches_no_weights(file: Path) -> None:
    header = b"[" * 100_000
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert not is_of_weights(file, "0123")


@pytest.mark.parametrize(
    ("words", "latents"),
    [
        ("part:B", [1]),
        ("part:chat", [1]),
        ("part:shared", [0]),
        ("part:A", []),
        ("confirmed:B", [1]),
        ("norm:>0.9", [1]),
        ("norm:<0.9", [0]),
        ("part:B lämb", []),
        ("part:shared lämb", [0]),
    ],
)
def test_latents_of_a_crosscoder_are_found_by_part(file: Path, words: str, latents: list[int]) -> None:
    file.write_bytes(features_file(**OF_PARTS, **SCALING))
    assert Features(file).search(words) == latents


def test_a_crosscoder_without_latent_scaling_still_has_parts(file: Path) -> None:
    file.write_bytes(features_file(**OF_PARTS))
    features = Features(file)
    assert (features.order("norm"), features.part_names) == ([1, 0], ("base", "chat"))
    assert features.feature(1).nu_error is None
    with pytest.raises(UserError, match="latent scaling was not measured"):
        features.search("confirmed:B")


@pytest.mark.parametrize("shape", [[2, 3], [1, 4], [4]])
def test_part_tensors_of_the_wrong_shape_are_refused(file: Path, shape: list[int]) -> None:
    values = [0.25] * (6 if shape == [2, 3] else 4)
    file.write_bytes(features_file(**(OF_PARTS | {"part_shares": ("F32", "f", shape, values)})))
    with pytest.raises(UserError, match="was not written by `sae-train eval`"):
        Features(file)
